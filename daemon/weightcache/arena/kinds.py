"""The kinds of arena, and which one a model's device takes. CUDA is touched only where weights are on a GPU."""

from collections.abc import Sequence

import torch

from weightcache.arena import MappedArena, WritableArena
from weightcache.arena.memfd import MemfdMapping, MemfdWriter
from weightcache.errors import CacheMiss
from weightcache.manifest import Manifest


def writer(size: int, device: torch.device) -> WritableArena:
    """An empty arena of ``size`` bytes where the weights of a model on ``device`` belong.

    Raises:
        CacheMiss: it cannot be made: ``resource``, ``ipc_unavailable``, or ``device`` for a device of another kind.
    """
    if device.type == "cpu":
        return MemfdWriter(size)
    if device.type == "cuda":
        from weightcache.arena.cuda_vmm import CudaVmmWriter

        return CudaVmmWriter(size, _ordinal(device.index))
    raise CacheMiss("device", "weights on this device cannot be kept", expected="cpu or cuda", found=device.type)


def mapping(
    manifest: Manifest, descriptors: Sequence[int], device: int | None = None, rows: Sequence[int] | None = None
) -> MappedArena:
    """An arena mapped for this process.

    Args:
        manifest: validated.
        descriptors: the arena's chunks in order; may be closed once this returns.
        device: CUDA ordinal for weights on a GPU; torch's current device if None.
        rows: whose digests a GPU may begin with at once.

    Raises:
        CacheMiss: it cannot be mapped here.
    """
    if manifest.arena == "memfd":
        return MemfdMapping(descriptors[0], manifest.size)
    if manifest.arena == "cuda_vmm" and torch.cuda.is_available():
        from weightcache.arena.cuda_vmm import CudaVmmMapping

        return CudaVmmMapping(descriptors, manifest, _ordinal(device), rows=rows)
    raise CacheMiss(
        "device",
        f"the weights are on {manifest.device or manifest.arena}, which this process cannot use",
        expected="an arena of kind memfd, or a CUDA device",
        found=manifest.arena,
    )


def verified_share(manifest: Manifest) -> float:
    """The share of tensors to verify before binding unless told otherwise: sealed bytes cannot have changed."""
    return 0.0 if manifest.arena == "memfd" else 1.0


def _ordinal(device: int | None) -> int:
    return torch.cuda.current_device() if device is None else device
