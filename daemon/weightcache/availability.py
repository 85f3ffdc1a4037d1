"""Two clocks that run beside the episodes: how long each slot was not ready, and how long no slot was.

A slot's clock stops while it is stopped on purpose: its engine has ended and nobody opened an episode for that. After
an abandoned episode it goes on: nobody is recovering, and the slot is still not ready.

Standard library only.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from weightcache.episodes import Change, Replay
from weightcache.journal import Event

State = Literal["ready", "unready", "stopped"]


class Outage(NamedTuple):
    """A time in which no slot of the node was ready; ``end_ns`` is None while it lasts. Times as in `Replay`."""

    begin_ns: int
    end_ns: int | None


@dataclass
class Readiness:
    """What one slot was since when, and for how long in all."""

    state: State = "stopped"
    since_ns: int = 0
    ready_ns: int = 0
    unready_ns: int = 0

    def unready_s(self, now_ns: int) -> float:
        """Seconds without semantic readiness."""
        return (self.unready_ns + (self._running(now_ns) if self.state == "unready" else 0)) / 1e9

    def observed_s(self, now_ns: int) -> float:
        """Seconds in which it was meant to be ready."""
        running = self._running(now_ns) if self.state != "stopped" else 0
        return (self.ready_ns + self.unready_ns + running) / 1e9

    def enter(self, state: State, at_ns: int) -> None:
        """Leave one state and enter another."""
        if self.state == "ready":
            self.ready_ns += self._running(at_ns)
        elif self.state == "unready":
            self.unready_ns += self._running(at_ns)
        self.state, self.since_ns = state, max(at_ns, self.since_ns)

    def _running(self, now_ns: int) -> int:
        return max(0, now_ns - self.since_ns)


class Availability:
    """Readiness of every slot, and outages of the node, kept up to date event by event."""

    def __init__(self) -> None:
        self.slots: dict[str, Readiness] = {}
        self.outage: Outage | None = None
        """The outage that lasts, if any."""

    def feed(self, event: Event, replay: Replay, change: Change) -> Outage | None:
        """Take in an event after the replay did; returns the outage that it ended.

        Args:
            event: the event.
            replay: the replay that was fed with it.
            change: what that returned.
        """
        ended = None
        if (episode := change.closed) is not None:
            state: State = "ready" if episode.outcome == "ready" else "unready"
            ended = self._enter(episode.slot, state, episode.end_ns())
        if change.opened is not None:
            ended = self._enter(change.opened.slot, "unready", change.opened.fault_ns) or ended
        elif event.slot in self.slots and self.slots[event.slot].state == "ready" and _is_engine_exit(event):
            # On purpose, unless an episode opens for it; that comes next, and counts from the same moment.
            ended = self._enter(event.slot, "stopped", replay.clock.place(event)) or ended
        return ended

    def _enter(self, slot: str, state: State, at_ns: int) -> Outage | None:
        self.slots.setdefault(slot, Readiness(since_ns=at_ns)).enter(state, at_ns)
        states = {readiness.state for readiness in self.slots.values()}
        if "ready" not in states and "unready" in states:
            self.outage = self.outage or Outage(at_ns, None)
        elif self.outage is not None:
            ended, self.outage = Outage(self.outage.begin_ns, max(at_ns, self.outage.begin_ns)), None
            return ended
        return None


def _is_engine_exit(event: Event) -> bool:
    return event.kind == "process" and event.name == "exited" and event.attributes.get("process") == "engine"
