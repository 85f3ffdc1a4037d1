"""What the events of a journal add up to."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from weightcache.clock import Clock
from weightcache.episodes.episode import Attempt, Episode
from weightcache.journal import Event, Journal

_PENDING_EPISODES: Final = 64
"""How many episodes whose opening is still in some spool are waited for; more means it is never going to come."""
_BATCH: Final = 10_000


@dataclass
class Slot:
    """A place where one engine process runs, as the journal knows it."""

    name: str
    episode: Episode | None = None
    """The open episode."""
    last: Episode | None = None
    """The latest closed one, takeovers as a standby aside."""
    state: str | None = None
    """What the gate said last, None where no gate watches."""
    state_ns: int = 0

    @property
    def attempt(self) -> Attempt | None:
        """The latest attempt: of the open episode, else of the last one (the engine that serves)."""
        episode = self.episode or self.last
        return episode.attempt if episode else None


class Change(NamedTuple):
    """What one event did to the episodes."""

    opened: Episode | None = None
    closed: Episode | None = None
    lost_ns: int | None = None
    """When the boot before was last heard of, if this event is the first of a new one: nothing outlived that."""


class Replay:
    """The state that a journal's events add up to, kept up to date event by event.

    Args:
        keep: how many closed episodes `episodes` remembers, all of them if None.

    ``started`` is the number of episodes ever opened and ``closed`` of those closed; the difference is open.
    """

    def __init__(self, keep: int | None = None) -> None:
        self.clock = Clock()
        self.slots: dict[str, Slot] = {}
        self.boot: str | None = None
        """The present boot."""
        self.position = 0
        """The id of the latest event fed."""
        self.seen_ns = 0
        """The time of the latest event."""
        self.started = 0
        self.closed = 0
        self.pending: dict[str, list[Event]] = {}
        """Events of episodes whose opening has not come yet."""
        self._keep = keep
        self._episodes: dict[str, Episode] = {}

    @property
    def episodes(self) -> list[Episode]:
        """The remembered episodes in the order of their opening, open ones included."""
        return list(self._episodes.values())

    @property
    def open_episodes(self) -> list[Episode]:
        return [slot.episode for slot in self.slots.values() if slot.episode is not None]

    def episode(self, id_: str) -> Episode | None:
        """The remembered episode with this id."""
        return self._episodes.get(id_)

    def remember(self, episodes: Iterable[Episode]) -> None:
        """Take up episodes that a snapshot tells of."""
        self._episodes.update((episode.id, episode) for episode in episodes)

    def catch_up(self, journal: Journal) -> int:
        """Feed what a journal has beyond `position`; returns the number of events.

        Raises:
            sqlite3.Error: the database cannot be read.
        """
        fed = 0
        while events := journal.events(self.position, limit=_BATCH):
            for event in events:
                self.feed(event)
            fed += len(events)
        return fed

    def feed(self, event: Event) -> Change:
        """Take in one event; returns the episode that it opened, and the one that it closed."""
        self.position = max(self.position, event.id)
        change = Change(lost_ns=self._enter_boot(event))
        at_ns = self.clock.place(event)
        self.seen_ns = max(self.seen_ns, at_ns)
        if event.slot is not None:
            slot = self.slots.setdefault(event.slot, Slot(event.slot))
            if event.kind == "slot_state" and at_ns >= slot.state_ns:
                slot.state, slot.state_ns = event.name, at_ns
            if event.kind == "episode_open" and event.episode is not None and event.episode not in self._episodes:
                opened, closed = self._open(slot, event, event.episode, at_ns)
                change = change._replace(opened=opened, closed=closed)
        if event.episode is None:
            return change
        episode = self._episodes.get(event.episode)
        if episode is None:
            if event.kind != "episode_close":
                self._wait(event, event.episode)
            return change
        episode.feed(event, at_ns)
        if event.kind == "episode_close" and episode.is_open:
            return change._replace(closed=self._close(episode, event.name, at_ns, event.attributes))
        return change

    def _enter_boot(self, event: Event) -> int | None:
        """Whether a boot begins with an event: if so, when the one before was last heard of. No engine outlives it.

        Events of an earlier boot may come late, from spools; even the first that is heard of a boot may. A machine that
        woke up with a wrong clock is told from that by what starts there.
        """
        if event.boot_id == self.boot or (self.boot is not None and event.boot_id in self.clock.boots):
            return None
        is_start = event.kind == "process" and event.name in ("started", "readopted")
        before, lost_ns = self.boot, self.seen_ns
        if before is not None and not is_start and self.clock.place(event) < lost_ns:
            return None
        self.boot = event.boot_id
        if before is None:
            return None
        for episode in self.open_episodes:
            for attempt in episode.attempts:
                if attempt.outcome is None:
                    attempt.outcome, attempt.ended_ns = "crashed", max(lost_ns, attempt.started_ns or 0)
        return lost_ns

    def _open(self, slot: Slot, event: Event, id_: str, at_ns: int) -> tuple[Episode, Episode | None]:
        facts = event.attributes
        fault_ns = at_ns
        if (boottime := facts.get("fault_boottime_ns")) is not None:
            fault_ns = min(at_ns, self.clock.place_boottime(event, boottime))
        elif (wall := facts.get("fault_wall_ns")) is not None:
            fault_ns = min(at_ns, wall)
        if slot.last is not None and slot.last.closed_ns is not None:
            fault_ns = max(fault_ns, slot.last.closed_ns)  # the same moment is not lost twice
        # One slot has one open episode: whoever opened another one took the first for over.
        closed = self._close(slot.episode, "abandoned", fault_ns) if slot.episode else None
        cause, clock = facts.get("cause") or event.name, facts.get("fault_clock", "exit")
        episode = Episode(id_, event.node, slot.name, cause, fault_ns, clock, facts.get("previous"))
        self.started += 1
        self._episodes[id_] = slot.episode = episode
        for early in self.pending.pop(id_, ()):
            episode.feed(early, self.clock.place(early))
        return episode, closed

    def _close(self, episode: Episode, outcome: str, at_ns: int, facts: Mapping[str, Any] | None = None) -> Episode:
        episode.close(outcome, at_ns, facts)
        self.closed += 1
        slot = self.slots[episode.slot]
        if slot.episode is episode:
            slot.episode = None
        # A takeover has no engine of its own: whose engine serves is told by the one before.
        if episode.path != "standby":
            slot.last = episode
        self._forget()
        return episode

    def _forget(self) -> None:
        if self._keep is None:
            return
        closed = [id_ for id_, episode in self._episodes.items() if not episode.is_open]
        for id_ in closed[: max(0, len(closed) - self._keep)]:
            del self._episodes[id_]

    def _wait(self, event: Event, id_: str) -> None:
        self.pending.setdefault(id_, []).append(event)
        if len(self.pending) > _PENDING_EPISODES:
            del self.pending[next(iter(self.pending))]
