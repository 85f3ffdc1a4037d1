"""From files to GPU memory: pinned staging buffers, several threads, and no second copy in the page cache.

Each thread reads a tensor block by block into pinned memory, hashes it there, and copies it to the GPU on a stream of
its own while it reads the next block. Files that are not in the page cache are read around it (O_DIRECT): a model is
read once, and what it would push out of memory others need.
"""

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import torch

from weightcache.digest import new_hash, tensor_memory
from weightcache.errors import CheckpointError
from weightcache.starting_state import page_cache_fraction

BLOCK_BYTES: Final = 16 << 20
"""What a thread reads at once: long enough for a disk to run at its speed, short enough to overlap with the copies."""
THREADS: Final = 16
"""One thread reads from memory and hashes about 1.5 GiB a second."""
_PAGE: Final = 4096
"""O_DIRECT wants offsets, lengths and addresses in multiples of the device's block, which is at most this."""


class Piece(NamedTuple):
    """Bytes of a file and where they go: ``size`` of them, from ``offset`` of the file to byte ``into`` of memory."""

    path: Path
    offset: int
    size: int
    into: int


class Part(NamedTuple):
    """What a block holds of a piece: ``size`` bytes from ``start`` of the block, for byte ``into`` of memory."""

    piece: Piece
    start: int
    into: int
    size: int


class Block(NamedTuple):
    """A run of a file that is read at once."""

    path: Path
    start: int
    size: int
    parts: list[Part]


class _Run(NamedTuple):
    """Pieces that one thread reads, in the order of the file: one large one, or several small ones."""

    descriptor: int
    path: Path
    pieces: list[Piece]


class Filled(NamedTuple):
    """What was read: bytes from files, and each piece's blake3 by its place in memory."""

    read: int
    digests: dict[int, bytes]


def fill(
    target: torch.Tensor,
    pieces: Iterable[Piece],
    *,
    threads: int = THREADS,
    direct: bool | None = None,
    done: Callable[[int], None] | None = None,
) -> Filled:
    """Read pieces of files into memory.

    Args:
        target: uint8, one dimension, on a GPU (or in host memory, which needs no staging but gets it all the same).
        pieces: in any order; no two go to the same place.
        threads: how many read at the same time.
        direct: read around the page cache; if None, each file that is mostly not in it.
        done: called with the bytes of each piece, by one thread at a time.

    Raises:
        CheckpointError: ``truncated`` or ``unreadable``.
    """
    by_file: dict[Path, list[Piece]] = {}
    for piece in pieces:
        by_file.setdefault(piece.path, []).append(piece)
    work: queue.SimpleQueue[_Run] = queue.SimpleQueue()
    with contextlib.ExitStack() as files:
        for path, members in by_file.items():
            around = (page_cache_fraction([path]) or 0.0) < 0.5 if direct is None else direct
            descriptor = _open(path, around)
            files.callback(os.close, descriptor)
            for run in _runs(members):
                work.put(_Run(descriptor, path, run))
        return _Filling(target, work, done or (lambda size: None)).run(threads)


class _Filling:
    """Threads that work off a queue."""

    def __init__(self, target: torch.Tensor, work: "queue.SimpleQueue[_Run]", done: Callable[[int], None]) -> None:
        self._target = target
        self._work = work
        self._done = done
        self._lock = threading.Lock()
        self._read = 0
        self._digests: dict[int, bytes] = {}
        self._failures: list[BaseException] = []

    def run(self, threads: int) -> Filled:
        readers = [
            threading.Thread(target=self._work_off, name=f"fill-{number}")
            for number in range(min(threads, self._work.qsize()))
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        if self._failures:
            raise self._failures[0]
        return Filled(self._read, self._digests)

    def _work_off(self) -> None:
        try:
            reader = _Reader(self._target)
            while not self._failures:
                try:
                    run = self._work.get_nowait()
                except queue.Empty:
                    break
                read, digests = reader.read(run)
                with self._lock:
                    self._read += read
                    self._digests.update(digests)
                    self._done(sum(piece.size for piece in run.pieces))
            reader.finish()
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that asked
            self._failures.append(error)


class _Reader:
    """One thread's two staging buffers and, for a GPU, its stream."""

    def __init__(self, target: torch.Tensor) -> None:
        self._target = target
        pinned = target.is_cuda
        self._buffers = [torch.empty(BLOCK_BYTES + 2 * _PAGE, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        starts = [-buffer.data_ptr() % _PAGE for buffer in self._buffers]
        self._buffers = [buffer[start:] for buffer, start in zip(self._buffers, starts, strict=True)]
        self._stream = torch.cuda.Stream(target.device) if target.is_cuda else None  # type: ignore[no-untyped-call]
        self._copied = [torch.cuda.Event() for _ in range(2)] if target.is_cuda else []  # type: ignore[no-untyped-call]
        self._turn = 0

    def read(self, run: _Run) -> tuple[int, dict[int, bytes]]:
        """Read a run's pieces to their places; bytes read, and each piece's blake3."""
        hashes = {piece.into: new_hash(threads=1) for piece in run.pieces}
        total = 0
        for block in _blocks(run.path, run.pieces):
            self._turn = 1 - self._turn
            if self._copied:
                self._copied[self._turn].synchronize()  # the copies out of this buffer, two blocks ago
            buffer = self._buffers[self._turn]
            memory = tensor_memory(buffer)
            _read(run.descriptor, block, memory[: block.size])
            self._copy(buffer, block)
            for piece, start, _, size in block.parts:
                hashes[piece.into].update(memory[start : start + size])
            total += block.size
        return total, {into: digest.digest() for into, digest in hashes.items()}

    def finish(self) -> None:
        """Wait for the copies."""
        if self._stream is not None:
            self._stream.synchronize()

    def _copy(self, buffer: torch.Tensor, block: Block) -> None:
        with torch.cuda.stream(self._stream):  # no stream, no effect
            for _, start, into, size in block.parts:
                self._target[into : into + size].copy_(buffer[start : start + size], non_blocking=True)
        if self._stream is not None:
            self._copied[self._turn].record(self._stream)


def _open(path: Path, around: bool) -> int:
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        if around:
            try:
                return os.open(path, flags | os.O_DIRECT)
            except OSError:  # a file system without direct reads, such as tmpfs
                pass
        return os.open(path, flags)
    except OSError as error:
        raise CheckpointError("unreadable", f"{path} cannot be read: {error.strerror}", path=str(path)) from error


def _runs(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """The pieces of one file in runs of about a block; a hash takes its bytes in order, so no piece is divided."""
    run: list[Piece] = []
    size = 0
    for piece in sorted(pieces, key=lambda each: each.offset):
        if run and size + piece.size > BLOCK_BYTES:
            yield run
            run, size = [], 0
        run.append(piece)
        size += piece.size
    if run:
        yield run


def _blocks(path: Path, pieces: Sequence[Piece]) -> list[Block]:
    """The pieces of one file, cut into runs of at most `BLOCK_BYTES` that begin and end on a page."""
    blocks: list[Block] = []
    for piece in sorted(pieces, key=lambda each: each.offset):
        at, into, left = piece.offset, piece.into, piece.size
        while left:
            block = blocks[-1] if blocks else None
            if block is None or not block.start <= at < block.start + BLOCK_BYTES:
                block = Block(path, at // _PAGE * _PAGE, 0, [])
                blocks.append(block)
            size = min(left, block.start + BLOCK_BYTES - at)
            block.parts.append(Part(piece, at - block.start, into, size))
            end = -(-(at + size - block.start) // _PAGE) * _PAGE
            blocks[-1] = block._replace(size=max(block.size, end))
            at, into, left = at + size, into + size, left - size
    return blocks


def _read(descriptor: int, block: Block, buffer: memoryview) -> None:
    needed = max(part.start + part.size for part in block.parts)
    done = 0
    while done < needed:
        try:
            got = os.preadv(descriptor, [buffer[done:]], block.start + done)
        except OSError as error:
            message = f"{block.path} cannot be read: {error.strerror}"
            raise CheckpointError("unreadable", message, path=str(block.path)) from error
        if got == 0:
            raise CheckpointError(
                "truncated",
                f"{block.path} ended while it was read",
                expected=f"{block.start + needed} bytes",
                found=f"{block.start + done} bytes",
                remedy="Download the file again",
                path=str(block.path),
            )
        done += got
