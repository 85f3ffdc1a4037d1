"""The end of a session: what a dead process left running is killed before its successor starts.

Workers that outlive their leader hold ports and GPU memory that the next attempt needs. Standard library only.
"""

import signal
from collections.abc import Callable
from typing import Final

from weightcache.keeper.loop import Loop
from weightcache.process import Process, session_members

CLEAR_S: Final = 10.0
"""How long the rest of a session may take to die; what takes longer is stuck in the kernel."""


class SessionEnd:
    """Kills what is left of a session and calls back once nothing is.

    Args:
        leader: pid of its leader, which has ended. For a child of ours this must be called before it is reaped: until
            then nobody else can get its number.
        start_ticks: when the leader had started.
        done: called from the loop with the number of processes that would not die, also when there were none at all.
    """

    def __init__(self, loop: Loop, leader: int, start_ticks: int, done: Callable[[int], None]) -> None:
        self._loop = loop
        self._leader = leader
        self._start_ticks = start_ticks
        self._done = done
        self._members: set[Process] = set()
        self._limit = loop.after(CLEAR_S, self._finish)
        self._kill()
        if not self._members:
            self._limit.cancel()
            loop.after(0, self._finish)

    def _kill(self) -> None:
        for member in session_members(self._leader, self._start_ticks):
            member.send_signal(signal.SIGKILL)
            self._members.add(member)
            self._loop.watch(member, lambda member=member: self._gone(member))  # type: ignore[misc]

    def _gone(self, member: Process) -> None:
        self._forget(member)
        if not self._members:
            self._kill()  # what was forked meanwhile
        if not self._members:
            self._finish()

    def _finish(self) -> None:
        self._limit.cancel()
        stuck = len(self._members)
        for member in list(self._members):
            self._forget(member)
        self._done(stuck)

    def _forget(self, member: Process) -> None:
        self._members.discard(member)
        self._loop.unwatch(member)
        member.close()
