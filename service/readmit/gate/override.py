"""An operator's override: for a limited time, engines that answer are let in whatever they answer.

It is for the night on which the golden answers are wrong and the engines are right. Who said so, why and for how long
is in the journal; it ends by itself, also when the gate has been restarted meanwhile.
"""

import logging
import time
from typing import Any, Final, NamedTuple

from readmit.gate.chronicle import Chronicle
from weightcache.journal import Event, boot_id, boottime_ns

log = logging.getLogger("readmit.gate")

LIMIT_S: Final = 86_400.0
"""Whoever wants longer wants ``unverified_ok``, or other golden answers."""


class Override(NamedTuple):
    """One override. ``ends_ns`` is boottime: whoever sets the clock back does not make it last."""

    reason: str
    user: str
    ttl_s: float
    ends_ns: int

    @classmethod
    def of(cls, event: Event) -> "Override | None":
        """What the latest event of kind ``override`` leaves in force, None if it lifted one."""
        if event.name != "set":
            return None
        facts, ttl_s = event.attributes, float(event.attributes["ttl_s"])
        now_ns = boottime_ns()
        began_ns = event.boottime_ns if event.boot_id == boot_id() else now_ns - max(0, time.time_ns() - event.wall_ns)
        return cls(str(facts["reason"]), str(facts["user"]), ttl_s, began_ns + round(ttl_s * 1e9))

    @property
    def left_s(self) -> float:
        """Seconds until it ends, 0 afterwards."""
        return max(0.0, (self.ends_ns - boottime_ns()) / 1e9)

    @property
    def ends_s(self) -> float:
        """When it ends, in Unix time as the clock is now."""
        return time.time() + self.left_s

    def facts(self) -> dict[str, Any]:
        """What the journal keeps of it."""
        return {"reason": self.reason, "user": self.user, "ttl_s": self.ttl_s}

    def __str__(self) -> str:
        return f"override by {self.user}, {self.reason}; it ends in {self.left_s:.0f} s"


class Overrides:
    """The override in force, if any, and its record in the journal."""

    def __init__(self, chronicle: Chronicle) -> None:
        self.current: Override | None = None
        self._chronicle = chronicle

    @property
    def active(self) -> bool:
        """Whether one is in force now."""
        return self.current is not None and self.current.left_s > 0

    def resume(self) -> None:
        """Go on with what was in force before this gate began."""
        if self._chronicle.override is not None:
            self.current = Override.of(self._chronicle.override)

    def begin(self, reason: str, user: str, ttl_s: float) -> Override:
        """Put one into force, in place of the one before."""
        self.current = Override(reason, user, ttl_s, boottime_ns() + round(ttl_s * 1e9))
        self._chronicle.write_override("set", self.current.facts())
        log.warning("%s", self.current)
        return self.current

    def end(self, reason: str, user: str) -> None:
        """End the one in force."""
        if self.current is not None:
            self.current = None
            self._chronicle.write_override("lifted", {"reason": reason, "user": user, "ttl_s": None})
            log.warning("the override has ended: %s", reason)
