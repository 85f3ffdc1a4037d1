"""The clock that all processes of a node share, and the boot it counts from."""

import functools
import time
from pathlib import Path


def boottime_ns() -> int:
    """Nanoseconds since boot, suspend included."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


@functools.cache
def boot_id() -> str:
    """The kernel's id of this boot; two boottimes compare only within one boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
