"""Mappings known by their address, which Python's mmap does not tell of one that is read-only. See mmap(2).

Standard library only.
"""

import ctypes
import mmap
import os
from typing import Final

NORESERVE: Final = 0x4000
"""A mapping may be larger than free memory: it is never written as a whole."""
FIXED: Final = 0x10
HUGE_PAGE: Final = 2 << 20
"""Bytes, on x86-64 and on arm64 with pages of 4 KiB."""
_FAILED: Final = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]


def map_at(address: int | None, size: int, protection: int, flags: int, descriptor: int = -1, offset: int = 0) -> int:
    """Map at an address, or where the kernel likes; returns where. `unmap` ends it.

    Raises:
        OSError: the kernel refuses.
    """
    found: int | None = _libc.mmap(address, size, protection, flags, descriptor, offset)
    if found is None or found == _FAILED:
        raise _refused(f"map {size} bytes")
    return found


def unmap(address: int, size: int) -> None:
    """End a mapping."""
    _libc.munmap(address, size)


def advise(address: int, size: int, advice: int) -> bool:
    """Whether the kernel takes advice about whole pages; see madvise(2)."""
    taken: int = _libc.madvise(address, size, advice)
    return taken == 0


def pages_in_memory(address: int, size: int) -> int:
    """How many pages of a mapping are in memory.

    Raises:
        OSError: the kernel does not say.
    """
    vector = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
    if _libc.mincore(address, size, vector):
        raise _refused(f"say which of {size} bytes are in memory")
    return vector.raw.count(1)  # Linux sets no other bits (mm/mincore.c)


def _refused(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"the kernel refused to {what}: {os.strerror(number)}")
