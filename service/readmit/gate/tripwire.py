"""The death of a process, known as it begins.

A pidfd and the process's sockets tell of a death when the kernel has freed the process's memory: 20 ms for half a
gigabyte, seconds for the memory of a large engine. Before that it gives up the locks that the process's threads hold
(``futex_exit_release``). For a lock with priority inheritance it takes the waiter's word for which thread that is, so
this waits for a lock of its own that it says the process's main thread holds; the process has no part in it. That the
lock was given up is a hint only: ``/proc/PID/stat`` then says whether the process exits.

Sources: futex(2), FUTEX_LOCK_PI; the kernel's kernel/futex/pi.c and kernel/exit.c.
"""

import ctypes
import errno
import mmap
import platform
import threading
import time
from collections.abc import Callable
from typing import Final

from weightcache.process import Stat

_SYS_FUTEX: Final = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_FUTEX_LOCK_PI: Final = 6
_LOOK_S: Final = 1.0
"""How long the thread of a wire that was cut may last."""
_libc: Final = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Tripwire:
    """Calls back, in a thread of its own, when a process begins to exit. Where the kernel cannot tell, it never does.

    Args:
        pid: the process.
        start_ticks: when it started, in clock ticks since boot.
        tripped: called at most once, and not after `cut` has returned.
    """

    def __init__(self, pid: int, start_ticks: int, tripped: Callable[[], None]) -> None:
        self._pid = pid
        self._start_ticks = start_ticks
        self._tripped = tripped
        self._calling = threading.Lock()
        self._cut = False
        if _SYS_FUTEX is not None:
            threading.Thread(target=self._wait, name=f"tripwire of {pid}", daemon=True).start()

    def cut(self) -> None:
        """Call back no more."""
        with self._calling:
            self._cut = True

    def _wait(self) -> None:
        # In memory that could be shared: of a lock in private memory the kernel knows that no other process holds it.
        lock = ctypes.c_uint32.from_buffer(mmap.mmap(-1, mmap.PAGESIZE))
        while not self._cut:
            lock.value = self._pid
            error = _lock(lock, time.time() + _LOOK_S)
            if error in (errno.ETIMEDOUT, errno.EINTR):
                continue
            if self._exits():
                with self._calling:
                    if not self._cut:
                        self._tripped()
                return
            if error:
                return
            # It has executed another program, as the shell does that starts an engine.

    def _exits(self) -> bool:
        stat = Stat.read(self._pid)
        return stat is None or stat.exiting or stat.start_ticks != self._start_ticks


def _lock(lock: ctypes.c_uint32, until_s: float) -> int:
    """Wait for a lock, at most until a Unix time; returns an errno, 0 once its holder has given it up."""
    seconds, rest = divmod(until_s, 1)
    until = _Timespec(int(seconds), int(rest * 1e9))
    taken = _libc.syscall(_SYS_FUTEX, ctypes.byref(lock), _FUTEX_LOCK_PI, 0, ctypes.byref(until), None, 0)
    return ctypes.get_errno() if taken else 0
