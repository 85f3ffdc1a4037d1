"""The reader: every byte of a checkpoint once, into private memory, its digest computed on the way."""

import os
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Final

from weightcache.checkpoint.header import DTYPES, TensorInfo
from weightcache.checkpoint.preflight import Checkpoint
from weightcache.checkpoint.refusal import reading, refusal
from weightcache.checkpoint.stamp import stamp_open
from weightcache.digest import TensorDigest, checkpoint_digest, new_hash, tensor_memory

if TYPE_CHECKING:
    import torch

CHUNK_BYTES: Final = 8 << 20
"""Read and hashed in turn: enough for several threads of the hash, and still in a processor's cache by then."""

Allocate = Callable[[int], memoryview]


def read_tensors(checkpoint: Checkpoint) -> "Iterator[tuple[str, torch.Tensor]]":
    """Every tensor of `checkpoint`, in the order of files and positions. Sets ``checkpoint.digest`` after the last.

    Each tensor has a storage of its own. ``F4`` comes with its last dimension halved, as torch packs it.

    Raises:
        CheckpointError: ``changed`` if a file is not the one that the preflight saw, ``truncated``, ``unreadable``, or
            ``dtype`` where this torch is too old for a dtype.
    """
    import torch

    buffers: list[torch.Tensor] = []

    def allocate(nbytes: int) -> memoryview:
        buffers[:] = [torch.empty(nbytes, dtype=torch.uint8)]
        return tensor_memory(buffers[0])

    for name, info in _pass_over(checkpoint, allocate):
        yield name, _shaped(buffers.pop(), name, info)


def hash_files(checkpoint: Checkpoint, progress: Callable[[int], None] | None = None) -> str:
    """The content identity of `checkpoint`, by reading its files. Sets ``checkpoint.digest``.

    Args:
        checkpoint: the checkpoint.
        progress: called with the number of bytes read so far, tensor by tensor.

    Raises:
        CheckpointError: as `read_tensors`.
    """
    memory = memoryview(bytearray(CHUNK_BYTES))
    done = 0
    for _, info in _pass_over(checkpoint, lambda nbytes: memory):
        done += info.nbytes
        if progress is not None:
            progress(done)
    assert checkpoint.digest is not None
    return checkpoint.digest


def _pass_over(checkpoint: Checkpoint, allocate: Allocate) -> Iterator[tuple[str, TensorInfo]]:
    """Read and hash tensor after tensor. Memory shorter than a tensor is used again for each of its chunks."""
    stamps = {file.name: file for file in checkpoint.files}
    digests: list[TensorDigest] = []
    for name, tensors in groupby(checkpoint.tensors.items(), key=lambda item: item[1].file):
        path = checkpoint.folder.locate(name)
        with reading(path):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if stamp_open(descriptor, name, path) != stamps[name]:
                raise _changed(path)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            for tensor, info in tensors:
                digest = _fill(descriptor, path, info, allocate(info.nbytes))
                digests.append(TensorDigest(tensor, info.dtype, info.shape, digest))
                yield tensor, info
            if stamp_open(descriptor, name, path) != stamps[name]:
                raise _changed(path)
        finally:
            os.close(descriptor)
    checkpoint.digest = checkpoint_digest(digests)


def _fill(descriptor: int, path: str, info: TensorInfo, memory: memoryview) -> bytes:
    """Read a tensor's bytes to `memory`; returns their hash."""
    digest = new_hash()
    at = info.begin
    while at < info.end:
        start = (at - info.begin) if len(memory) >= info.nbytes else 0
        chunk = memory[start : start + min(CHUNK_BYTES, info.end - at)]
        with reading(path):
            count = os.preadv(descriptor, [chunk], at)
        if count == 0:
            raise refusal(
                "truncated",
                f"{path} ended while it was read",
                expected=f"{info.end} bytes",
                found=f"{at} bytes",
                remedy="Do not write to a checkpoint in use",
                file=path,
            )
        digest.update(chunk[:count])
        at += count
    return digest.digest()


def _shaped(buffer: "torch.Tensor", name: str, info: TensorInfo) -> "torch.Tensor":
    import torch

    dtype = getattr(torch, DTYPES[info.dtype].torch, None)
    if dtype is None:
        raise refusal(
            "dtype",
            f"tensor {name} in {info.file} has a dtype that this torch lacks",
            expected=f"torch.{DTYPES[info.dtype].torch}",
            found=f"torch {torch.__version__}",
            remedy="Install a newer torch",
            file=info.file,
            tensor=name,
        )
    shape = info.shape if DTYPES[info.dtype].bits >= 8 else (*info.shape[:-1], info.shape[-1] // 2)
    return buffer.view(dtype).reshape(shape)


def _changed(path: str) -> Exception:
    return refusal(
        "changed",
        f"{path} changed while it was in use",
        expected="the file that was checked",
        found="another size, inode or time stamp",
        remedy="Do not write to a checkpoint in use; start again",
        file=path,
    )
