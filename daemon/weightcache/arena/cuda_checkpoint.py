"""From a checkpoint's files straight into a GPU arena, so that the GPU never holds these weights twice.

What torch's allocator would add goes too: it puts five tensors of 3.4 MiB into a segment of 20 MiB, which is a sixth
more for a model of many small ones.
"""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final, NamedTuple

import torch

from weightcache.arena import align
from weightcache.arena.cuda_driver import Driver
from weightcache.arena.cuda_fill import Piece, fill
from weightcache.arena.cuda_vmm import CudaVmmWriter
from weightcache.checkpoint import DTYPES, Checkpoint, TensorInfo
from weightcache.checkpoint.refusal import refusal
from weightcache.digest import TensorDigest, checkpoint_digest, new_hash


class Resident(NamedTuple):
    """A checkpoint in memory: the arena, every tensor by name (on the arena, or in host memory), what was read."""

    arena: CudaVmmWriter
    tensors: dict[str, torch.Tensor]
    read: int


def load(
    checkpoint: Checkpoint,
    device: int,
    names: Collection[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
    driver: Driver | None = None,
    *,
    direct: bool | None = None,
) -> Resident:
    """Read every tensor of a checkpoint. Sets ``checkpoint.digest``.

    Args:
        checkpoint: after its preflight.
        device: CUDA ordinal.
        names: the tensors that go to the arena; the others go to host memory. All of them if None.
        progress: told bytes done and bytes in all.
        driver: this process's own if None.
        direct: read around the page cache; if None, each file that is mostly not in it.

    Raises:
        CheckpointError: ``changed``, ``truncated`` or ``unreadable``.
        CacheMiss: there is no room on the GPU, or it cannot make an arena.
    """
    done = 0

    def advance(size: int) -> None:
        nonlocal done
        done += size
        if progress is not None:
            progress(done, checkpoint.total_bytes)

    placed = [name for name in checkpoint.tensors if names is None or name in names]
    others = [name for name in checkpoint.tensors if names is not None and name not in names]
    offsets, size = _offsets(checkpoint, placed)
    host_offsets, host_size = _offsets(checkpoint, others)
    spare = align(host_size + checkpoint.total_bytes // 8 + (1 << 30), 1 << 21)
    arena = CudaVmmWriter(size, device, spare=spare, driver=driver)
    try:
        host = torch.empty(host_size, dtype=torch.uint8)
        read, digests = 0, dict[str, bytes]()
        for target, where in ((arena.room(), offsets), (host, host_offsets)):
            full = {name: into for name, into in where.items() if checkpoint.tensors[name].nbytes}
            filled = fill(
                target, [_piece(checkpoint, name, into) for name, into in full.items()], direct=direct, done=advance
            )
            read += filled.read
            digests |= {name: filled.digests[into] for name, into in full.items()}
        _require_unchanged(checkpoint)
        tensors = {name: _shaped(arena.room(), into, checkpoint.tensors[name]) for name, into in offsets.items()}
        tensors |= {name: _shaped(host, into, checkpoint.tensors[name]) for name, into in host_offsets.items()}
    except BaseException:
        arena.close()
        raise
    checkpoint.digest = checkpoint_digest(
        TensorDigest(name, info.dtype, info.shape, digests.get(name, _EMPTY))
        for name, info in checkpoint.tensors.items()
    )
    return Resident(arena, tensors, read)


def _offsets(checkpoint: Checkpoint, names: Collection[str]) -> tuple[dict[str, int], int]:
    """Where each of these tensors begins, one after the other, and the bytes they take."""
    offsets, end = {}, 0
    for name in names:
        offsets[name] = end
        end = align(end + checkpoint.tensors[name].nbytes)
    return offsets, end


def _piece(checkpoint: Checkpoint, name: str, into: int) -> Piece:
    info = checkpoint.tensors[name]
    return Piece(Path(checkpoint.folder.locate(info.file)), info.begin, info.nbytes, into)


def _shaped(memory: torch.Tensor, into: int, info: TensorInfo) -> torch.Tensor:
    shape = info.shape if DTYPES[info.dtype].bits >= 8 else (*info.shape[:-1], info.shape[-1] // 2)
    dtype = getattr(torch, DTYPES[info.dtype].torch)
    made = torch.empty(0, dtype=dtype, device=memory.device)
    if not info.nbytes:
        return made.view(shape)
    # A storage of its own: saving one module shall not write them all.
    stride = torch.empty(shape, dtype=dtype, device="meta").stride()
    return made.set_(memory.untyped_storage()[into : into + info.nbytes], 0, shape, stride)


def _require_unchanged(checkpoint: Checkpoint) -> None:
    if checkpoint.stamp() != checkpoint.files:
        raise refusal(
            "changed",
            f"the files of {checkpoint.path} changed while they were read",
            expected="the files that were checked",
            found="another size, inode or time stamp",
            remedy="Do not write to a checkpoint in use; start again",
            path=checkpoint.path,
        )


_EMPTY: Final = new_hash(threads=1).digest()
"""The hash of a tensor without bytes."""
