"""vLLM's lines, as of 0.31 and 0.32: ``vllm/v1/engine/core.py``, ``v1/worker/*``, ``weight_cache/ipc_loader.py``."""

from typing import Final

from readmit.observe.markers import END, Marker, Miss, Table

_FIELDS: Final = {
    "checkpoint": "checkpoint_digest",
    "model_arch": "model_arch",
    "tp_size": "tp_size",
    "tp_rank": "tp_rank",
    "pp_size": "pp_size",
    "pp_rank": "pp_rank",
    "dp_size": "dp_size",
    "dtype": "dtype",
    "quantization": "quant_method",
    "quant_config_hash": "quant_config_hash",
    "revision": "revision",
    "vllm_version": "layout_id",
}
"""Fields of vLLM's ``WeightCacheKey`` and of our fingerprint that mean the same."""

TABLE: Final = Table(
    engine="vllm",
    versions=("0.31", "0.32"),
    version=r"(?:version |LLM engine \(v)(\d+\.\d+[\w.]*)",
    rank=r"\((?:Vllm)?Worker(?:[-_](?:TP|PP\d+_TP)?)?(\d+) ",
    # Until a worker joins its group, every process of it is being started and imports: the API server, the engine core
    # and the workers, one after the other.
    first="import",
    markers=(
        Marker(r"\bworld_size=\d+ rank=\d+ local_rank=", "distributed_init"),
        Marker(r"Starting to load model ", "load_weights"),
        Marker(r"Mapped \d+ tensors from the weight cache daemon", result="hit"),
        Marker(r"Weight cache unusable \(", result="miss"),
        Marker(r"Weight cache IPC loading failed", result="miss"),
        Marker(r"Unsupported(?:Quant|Platform)ForIPCError: ", result="miss"),
        Marker(r"Model loading took |Using \w+ KV cache layout", "kv_profile"),  # the former on a GPU only
        Marker(r"Warming up model for the compilation", "compile"),
        Marker(r"Warming up done\.", "kv_profile"),
        Marker(r"torch\.compile took .* in total|torch\.compile takes ", "kv_profile"),
        Marker(r"Dynamo bytecode transform|Using cache directory: .* torch\.compile", "compile"),
        Marker(r"KV cache size: ", "cache_alloc"),
        Marker(r"Capturing CUDA graphs", "graph_capture"),
        Marker(r"Graph capturing finished in ", "kernel_warmup"),
        Marker(r"init engine \(profile, create kv cache, warmup model\) took ", "server_ready"),
        Marker(r"Application startup complete", END),
    ),
    misses=(
        Miss(r"mismatch on fields: \['?(\w+)", "fingerprint", _FIELDS),
        Miss(r"role mismatch", "fingerprint"),
        Miss(r"Daemon GPU .* != engine GPU", "device"),
        Miss(r"UnsupportedQuantForIPCError", "quant_not_allowed"),
        Miss(r"UnsupportedPlatformForIPCError", "ipc_unavailable"),
        Miss(r"did not become ready within", "daemon_loading"),
        Miss(r"No such file|is unavailable", "no_daemon"),
        Miss(r"Cannot connect .*timed out", "timeout"),
        Miss(r"Cannot connect", "refused"),
        Miss(r"daemon error: .*released", "absent"),
        # The sentence does not say what it was; that the exchange failed is all that is known.
        Miss(r"", "protocol"),
    ),
    asks=r"(?:^| )--load-format[ =]ipc_cache( |$)",
    own=r"(?:^| )--load-format[ =]weightcache( |$)",
)
