"""Memory files in huge pages: a gigabyte is then 512 entries of a page table instead of 262,144.

An engine that attaches takes a page fault for each entry that it touches, and gives all of them back when it dies;
every product with weights looks them up. ``madvise(2)``, MADV_COLLAPSE (Linux 6.1), works whatever
``transparent_hugepage/shmem_enabled`` says. Where a kernel or its memory has none to give, pages stay small.
"""

import ctypes
import mmap
import os
import time
from typing import Final

from weightcache.errors import ResourceError

HUGE_PAGE: Final = 2 << 20
"""Bytes, on x86-64 and on arm64 with pages of 4 KiB."""
_MADV_COLLAPSE: Final = 25
_PROT_NONE: Final = 0
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
_PIECE: Final = 16 * HUGE_PAGE
_SLOWEST: Final = 1 << 30
"""Bytes a second. Where memory is in pieces, the kernel moves other pages about first: that is not waited for."""
_PATIENCE_S: Final = 0.05
"""How much longer it may take all the same."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def map_aligned(descriptor: int, size: int, protection: int, flags: int, offset: int = 0) -> int:
    """Map a file where its huge pages can be mapped as such; returns the address. `unmap` ends it.

    Raises:
        ResourceError: the kernel refuses.
    """
    room = size + HUGE_PAGE
    begin = _mapped(None, room, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0)
    address = -(-begin // HUGE_PAGE) * HUGE_PAGE
    try:
        _mapped(address, size, protection, flags | _MAP_FIXED, descriptor, offset)
    except ResourceError:
        unmap(begin, room)
        raise
    end = -(-(address + size) // mmap.PAGESIZE) * mmap.PAGESIZE
    for rest, length in ((begin, address - begin), (end, begin + room - end)):
        if length:
            unmap(rest, length)
    return address


def unmap(address: int, size: int) -> None:
    """End a mapping."""
    _libc.munmap(address, size)


def reserve(descriptor: int, start: int, size: int) -> bool:
    """Have a part of an empty memory file in huge pages, as far as it is made of whole ones.

    Args:
        descriptor: the file, long enough.
        start: in bytes, a multiple of `HUGE_PAGE`.
        size: in bytes.

    Returns:
        Whether to go on like this: the kernel had huge pages to give, and did not take long.
    """
    size = size // HUGE_PAGE * HUGE_PAGE
    if not size:
        return False
    address = map_aligned(descriptor, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, start)
    latest_s = time.monotonic() + _PATIENCE_S
    try:
        for piece in range(0, size, _PIECE):
            length = min(_PIECE, size - piece)
            for at in range(piece, piece + length, HUGE_PAGE):
                os.pwrite(descriptor, b"\0", start + at)  # what has no page at all is not collapsed
            collapsed: int = _libc.madvise(address + piece, length, _MADV_COLLAPSE)
            latest_s += length / _SLOWEST
            if collapsed != 0 or time.monotonic() > latest_s:
                return False
    finally:
        unmap(address, size)
    return True


def _mapped(address: int | None, size: int, protection: int, flags: int, descriptor: int, offset: int) -> int:
    found: int | None = _libc.mmap(address, size, protection, flags, descriptor, offset)
    if found is None or found == _MAP_FAILED:
        number = ctypes.get_errno()
        raise ResourceError(f"the kernel refused to map {size} bytes: {os.strerror(number)}", needed=size, errno=number)
    return found
