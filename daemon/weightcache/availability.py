"""Two clocks that run beside the episodes: how long each slot was not ready, and how long no slot was.

A slot's clock stops while it is stopped on purpose: its engine has ended and nobody opened an episode for that, or its
episode was abandoned because of that. After any other abandoned episode it goes on, since nobody is recovering and the
slot is still not ready, until the slot is stopped on purpose as well, or its keeper is told to end.

Time without readiness burns the budget for faults, except in a planned recovery until its deadline.

Standard library only.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from weightcache.episodes import Change, Episode, Replay
from weightcache.journal import Event
from weightcache.slo import Objectives
from weightcache.vocabulary import PLANNED_CAUSES

State = Literal["ready", "unready", "stopped"]


class Outage(NamedTuple):
    """A time in which no slot of the node was ready; ``end_ns`` is None while it lasts. Times as in `Replay`."""

    begin_ns: int
    end_ns: int | None


@dataclass
class Readiness:
    """What a slot, or the node, was since when, and for how long in all."""

    state: State = "stopped"
    since_ns: int = 0
    ready_ns: int = 0
    unready_ns: int = 0
    burned_ns: int = 0
    """Of the unready time, what counts against the budget."""
    grace_until_ns: int = 0
    """Until when unready time is a planned one's."""

    def unready_s(self, now_ns: int) -> float:
        """Seconds without semantic readiness."""
        return (self.unready_ns + (self._running(now_ns) if self.state == "unready" else 0)) / 1e9

    def burned_s(self, now_ns: int) -> float:
        """Seconds without semantic readiness that nobody had planned, or no longer."""
        return (self.burned_ns + (self._burning(now_ns) if self.state == "unready" else 0)) / 1e9

    def observed_s(self, now_ns: int) -> float:
        """Seconds in which it was meant to be ready."""
        running = self._running(now_ns) if self.state != "stopped" else 0
        return (self.ready_ns + self.unready_ns + running) / 1e9

    def enter(self, state: State, at_ns: int, grace_until_ns: int = 0) -> None:
        """Leave one state and enter another. What has burned so far stays burned, whatever grace comes later."""
        if self.state == "ready":
            self.ready_ns += self._running(at_ns)
        elif self.state == "unready":
            self.unready_ns += self._running(at_ns)
            self.burned_ns += self._burning(at_ns)
        self.state, self.since_ns, self.grace_until_ns = state, max(at_ns, self.since_ns), grace_until_ns

    def _running(self, now_ns: int) -> int:
        return max(0, now_ns - self.since_ns)

    def _burning(self, now_ns: int) -> int:
        return max(0, now_ns - max(self.since_ns, self.grace_until_ns))


class Availability:
    """Readiness of every slot and of the node, and its outages, kept up to date event by event.

    Args:
        objectives: they say when a planned recovery is late.
    """

    def __init__(self, objectives: Objectives | None = None) -> None:
        self.slots: dict[str, Readiness] = {}
        self.service = Readiness()
        """Ready while some slot is, unready while none is and some should be."""
        self.outage: Outage | None = None
        """The outage that lasts, if any."""
        self.takeovers = 0
        """How often a slot was lost while another one was ready."""
        self._objectives = objectives or Objectives()

    def feed(self, event: Event, replay: Replay, change: Change) -> Outage | None:
        """Take in an event after the replay did; returns the outage that it ended.

        Args:
            event: the event.
            replay: the replay that was fed with it.
            change: what that returned.
        """
        ended = self._stop_all(change.lost_ns) if change.lost_ns is not None else None
        at_ns = replay.clock.place(event)
        if (closed := change.closed) is not None:
            if closed.outcome == "ready" or closed.stopped:
                ended = self._enter(closed.slot, "stopped" if closed.stopped else "ready", closed.end_ns()) or ended
            else:
                ended = self._enter(closed.slot, "unready", closed.end_ns(), self._grace_ns(closed, replay)) or ended
        if (opened := change.opened) is not None:
            # A takeover's own episode follows on that of the slot that was lost, which has been counted.
            if self._was_ready(opened) and "instead_of" not in event.attributes:
                self.takeovers += any(it.state == "ready" for name, it in self.slots.items() if name != opened.slot)
            ended = self._enter(opened.slot, "unready", opened.fault_ns, self._grace_ns(opened, replay)) or ended
        elif event.slot in self.slots and self._lost_engine(event, replay.boot, at_ns):
            # On purpose, unless an episode opens for it; that comes next, and counts from the same moment.
            ended = self._enter(event.slot, "stopped", at_ns) or ended
        elif (ending := self._ending(event)) and event.boot_id == replay.boot:
            for name in ending:
                if self.slots[name].state == "unready" and replay.slots[name].episode is None:  # given up before
                    ended = self._enter(name, "stopped", at_ns) or ended
        elif event.kind == "lookup" and event.slot is not None:
            episode = replay.slots[event.slot].episode
            if episode is not None and episode.id == event.episode and episode.cause in PLANNED_CAUSES:
                ended = self._enter(event.slot, "unready", at_ns, self._grace_ns(episode, replay)) or ended
        return ended

    def _stop_all(self, lost_ns: int) -> Outage | None:
        """No engine outlives its boot: until an episode says otherwise, what was ready has stopped."""
        ended = None
        for name in [name for name, slot in self.slots.items() if slot.state == "ready"]:
            ended = self._enter(name, "stopped", lost_ns) or ended
        return ended

    def _lost_engine(self, event: Event, boot: str | None, at_ns: int) -> bool:
        """Whether an event is the end of the engine that made its slot ready; that of an earlier one may come late."""
        is_exit = event.kind == "process" and event.name == "exited" and event.attributes.get("process") == "engine"
        readiness = self.slots[event.slot or ""]
        return is_exit and readiness.state == "ready" and event.boot_id == boot and at_ns >= readiness.since_ns

    def _ending(self, event: Event) -> list[str]:
        """The slots that are meant no more after an event: stopped on purpose, themselves or with their keeper."""
        match event.kind, event.name, event.attributes.get("process"):
            case "process", "stopped", "engine" if event.slot in self.slots:
                return [event.slot]
            case "process", "exited", "keeper" if event.attributes.get("exit_code") == 0:
                return list(self.slots)
        return []

    def _was_ready(self, opened: Episode) -> bool:
        """Whether a recovery's fault ended readiness; a crash is told of as the engine's exit first."""
        readiness = self.slots.get(opened.slot, _NEVER)
        stopped_by_it = (
            readiness.state == "stopped" and readiness.ready_ns > 0 and readiness.since_ns >= opened.fault_ns
        )
        return readiness.state == "ready" or stopped_by_it

    def _grace_ns(self, episode: Episode, replay: Replay) -> int:
        """Until when a recovery burns nothing."""
        if episode.cause not in PLANNED_CAUSES:
            return 0
        last = replay.slots[episode.slot].last
        threshold_s = self._objectives.threshold_s(episode.path, last.path if last and last is not episode else None)
        return episode.fault_ns + round(threshold_s * 1e9)

    def _enter(self, slot: str, state: State, at_ns: int, grace_until_ns: int = 0) -> Outage | None:
        self.slots.setdefault(slot, Readiness(since_ns=at_ns)).enter(state, at_ns, grace_until_ns)
        states = {readiness.state for readiness in self.slots.values()}
        ready, wanted = "ready" in states, "unready" in states
        graces = [readiness.grace_until_ns for readiness in self.slots.values() if readiness.state == "unready"]
        self.service.enter("ready" if ready else "unready" if wanted else "stopped", at_ns, min(graces, default=0))
        if wanted and not ready:
            self.outage = self.outage or Outage(at_ns, None)
        elif self.outage is not None:
            ended, self.outage = Outage(self.outage.begin_ns, max(at_ns, self.outage.begin_ns)), None
            return ended
        return None


_NEVER = Readiness()
