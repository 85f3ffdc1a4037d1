"""The state of the node from which an attempt starts: what is warm already, and what has to be read or compiled.

Two durations compare only when they were measured from the same state; the keeper records it before each fork.

Standard library only: the keeper imports this module.
"""

import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

COMPARED: Final = ("page_cache", "compile_cache", "kernel_cache")
"""The fields in which two starting states must agree. ``resident`` is none: it is what a comparison is about."""

_WEIGHTS: Final = ("*.safetensors", "*.gguf", "*.bin", "*.pt")
_WINDOW: Final = 4 << 20
_SAMPLED_BYTES: Final = 4 << 30
"""As much is looked at, evenly spread, of larger models: a terabyte takes mincore seconds, which a recovery has not."""
_COLD, _WARM = 0.1, 0.9

_COMPILE_CACHES: Final = (
    ("TORCHINDUCTOR_CACHE_DIR", "/tmp/torchinductor_{user}"),
    ("VLLM_CACHE_ROOT", "{home}/.cache/vllm/torch_compile_cache"),
)
_KERNEL_CACHES: Final = (
    ("TRITON_CACHE_DIR", "{home}/.triton/cache"),
    ("CUDA_CACHE_PATH", "{home}/.nv/ComputeCache"),
    ("FLASHINFER_WORKSPACE_BASE", "{home}/.cache/flashinfer"),
    ("DG_JIT_CACHE_DIR", "{home}/.deep_gemm"),
)


def starting_state(
    model: Path | None, environ: Mapping[str, str] = os.environ, *, resident: bool | None = None
) -> dict[str, Any]:
    """What an engine with this environment finds.

    Args:
        model: the folder of the model's shards, or None where it is not known.
        environ: the engine's environment; it names the caches.
        resident: whether weights are held in memory already, None where nobody can say.

    Returns:
        ``page_cache``: ``cold``, ``mixed`` or ``warm``, None where it cannot be known; ``page_cache_fraction``: of the
        shards' bytes, 0 to 1; ``compile_cache`` and ``kernel_cache``: ``cold`` (empty) or ``warm``; ``resident``.
    """
    try:
        fraction = page_cache_fraction(shards(model)) if model else None
    except OSError:  # a model that cannot be read stops the engine, whose message is the better one
        fraction = None
    return {
        "page_cache": None if fraction is None else _temperature(fraction),
        "page_cache_fraction": None if fraction is None else round(fraction, 3),
        "compile_cache": _cache(_COMPILE_CACHES, environ),
        "kernel_cache": _cache(_KERNEL_CACHES, environ),
        "resident": resident,
    }


def differences(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> list[str]:
    """Why two starting states do not compare, as ``field: one / other``; empty where they do.

    What was not recorded equals nothing, not even another that was not recorded.
    """
    return [
        f"{name}: {here or 'not recorded'} / {there or 'not recorded'}"
        for name in COMPARED
        if (here := (one or {}).get(name)) != (there := (other or {}).get(name)) or here is None
    ]


def shards(model: Path) -> list[Path]:
    """The weight files of a model's folder: those of the first format that has any, as loaders choose too."""
    for pattern in _WEIGHTS:
        if found := sorted(model.glob(pattern)):
            return found
    return []


def page_cache_fraction(files: list[Path]) -> float | None:
    """The share of the files' bytes in the page cache, 0 to 1, by mincore; sampled when they are very large.

    Returns:
        None when there is nothing to look at, or when the kernel would not say: to those who neither own a file nor may
        write to it, it reports every page as present.
    """
    sizes = {file: file.stat().st_size for file in files if _may_ask(file)}
    total = sum(sizes.values())
    if not total or len(sizes) < len(files):
        return None
    stride = max(_WINDOW, _WINDOW * total // _SAMPLED_BYTES // mmap.PAGESIZE * mmap.PAGESIZE)
    present = looked_at = 0
    for file, size in sizes.items():
        found, pages = _pages(file, size, stride)
        present += found
        looked_at += pages
    return present / looked_at


def _pages(file: Path, size: int, stride: int) -> tuple[int, int]:
    """The number of pages present and looked at, in windows that begin every ``stride`` bytes."""
    from weightcache import mapping  # not at the top: its ctypes is a MiB that only this function needs

    present = looked_at = 0
    with file.open("rb") as opened:
        if not size:
            return 0, 0
        address = mapping.map_at(None, size, mmap.PROT_READ, mmap.MAP_SHARED, opened.fileno())
        try:
            for offset in range(0, size, stride):
                length = min(_WINDOW, size - offset)
                present += mapping.pages_in_memory(address + offset, length)
                looked_at += -(-length // mmap.PAGESIZE)
        finally:
            mapping.unmap(address, size)
    return present, looked_at


def _may_ask(file: Path) -> bool:
    return os.geteuid() in (0, file.stat().st_uid) or os.access(file, os.W_OK)


def _temperature(fraction: float) -> str:
    if fraction <= _COLD:
        return "cold"
    return "warm" if fraction >= _WARM else "mixed"


def _cache(places: tuple[tuple[str, str], ...], environ: Mapping[str, str]) -> str:
    names = {"home": environ.get("HOME", "/"), "user": environ.get("USER", "root")}
    folders = (Path(environ.get(variable) or default.format(**names)) for variable, default in places)
    return "warm" if any(map(_has_entries, folders)) else "cold"


def _has_entries(folder: Path) -> bool:
    try:
        with os.scandir(folder) as entries:
            return any(entries)
    except OSError:  # absent, or of no use to this user
        return False
