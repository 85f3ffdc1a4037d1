"""What an engine costs while it stands by: memory of its own, and the room for tokens that it keeps.

Resident weights are shared: every engine that maps them shows them in its RSS, and none of them costs them again. Nor
do they end with the last one, though the kernel then calls them private. What ending an engine would give back is its
anonymous memory (``Pss_Anon`` of ``/proc/PID/smaps_rollup``, see proc(5)), summed over its processes.
"""

import asyncio
import contextlib
import re
from dataclasses import asdict, dataclass
from typing import Any, Final

import aiohttp
from yarl import URL

from readmit.gate.gpu_memory import GpuMemory
from readmit.gate.process import Engine
from weightcache.process import tree

EVERY_S: Final = 30.0
_ASK_LIMIT_S: Final = 5.0
_METRICS_BYTES_LIMIT: Final = 4 << 20
# vLLM says it in blocks (the labels of an info metric), SGLang in tokens.
_BLOCKS: Final = re.compile(r"^vllm:cache_config_info\{([^\n]*)\}", re.MULTILINE)
_LABEL: Final = re.compile(r'(block_size|num_gpu_blocks|num_cpu_blocks)="(\d+)"')
_TOKENS: Final = re.compile(r"^sglang:max_total_num_tokens(?:\{[^\n]*\})? ([0-9.e+]+)$", re.MULTILINE)


@dataclass(frozen=True)
class Cost:
    """Of one engine with all its processes.

    Attributes:
        private_bytes: memory that ends with it; None where the kernel does not let us see.
        shared_bytes: what it maps of files and of resident weights, and others do or may as well.
        gpu_bytes: what the driver counts for it on all GPUs; None where it counts nothing.
        kv_tokens: tokens that its KV cache has room for; None where the engine does not say.
    """

    private_bytes: int | None
    shared_bytes: int | None
    gpu_bytes: int | None
    kv_tokens: int | None

    def to_dict(self) -> dict[str, Any]:
        """JSON-compatible."""
        return asdict(self)


async def measure(engine: Engine, url: str, gpus: GpuMemory) -> Cost:
    """What an engine costs now."""
    memory, on_gpus, kv_tokens = await asyncio.gather(
        asyncio.to_thread(memory_of, engine), asyncio.to_thread(gpu_memory_of, engine, gpus), _kv_tokens(url)
    )
    private, shared = memory or (None, None)
    return Cost(private, shared, on_gpus, kv_tokens)


def gpu_memory_of(engine: Engine, gpus: GpuMemory) -> int | None:
    """Bytes on all GPUs of a process and its descendants; None where the driver knows none of them."""
    used = gpus.by_process()
    found = [used[pid] for pid in tree(engine.pid) if pid in used]
    return sum(found) if found else None


def memory_of(engine: Engine) -> tuple[int, int] | None:
    """Private and shared bytes of a process and its descendants; None where they cannot be seen."""
    private = shared = 0
    for pid in tree(engine.pid):
        try:
            with open(f"/proc/{pid}/smaps_rollup") as lines:
                next(lines)
                kib = {name: int(size.split()[0]) for name, _, size in (line.partition(":") for line in lines)}
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        except PermissionError:
            return None
        private += kib["Pss_Anon"]
        shared += kib["Rss"] - kib["Anonymous"]
    return (private << 10, shared << 10) if engine.alive else None


async def _kv_tokens(url: str) -> int | None:
    with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
        limit = aiohttp.ClientTimeout(total=_ASK_LIMIT_S)
        async with (
            aiohttp.ClientSession(timeout=limit) as session,
            session.get(URL(url) / "metrics", allow_redirects=False) as reply,
        ):
            if reply.status == 200:
                return kv_tokens((await reply.content.read(_METRICS_BYTES_LIMIT)).decode(errors="replace"))
    return None


def kv_tokens(metrics: str) -> int | None:
    """The tokens that an engine's KV cache has room for, by its Prometheus metrics; None where they do not tell."""
    if (tokens := _TOKENS.search(metrics)) is not None:
        return int(float(tokens[1]))
    if (info := _BLOCKS.search(metrics)) is None:
        return None
    labels = {name: int(value) for name, value in _LABEL.findall(info[1])}
    blocks = labels.get("num_gpu_blocks") or labels.get("num_cpu_blocks")
    return blocks * labels["block_size"] if blocks and "block_size" in labels else None
