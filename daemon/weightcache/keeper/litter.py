"""Shared memory and sockets that engines leave behind when they are killed.

Only its creator may remove a segment's or a socket's name, and a killed creator does not. So the names that a slot's
processes have mapped or bound are noted while they live, and removed once all of them are dead and nobody else has any.
Nothing else is touched: a name counts only if it looks like what engines make for themselves, if the slot's own
processes had it, and if it still is the file that they had. Sources: shm_overview(7), unix(7), proc(5). Standard
library only.
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
_SOCKETS: Final = re.compile(r"/.*/[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""Paths of vLLM's ZeroMQ sockets, in the folder for temporary files."""
_MAPPED: Final = re.compile(rb" (\d+) +/dev/shm/")
"""The inode in a line of ``/proc/PID/maps``; not the name, since a semaphore's maker maps it under another one."""


class Litter:
    """The segments that one slot's processes map, and the sockets that they have bound."""

    def __init__(self) -> None:
        self.noted: set[tuple[str, int]] = set()
        """Names of segments, paths of sockets, and the inodes of both."""

    def note(self, session: int) -> None:
        """Note what the processes of a session have now."""
        bound = {(path, inode): sockets for path, sockets in _bound().items() if (inode := _inode(path)) is not None}
        unknown = {*_segments(), *bound} - self.noted
        if not unknown:
            return  # reading maps takes milliseconds, and a recovery may be under way
        mapped: set[int] = set()
        opened: set[int] = set()
        for pid in _processes():
            stat = Stat.read(pid)
            if stat is not None and stat.session == session:
                mapped.update(_mapped(pid))
                opened.update(_opened(pid))
        self.noted.update(it for it in unknown if it[1] in mapped or opened & bound.get(it, set()))

    def clear(self) -> list[str]:
        """Remove what was noted and nobody has; returns the names. Call it once the session is dead."""
        if not self.noted:
            return []
        mapped = {inode for pid in _processes() for inode in _mapped(pid)}
        bound = _bound()
        left = [(name, inode) for name, inode in sorted(self.noted) if name not in bound and inode not in mapped]
        self.noted.clear()
        return [name for name, inode in left if _remove(FOLDER / name, inode)]


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


def _opened(pid: int) -> Iterator[int]:
    """The inodes of a process's sockets, which are not those of their files."""
    with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # closed meanwhile
                if (target := os.readlink(entry.path)).startswith("socket:["):
                    yield int(target[8:-1])


def _bound() -> dict[str, set[int]]:
    """By path the inodes of the sockets that are bound to it: the one that listens, and those that it accepted."""
    bound: dict[str, set[int]] = {}
    with contextlib.suppress(OSError), open("/proc/net/unix", errors="surrogateescape") as file:
        for line in file:
            fields = line.rstrip("\n").split(maxsplit=7)
            if len(fields) == 8 and _SOCKETS.fullmatch(fields[7]):
                bound.setdefault(fields[7], set()).add(int(fields[6]))
    return bound


def _inode(path: str) -> int | None:
    with contextlib.suppress(OSError):
        return os.lstat(path).st_ino
    return None


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
