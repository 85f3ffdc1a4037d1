"""Memory files in huge pages: a gigabyte is then 512 entries of a page table instead of 262,144.

An engine that attaches takes a page fault for each entry that it touches, and gives all of them back when it dies;
every product with weights looks them up. ``madvise(2)``, MADV_COLLAPSE (Linux 6.1), works whatever
``transparent_hugepage/shmem_enabled`` says. Where a kernel or its memory has none to give, pages stay small.
"""

import mmap
import os
import time
from typing import Final

from weightcache import mapping
from weightcache.errors import ResourceError
from weightcache.mapping import HUGE_PAGE

_MADV_COLLAPSE: Final = 25
_PROT_NONE: Final = 0
_PIECE: Final = 16 * HUGE_PAGE
_SLOWEST: Final = 1 << 30
"""Bytes a second. Where memory is in pieces, the kernel moves other pages about first: that is not waited for."""
_PATIENCE_S: Final = 0.05
"""How much longer it may take all the same."""


def map_aligned(descriptor: int, size: int, protection: int, flags: int, offset: int = 0) -> int:
    """Map a file where its huge pages can be mapped as such; returns the address. `mapping.unmap` ends it.

    Raises:
        ResourceError: the kernel refuses.
    """
    room = size + HUGE_PAGE
    try:
        begin = mapping.map_at(None, room, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mapping.NORESERVE)
        address = -(-begin // HUGE_PAGE) * HUGE_PAGE
        try:
            mapping.map_at(address, size, protection, flags | mapping.FIXED, descriptor, offset)
        except OSError:
            mapping.unmap(begin, room)
            raise
    except OSError as error:
        raise ResourceError(f"{error.strerror}", needed=size, errno=error.errno) from error
    end = -(-(address + size) // mmap.PAGESIZE) * mmap.PAGESIZE
    for rest, length in ((begin, address - begin), (end, begin + room - end)):
        if length:
            mapping.unmap(rest, length)
    return address


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
            collapsed = mapping.advise(address + piece, length, _MADV_COLLAPSE)
            latest_s += length / _SLOWEST
            if not collapsed or time.monotonic() > latest_s:
                return False
    finally:
        mapping.unmap(address, size)
    return True
