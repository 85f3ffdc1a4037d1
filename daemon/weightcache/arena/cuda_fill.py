"""From files to GPU memory: pinned staging buffers, several threads, and no second copy in the page cache.

Each thread reads blocks into pinned memory and copies their parts to the GPU on a stream of its own while it reads the
next. Files that are not in the page cache are read around it (O_DIRECT): a model is read once, and what it would push
out of memory others need.
"""

import contextlib
import os
import queue
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import torch

from weightcache.digest import tensor_memory
from weightcache.errors import CheckpointError
from weightcache.starting_state import page_cache_fraction

BLOCK_BYTES: Final = 16 << 20
"""What a thread reads at once: long enough for a disk to run at its speed, short enough to overlap with the copies."""
THREADS: Final = 8
_PAGE: Final = 4096
"""O_DIRECT wants offsets, lengths and addresses in multiples of the device's block, which is at most this."""


class Piece(NamedTuple):
    """Bytes of a file and where they go: ``size`` of them, from ``offset`` of the file to byte ``into`` of memory."""

    path: Path
    offset: int
    size: int
    into: int


class _Block(NamedTuple):
    """A run of a file that is read at once; parts are (offset in the block, target, size)."""

    path: Path
    start: int
    size: int
    parts: list[tuple[int, int, int]]


def fill(target: torch.Tensor, pieces: Iterable[Piece], *, threads: int = THREADS, direct: bool | None = None) -> int:
    """Read pieces of files into GPU memory.

    Args:
        target: uint8, one dimension, on a GPU.
        pieces: in any order.
        threads: how many read at the same time.
        direct: read around the page cache; if None, each file that is mostly not in it.

    Returns:
        Bytes read from files.

    Raises:
        CheckpointError: ``truncated`` or ``unreadable``.
    """
    by_file: dict[Path, list[Piece]] = {}
    for piece in pieces:
        by_file.setdefault(piece.path, []).append(piece)
    work: queue.SimpleQueue[tuple[_Block, int]] = queue.SimpleQueue()
    total = 0
    with contextlib.ExitStack() as files:
        for path, members in by_file.items():
            around = (page_cache_fraction([path]) or 0.0) < 0.5 if direct is None else direct
            descriptor = _open(path, around)
            files.callback(os.close, descriptor)
            for block in _blocks(path, members):
                work.put((block, descriptor))
                total += block.size
        _work_off(target, work, threads)
    return total


def _work_off(target: torch.Tensor, work: "queue.SimpleQueue[tuple[_Block, int]]", threads: int) -> None:
    failures: list[BaseException] = []

    def run() -> None:
        try:
            _Reader(target).run(work, failures)
        except BaseException as error:  # noqa: BLE001 - raised again below, by the thread that asked
            failures.append(error)

    readers = [threading.Thread(target=run, name=f"fill-{number}") for number in range(threads)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    if failures:
        raise failures[0]


class _Reader:
    """One thread's two pinned buffers and its stream."""

    def __init__(self, target: torch.Tensor) -> None:
        self._target = target
        self._buffers = [torch.empty(BLOCK_BYTES + 2 * _PAGE, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._stream = torch.cuda.Stream(target.device)  # type: ignore[no-untyped-call]
        self._copied = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]

    def run(self, work: "queue.SimpleQueue[tuple[_Block, int]]", failures: Sequence[BaseException]) -> None:
        turn = 0
        while not failures:
            try:
                block, descriptor = work.get_nowait()
            except queue.Empty:
                break
            self._copied[turn].synchronize()  # the copies out of this buffer, two blocks ago
            buffer = self._buffers[turn]
            _read(descriptor, block, tensor_memory(buffer)[: block.size])
            with torch.cuda.stream(self._stream):
                for start, into, size in block.parts:
                    self._target[into : into + size].copy_(buffer[start : start + size], non_blocking=True)
                self._copied[turn].record(self._stream)
            turn = 1 - turn
        self._stream.synchronize()


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


def _blocks(path: Path, pieces: list[Piece]) -> list[_Block]:
    """The pieces of one file, cut into runs of at most `BLOCK_BYTES` that begin and end on a page."""
    blocks: list[_Block] = []
    for piece in sorted(pieces, key=lambda each: each.offset):
        at, into, left = piece.offset, piece.into, piece.size
        while left:
            block = blocks[-1] if blocks else None
            if block is None or not block.start <= at < block.start + BLOCK_BYTES:
                block = _Block(path, at // _PAGE * _PAGE, 0, [])
                blocks.append(block)
            size = min(left, block.start + BLOCK_BYTES - at)
            block.parts.append((at - block.start, into, size))
            end = -(-(at + size - block.start) // _PAGE) * _PAGE
            blocks[-1] = block._replace(size=max(block.size, end))
            at, into, left = at + size, into + size, left - size
    return blocks


def _read(descriptor: int, block: _Block, buffer: memoryview) -> None:
    needed = max(start + size for start, _, size in block.parts)
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
