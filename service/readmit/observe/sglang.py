"""SGLang's lines, as of 0.5: ``managers/``, ``model_executor/model_runner.py``, ``weight_cache/ipc_loader.py``.

SGLang does not say its version when it starts; these lines have been the same since 0.4.
"""

from typing import Final

from readmit.observe.markers import END, Marker, Miss, Table

TABLE: Final = Table(
    engine="sglang",
    versions=(),
    version=None,
    rank=r" TP(\d+)\]",
    first="import",
    markers=(
        Marker(r"server_args=ServerArgs\(", "tokenizer_init"),
        Marker(r"Init torch distributed begin", "distributed_init"),
        Marker(r"Load weight begin", "load_weights"),
        Marker(r"\[IpcModelLoader\] Loaded model via IPC", result="hit"),
        Marker(r"\[IpcModelLoader\] Daemon socket not found", result="miss"),
        Marker(
            r"\[IpcModelLoader\] (?:Daemon config mismatch|.*refused the connection|Failed to connect)", result="miss"
        ),
        Marker(r"\[IpcModelLoader\] (?:Error communicating|Refusing to connect|.*shape/dtype mismatch)", result="miss"),
        Marker(r"\[IpcModelLoader\] (?:After IPC mapping|Weight cache not available)", result="miss"),
        Marker(r"UnsupportedQuantForIPCError: ", result="miss"),
        Marker(r"Load weight end", "cache_alloc"),
        Marker(r"Capture cuda graph begin", "graph_capture"),
        Marker(r"Memory pool end|Capture cuda graph end", "kernel_warmup"),
        Marker(r"Uvicorn running on|Application startup complete", "server_ready"),
        Marker(r"The server is fired up and ready to roll", END),
    ),
    misses=(
        Miss(r"config mismatch!", "fingerprint"),
        Miss(r"UnsupportedQuantForIPCError", "quant_not_allowed"),
        Miss(r"socket not found|Weight cache not available", "no_daemon"),
        Miss(r"refused the connection", "refused"),
        Miss(r"Refusing to connect", "peer_refused"),
        Miss(r"Failed to connect .*timed out", "timeout"),
        Miss(r"mismatch|remain on the meta device", "import_mismatch"),
        Miss(r"", "protocol"),
    ),
    asks=r"(?:^| )--weight-cache-mode[ =](?:client|daemon)( |$)",
)
