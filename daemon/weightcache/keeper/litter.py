"""Shared memory that engines leave behind when they are killed.

Only its creator may remove a segment's name, and a killed creator does not. So the names that a slot's processes have
mapped are noted while they live, and removed once all of them are dead and nobody maps them. Nothing else is touched:
a name counts only if it looks like what engines make for themselves, if the slot's own processes mapped it, and if it
still is the file that they mapped. Sources: shm_overview(7), proc(5). Standard library only.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from weightcache.process import Stat

FOLDER: Final = Path("/dev/shm")
_NAMES: Final = re.compile(
    r"psm_[0-9a-f]+"  # Python's multiprocessing.shared_memory
    r"|sem\.mp-.+"  # its semaphores
    r"|.+cpushm.*"  # vLLM's tensor parallelism on the CPU
)
_MAPPED: Final = re.compile(rb" (\d+) +/dev/shm/")
"""The inode in a line of ``/proc/PID/maps``; not the name, since a semaphore's maker maps it under another one."""


class Litter:
    """The segments that one slot's processes map."""

    def __init__(self) -> None:
        self.noted: set[tuple[str, int]] = set()
        """Names and inodes."""

    def note(self, session: int) -> None:
        """Note what the processes of a session map now."""
        unknown = set(_segments()) - self.noted
        if not unknown:
            return  # reading maps takes milliseconds, and a recovery may be under way
        inodes: set[int] = set()
        for pid in _processes():
            stat = Stat.read(pid)
            if stat is not None and stat.session == session:
                inodes.update(_mapped(pid))
        self.noted.update((name, inode) for name, inode in unknown if inode in inodes)

    def clear(self) -> list[str]:
        """Remove what was noted and nobody maps; returns the names. Call it once the session is dead."""
        if not self.noted:
            return []
        in_use = {inode for pid in _processes() for inode in _mapped(pid)}
        removed = [name for name, inode in sorted(self.noted) if inode not in in_use and _remove(FOLDER / name, inode)]
        self.noted.clear()
        return removed


def is_engines(name: str) -> bool:
    """Whether a name looks like what engines make for themselves."""
    return _NAMES.fullmatch(name) is not None


def _processes() -> Iterator[int]:
    return (int(entry) for entry in os.listdir("/proc") if entry.isdecimal())


def _mapped(pid: int) -> Iterable[int]:
    # A process of another user cannot be read; nor can it map what only our user may open.
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", "rb") as file:
        return [int(inode) for inode in _MAPPED.findall(file.read())]
    return []


def _segments() -> Iterator[tuple[str, int]]:
    with os.scandir(FOLDER) as entries:
        yield from ((entry.name, entry.inode()) for entry in entries if is_engines(entry.name))


def _remove(path: Path, inode: int) -> bool:
    with contextlib.suppress(OSError):
        status = path.stat(follow_symlinks=False)
        if status.st_ino == inode and status.st_uid == os.geteuid():
            path.unlink()
            return True
    return False
