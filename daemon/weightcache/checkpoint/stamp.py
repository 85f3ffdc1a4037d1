"""The stamp: what the file system says about a file, by which a change shows without reading it."""

import os
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from weightcache.checkpoint.refusal import reading

CLOCK_TICK_NS: Final = 20_000_000
"""The kernel stamps files with a clock that moves once a tick, at most 10 ms long. A file written within a tick of a
look at it can be written again without a trace."""

_COARSE_TICK_NS: Final = 1_000_000_000
"""The tick of file systems that keep whole seconds (ext4 with small inodes, some network ones)."""


class Stamp(NamedTuple):
    """A file at one moment: its name in the folder, its size in bytes, and times in ns since the epoch.

    The inode's change time moves with every write, also one that restores the modification time. What it cannot show:
    writes under a clock set back, and further writes through a mapping to a page that is already dirty.
    """

    name: str
    size: int
    device: int
    inode: int
    mtime_ns: int
    ctime_ns: int

    @property
    def unsettled_ns(self) -> int:
        """How long from now the file may still be written without a trace; 0 once it is settled.

        A stamp from the future, which a file server with another clock gives, does not settle until then.
        """
        tick = CLOCK_TICK_NS if self.ctime_ns % _COARSE_TICK_NS else _COARSE_TICK_NS
        return max(0, self.ctime_ns + tick - time.time_ns())


def settle(stamps: Sequence[Stamp]) -> bool:
    """Wait, a tick at most, until files that are read from now on cannot change without changing these stamps.

    Returns whether that is so: not on file systems with a coarse or another clock.
    """
    time.sleep(min(CLOCK_TICK_NS, max((stamp.unsettled_ns for stamp in stamps), default=0)) / 1e9)
    return not any(stamp.unsettled_ns for stamp in stamps)


def stamp_of(name: str, status: os.stat_result) -> Stamp:
    """The stamp of a file called `name`, from its status."""
    return Stamp(name, status.st_size, status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)


def stamp_file(root: str, name: str) -> Stamp:
    """The stamp of the file called `name` in the folder `root`, which is not opened.

    Raises:
        CheckpointError: ``unreadable``.
    """
    path = os.path.join(root, name)
    with reading(path):
        return stamp_of(name, os.stat(path))


def stamp_open(descriptor: int, name: str, path: str) -> Stamp:
    """The stamp of an open file.

    Raises:
        CheckpointError: ``unreadable``.
    """
    with reading(path):
        return stamp_of(name, os.fstat(descriptor))
