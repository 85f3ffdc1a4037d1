"""Tells when somebody makes a segment of shared memory. Standard library only.

A segment that is noted only every few seconds is left behind by a process that is killed sooner. That its name is made
is an event (inotify(7)), that it is mapped is none: so whoever is told looks a few times in the following second.
"""

import os
import struct
from collections.abc import Callable
from typing import Final

from weightcache.keeper.litter import FOLDER, is_engines
from weightcache.keeper.loop import Loop, Timer

PAUSES_S: Final = (0.01, 0.05, 0.25, 1.0)
"""Before each look after an event: a segment is mapped soon after it has a name, by other processes a little later."""
_IN_CREATE: Final = 0x100
_IN_MOVED_TO: Final = 0x80
_EVENT: Final = struct.Struct("iIII")
"""Watch, mask, cookie, length of the name that follows: ``struct inotify_event``."""
_READ_BYTES: Final = 64 << 10


class SegmentWatch:
    """Calls back soon after names of engines' shared memory appear.

    Args:
        loop: the keeper's.
        look: called a few times after each burst of new names.

    Raises:
        OSError: the kernel has no room for another watch, or there is no shared memory here.
    """

    def __init__(self, loop: Loop, look: Callable[[], None]) -> None:
        self._loop = loop
        self._look = look
        self._left: list[float] = []
        self._timer: Timer | None = None
        self._inotify = _watch(os.fsencode(FOLDER))
        loop.watch(self, self._heard)

    def fileno(self) -> int:
        """Readable when something has happened."""
        return self._inotify

    def close(self) -> None:
        """Watch no longer."""
        self._loop.unwatch(self)
        if self._timer is not None:
            self._timer.cancel()
        os.close(self._inotify)

    def _heard(self) -> None:
        heard = any(map(is_engines, _names(os.read(self._inotify, _READ_BYTES))))
        if heard and len(self._left) != len(PAUSES_S) - 1:  # or a look is due in a moment, however many names there are
            if self._timer is not None:
                self._timer.cancel()
            self._left = list(PAUSES_S)
            self._look_later()

    def _look_later(self) -> None:
        self._timer = self._loop.after(self._left.pop(0), self._due) if self._left else None

    def _due(self) -> None:
        self._look()
        self._look_later()


def _names(events: bytes) -> list[str]:
    names, place = [], 0
    while place < len(events):
        *_, length = _EVENT.unpack_from(events, place)
        place += _EVENT.size + length
        names.append(os.fsdecode(events[place - length : place].rstrip(b"\0")))
    return names


def _watch(folder: bytes) -> int:
    import ctypes  # not at the top: a quarter of a MiB that only nodes with engines pay

    libc = ctypes.CDLL(None, use_errno=True)
    inotify: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if inotify < 0 or libc.inotify_add_watch(inotify, folder, _IN_CREATE | _IN_MOVED_TO) < 0:
        number = ctypes.get_errno()
        if inotify >= 0:
            os.close(inotify)
        raise OSError(number, os.strerror(number), os.fsdecode(folder))
    return inotify
