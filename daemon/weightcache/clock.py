"""The clock that replayed events are placed on.

It counts nanoseconds: Unix time as of a boot's first event, advancing with boottime from there. Differences within a
boot are exact, whatever happens to the wall clock; across a reboot they are the wall clock's.

Standard library only: the keeper imports this module.
"""

import time
from typing import Final

from weightcache.journal import Event, boot_id, boottime_ns

_STEP_NS: Final = 1_000_000_000


class Clock:
    """Learns the boots from the events it places."""

    def __init__(self) -> None:
        self.boots: dict[str, int] = {}
        """By boot id, in the order of being heard of: the nanoseconds of Unix time at which it began."""
        self._step = 0

    def place(self, event: Event) -> int:
        """The time of an event."""
        return self.place_boottime(event, event.boottime_ns)

    def place_boottime(self, event: Event, at_ns: int) -> int:
        """The time of a boottime in the boot that an event comes from."""
        return at_ns + self.boots.setdefault(event.boot_id, event.wall_ns - event.boottime_ns)

    def now(self) -> int:
        """The present."""
        boottime = boottime_ns()
        offset = self.boots.get(boot_id())
        return time.time_ns() if offset is None else boottime + offset

    def to_wall(self, at_ns: int) -> int:
        """Unix time in nanoseconds of a time, by the wall clock as it is set now: what other machines compare with.

        The same time gives the same answer until the wall clock is stepped: if it trembled it would look like another.
        """
        step = time.time_ns() - self.now()
        if abs(step - self._step) > _STEP_NS:
            self._step = step
        return at_ns + self._step
