"""The reader: every byte of a checkpoint once, into private memory, its digest computed on the way; or one rank's part.

Several threads read and hash a tensor each, some way ahead of whoever takes them, without the interpreter lock.
"""

import math
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from itertools import groupby
from typing import TYPE_CHECKING, Final, TypeVar

from weightcache import mapping
from weightcache.checkpoint.header import DTYPES, TensorInfo
from weightcache.checkpoint.part import Part
from weightcache.checkpoint.preflight import Checkpoint
from weightcache.checkpoint.refusal import reading, refusal
from weightcache.checkpoint.stamp import Stamp, stamp_open
from weightcache.digest import TensorDigest, checkpoint_digest, new_hash, tensor_memory
from weightcache.mapping import HUGE_PAGE

if TYPE_CHECKING:
    import torch

Result = TypeVar("Result")

CHUNK_BYTES: Final = 1 << 20
"""Read and hashed in turn: small enough to still be in a processor's cache when it is hashed."""

AHEAD_BYTES: Final = 1 << 30
"""Memory that tensors take which are read before they are taken."""

MAX_THREADS: Final = 16
"""More do not read faster from one disk."""


def read_tensors(checkpoint: Checkpoint) -> "Iterator[tuple[str, torch.Tensor]]":
    """Every tensor of `checkpoint`, in the order of files and positions. Sets ``checkpoint.digest`` after the last.

    Each tensor has a storage of its own. ``F4`` comes with its last dimension halved, as torch packs it.

    Raises:
        CheckpointError: ``changed`` if a file is not the one that the preflight saw, ``truncated``, ``unreadable``, or
            ``dtype`` where this torch is too old for a dtype.
    """
    import torch

    def read(shard: _Shard, name: str, info: TensorInfo) -> tuple[bytes, torch.Tensor]:
        buffer, memory = _buffer(info.nbytes)
        digest = new_hash(threads=1)
        for at in range(0, info.nbytes, CHUNK_BYTES):
            chunk = memory[at : at + CHUNK_BYTES]
            shard.read(info.begin + at, chunk)
            digest.update(chunk)
        return digest.digest(), buffer

    digests: list[TensorDigest] = []
    for name, info, (digest, buffer) in _pass_over(checkpoint, read):
        digests.append(TensorDigest(name, info.dtype, info.shape, digest))
        yield name, _shaped(buffer, name, info)
    checkpoint.digest = checkpoint_digest(digests)


def read_parts(checkpoint: Checkpoint, part_of: Callable[[str], Part | None]) -> "Iterator[tuple[str, torch.Tensor]]":
    """One rank's tensors, in the order of files and positions. Of a tensor that is cut no other byte is read.

    What was not read cannot be hashed: ``checkpoint.digest`` stays as it is.

    Args:
        checkpoint: the checkpoint.
        part_of: by a tensor's name its part, None for all of it.

    Raises:
        CheckpointError: as `read_tensors`.
    """
    import torch

    def read(shard: _Shard, name: str, info: TensorInfo) -> torch.Tensor:
        part = part_of(name)
        runs = [(info.begin, info.nbytes)] if part is None else part.runs(info)
        shape = info.shape if part is None else part.shape(info.shape)
        buffer, memory = _buffer(math.prod(shape) * DTYPES[info.dtype].bits // 8)
        at = 0
        for begin, length in runs:
            shard.read(begin, memory[at : at + length])
            at += length
        return _shaped(buffer, name, info._replace(shape=shape))

    for name, _, tensor in _pass_over(checkpoint, read):
        yield name, tensor


def hash_files(checkpoint: Checkpoint, progress: Callable[[int], None] | None = None) -> str:
    """The content identity of `checkpoint`, by reading its files. Sets ``checkpoint.digest``.

    Args:
        checkpoint: the checkpoint.
        progress: called with the number of bytes read so far, tensor by tensor.

    Raises:
        CheckpointError: ``changed``, ``truncated`` or ``unreadable``.
    """
    local = threading.local()

    def read(shard: _Shard, name: str, info: TensorInfo) -> bytes:
        if not hasattr(local, "memory"):
            local.memory = memoryview(bytearray(CHUNK_BYTES))
        digest = new_hash(threads=1)
        for at in range(info.begin, info.end, CHUNK_BYTES):
            chunk = local.memory[: info.end - at]
            shard.read(at, chunk)
            digest.update(chunk)
        return digest.digest()

    done = 0
    digests: list[TensorDigest] = []
    for name, info, digest in _pass_over(checkpoint, read):
        digests.append(TensorDigest(name, info.dtype, info.shape, digest))
        done += info.nbytes
        if progress is not None:
            progress(done)
    checkpoint.digest = checkpoint_digest(digests)
    return checkpoint.digest


class _Shard:
    """An open weight file that is the one the preflight saw."""

    def __init__(self, path: str, stamp: Stamp) -> None:
        self.path = path
        self.stamp = stamp
        with reading(path):
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def check_unchanged(self) -> None:
        if stamp_open(self.descriptor, self.stamp.name, self.path) != self.stamp:
            raise refusal(
                "changed",
                f"{self.path} changed while it was in use",
                expected="the file that was checked",
                found="another size, inode or time stamp",
                remedy="Do not write to a checkpoint in use; start again",
                file=self.path,
            )

    def read(self, at: int, memory: memoryview) -> None:
        """Fill `memory` from byte `at` of the file on."""
        filled = 0
        while filled < len(memory):
            with reading(self.path):
                count = os.preadv(self.descriptor, [memory[filled:]], at + filled)
            if count == 0:
                raise refusal(
                    "truncated",
                    f"{self.path} ended while it was read",
                    expected=f"{self.stamp.size} bytes",
                    found=f"{at + filled} bytes",
                    remedy="Do not write to a checkpoint in use; download it again",
                    file=self.path,
                )
            filled += count

    def close(self) -> None:
        os.close(self.descriptor)


def _pass_over(
    checkpoint: Checkpoint, read: Callable[[_Shard, str, TensorInfo], Result]
) -> Iterator[tuple[str, TensorInfo, Result]]:
    """Read every tensor, several at once, in order; `read` gives what is wanted of it."""
    by_file = groupby(checkpoint.tensors.items(), key=lambda item: item[1].file)
    stamps = {stamp.name: stamp for stamp in checkpoint.files}
    with ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0))), "checkpoint") as pool:
        for file, tensors in by_file:
            shard = _Shard(checkpoint.folder.locate(file), stamps[file])
            try:
                shard.check_unchanged()
                with closing(_read_ahead(pool, shard, tensors, read)) as results:
                    yield from results
                shard.check_unchanged()
            finally:
                shard.close()


def _read_ahead(
    pool: ThreadPoolExecutor,
    shard: _Shard,
    tensors: Iterable[tuple[str, TensorInfo]],
    read: Callable[[_Shard, str, TensorInfo], Result],
) -> Generator[tuple[str, TensorInfo, Result], None, None]:
    ahead: deque[tuple[str, TensorInfo, Future[Result]]] = deque()
    ahead_bytes = 0
    try:
        for name, info in tensors:
            while ahead and ahead_bytes + info.nbytes > AHEAD_BYTES:
                ready, known, future = ahead.popleft()
                ahead_bytes -= known.nbytes
                yield ready, known, future.result()
            ahead.append((name, info, pool.submit(read, shard, name, info)))
            ahead_bytes += info.nbytes
        while ahead:
            ready, known, future = ahead.popleft()
            yield ready, known, future.result()
    finally:  # the file is closed next: nobody may still read from it
        left = [future for _, _, future in ahead if not future.cancel()]
        wait(left)


def _buffer(nbytes: int) -> "tuple[torch.Tensor, memoryview]":
    """Private memory, as a tensor and to read into."""
    import torch

    buffer = torch.empty(nbytes, dtype=torch.uint8)
    _want_huge_pages(buffer.data_ptr(), nbytes)
    return buffer, tensor_memory(buffer)


def _want_huge_pages(address: int, nbytes: int) -> None:
    """Ask for fewer and larger page faults, which cost as much as the copy does. The kernel may decline."""
    begin, end = -(-address // HUGE_PAGE) * HUGE_PAGE, (address + nbytes) // HUGE_PAGE * HUGE_PAGE
    if begin < end:
        mapping.advise(begin, end - begin, mmap.MADV_HUGEPAGE)


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
