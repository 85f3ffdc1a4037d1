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
_MAPPED: Final = re.compile(
    rb" (\d+) +/dev/shm/("
    rb"psm_[0-9a-f]+"  # Python's multiprocessing.shared_memory
    rb"|sem\.mp-[^\n ]+"  # its semaphores
    rb"|[^\n ]+cpushm[^\n ]*"  # vLLM's tensor parallelism on the CPU
    rb")\n"
)
"""Inode and name in a line of ``/proc/PID/maps``. A removed file's line ends in `` (deleted)`` and does not match."""


class Litter:
    """The segments that one slot's processes map."""

    def __init__(self) -> None:
        self._noted: set[tuple[str, int]] = set()

    def note(self, session: int) -> None:
        """Note what the processes of a session map now."""
        for pid in _processes():
            stat = Stat.read(pid)
            if stat is not None and stat.session == session:
                self._noted.update(_segments(pid))

    def clear(self) -> list[str]:
        """Remove what was noted and nobody maps; returns the names. Call it once the session is dead."""
        if not self._noted:
            return []
        in_use = {segment for pid in _processes() for segment in _segments(pid)}
        removed = [name for name, inode in sorted(self._noted - in_use) if _remove(FOLDER / name, inode)]
        self._noted.clear()
        return removed


def _processes() -> Iterator[int]:
    return (int(entry) for entry in os.listdir("/proc") if entry.isdecimal())


def _segments(pid: int) -> Iterable[tuple[str, int]]:
    # A process of another user cannot be read; nor can it map what only our user may open.
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", "rb") as file:
        return [(name.decode(errors="surrogateescape"), int(inode)) for inode, name in _MAPPED.findall(file.read())]
    return []


def _remove(path: Path, inode: int) -> bool:
    with contextlib.suppress(OSError):
        status = path.stat(follow_symlinks=False)
        if status.st_ino == inode and status.st_uid == os.geteuid():
            path.unlink()
            return True
    return False
