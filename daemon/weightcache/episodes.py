"""Replay of the journal into slots, episodes, attempts and phases.

::

    replay = Replay()
    replay.catch_up(journal)                # again whenever journal.last_id() moved
    replay.slots["a"].episode               # the open episode, or None
    replay.slots["a"].attempt.phase         # what its engine is doing now

Every time here is a nanosecond count of `weightcache.clock.Clock` (`Replay.clock.now` is the present). Events may come
late and out of order, because a spool is merged after the fact: each is placed by its own time, and what is derived is
derived from all that is known when asked.

Standard library only: the keeper imports this module.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from weightcache.clock import Clock
from weightcache.journal import Event, Journal
from weightcache.phases import Bounded, Interval, Mark, Segment, pair, partition, seconds
from weightcache.vocabulary import domain

_PENDING_EPISODES: Final = 64
"""How many episodes whose opening is still in some spool are waited for; more means it is never going to come."""
_BATCH: Final = 10_000


class Lookup(NamedTuple):
    """One attach of one rank. ``result`` is ``hit``, ``miss`` or ``off``; attributes as the journal's table says."""

    rank: int
    result: str
    at_ns: int
    attributes: dict[str, Any]

    @property
    def reason(self) -> str | None:
        return self.attributes.get("reason")

    @property
    def detail(self) -> str | None:
        return self.attributes.get("detail")


@dataclass
class Attempt:
    """One engine process's try within an episode."""

    number: int
    episode: "Episode" = field(repr=False)
    started_ns: int | None = None
    ended_ns: int | None = None
    outcome: str | None = None
    pid: int | None = None
    start_ticks: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    command: Any = None
    starting_state: dict[str, Any] | None = None
    lookups: list[Lookup] = field(default_factory=list)

    @property
    def phases(self) -> list[Interval]:
        """Its phases and parts on every rank, by time of beginning."""
        return [interval for interval in self.episode.intervals() if interval.attempt == self.number]

    @property
    def phase(self) -> str | None:
        """The name of the phase it is in now, None between phases and after its end."""
        current = None if self.ended_ns is not None else _current(self.phases)
        return current.name if current else None

    @property
    def path(self) -> str:
        """``hit`` only when every rank that came to its weights mapped them; a rank that missed once has missed."""
        results: dict[int, str] = {}
        for lookup in self.lookups:
            if results.get(lookup.rank) != "miss":
                results[lookup.rank] = lookup.result
        if not results:
            return "unknown"
        kinds = set(results.values())
        if len(kinds) > 1:
            return "partial" if "hit" in kinds else "miss"
        if "hit" in kinds:
            ranks = {interval.rank or 0 for interval in self.phases if interval.name == "load_weights"}
            return "unknown" if ranks - set(results) else "hit"  # some rank has yet to say, or died before it could
        return kinds.pop()

    @property
    def config(self) -> dict[str, Any] | None:
        """The fields of the `weightcache.fingerprint.CacheConfig` that one of its ranks asked for, if any said."""
        return next((it.attributes["config"] for it in self.lookups if it.attributes.get("config")), None)

    @property
    def miss(self) -> Lookup | None:
        """The miss of its lowest rank that missed."""
        return min((lookup for lookup in self.lookups if lookup.result == "miss"), default=None, key=lambda it: it.rank)


@dataclass
class Episode:
    """From the loss of semantic readiness of one slot to its return, or its abandonment."""

    id: str
    node: str
    slot: str
    cause: str
    fault_ns: int
    fault_clock: str
    previous: str | None = None
    outcome: str | None = None
    closed_ns: int | None = None
    verified: bool | None = None
    generation: str | None = None
    stopped: bool = False
    """Whether it was ended by whoever stopped its slot on purpose: nobody is meant to recover it."""
    attempts: list[Attempt] = field(default_factory=list)
    seen_ns: int = 0
    """The latest time anything was heard of it."""
    _marks: list[Mark] = field(default_factory=list, repr=False)
    _closed_path: str | None = None
    _closed_phases: dict[str, float] | None = field(default=None, repr=False)
    """`phases_s` of a closed episode, which every scrape asks for; None once something late came in."""

    @property
    def is_open(self) -> bool:
        return self.outcome is None

    @property
    def domain(self) -> str:
        return domain(self.cause)

    @property
    def attempt(self) -> Attempt | None:
        """The latest attempt."""
        return self.attempts[-1] if self.attempts else None

    @property
    def phase(self) -> Interval | None:
        """The phase it is in now and since when, ``detect`` and ``backoff`` between attempts included."""
        if not self.is_open:
            return None
        over = {attempt.number for attempt in self.attempts if attempt.ended_ns is not None}
        return _current(interval for interval in self.intervals() if interval.attempt not in over)

    @property
    def path(self) -> str:
        """How the recovery got its weights.

        It is ``hit`` only when every attempt that looked up hit, on every rank. An episode whose first attempt missed
        and died was not a fast one because its second attempt hit: it is ``partial``.
        """
        if self._closed_path:
            return self._closed_path
        paths = {attempt.path for attempt in self.attempts} - {"unknown"}
        if not paths:
            return "unknown"
        if len(paths) == 1:
            return paths.pop()
        return "partial" if paths & {"hit", "partial"} else "miss"

    @property
    def miss(self) -> Lookup | None:
        """The lookup that says why it did not hit: the lowest failing rank of the last attempt that missed."""
        misses = (attempt.miss for attempt in reversed(self.attempts))
        return next((miss for miss in misses if miss is not None), None)

    @property
    def reason(self) -> str | None:
        return self.miss.reason if self.miss else None

    @property
    def detail(self) -> str | None:
        return self.miss.detail if self.miss else None

    @property
    def total_s(self) -> float:
        """Its duration in seconds; while it is open, up to the latest event."""
        return (self.end_ns() - self.fault_ns) / 1e9

    def age_s(self, now_ns: int) -> float:
        """Its duration in seconds; while it is open, up to ``now_ns``."""
        return (self.end_ns(now_ns) - self.fault_ns) / 1e9

    def end_ns(self, now_ns: int | None = None) -> int:
        """When it closed, or while it is open: now, or the latest event when now is not given."""
        return max(self.fault_ns, self.closed_ns or now_ns or self.seen_ns)

    def phases_s(self, now_ns: int | None = None) -> dict[str, float]:
        """Seconds of each phase along the slowest rank, `UNATTRIBUTED` included; their sum is the duration."""
        if self._closed_phases is not None:
            return self._closed_phases
        phases = seconds((segment.phase, segment) for segment in self.segments(now_ns))
        self._closed_phases = None if self.is_open else phases
        return phases

    def parts_s(self, now_ns: int | None = None) -> dict[str, float]:
        """Seconds of each ``phase.part`` along the slowest rank."""
        return seconds((f"{it.phase}.{it.part}", it) for it in self.segments(now_ns) if it.part is not None)

    def intervals(self) -> list[Interval]:
        """Phases and parts of all ranks as they were marked, by time of beginning."""
        return pair(self._marks)

    def bounded(self, now_ns: int | None = None) -> list[Bounded]:
        """Every interval with the time it was over: a phase nobody ended ends with its attempt."""
        limits, end = self._attempt_ends(now_ns), self.end_ns(now_ns)
        bounded = []
        for interval in self.intervals():
            limit = limits.get(interval.attempt, end)
            bounded.append(Bounded(interval, max(interval.begin_ns, min(interval.end_ns or limit, limit))))
        return bounded

    def segments(self, now_ns: int | None = None) -> list[Segment]:
        """The episode's time from fault to end, cut into pieces along the slowest rank of each attempt."""
        return partition(self.bounded(now_ns), self.fault_ns, self.end_ns(now_ns))

    def _attempt_ends(self, now_ns: int | None) -> dict[int | None, int]:
        ends: dict[int | None, int] = {}
        following: int | None = None
        for attempt in reversed(self.attempts):
            known = [at for at in (attempt.ended_ns, following, self.closed_ns) if at is not None]
            ends[attempt.number] = min(known, default=self.end_ns(now_ns))
            following = attempt.started_ns if attempt.started_ns is not None else following
        return ends

    def _attempt(self, number: int) -> Attempt:
        for attempt in self.attempts:
            if attempt.number == number:
                return attempt
        attempt = Attempt(number, self)
        self.attempts.append(attempt)
        self.attempts.sort(key=lambda it: it.number)
        return attempt

    def _feed(self, event: Event, at_ns: int) -> None:
        self._closed_phases = None
        self.seen_ns = max(self.seen_ns, at_ns)
        facts = event.attributes
        if event.kind in ("phase_begin", "phase_end"):
            begins = event.kind == "phase_begin"
            mark = Mark(at_ns, event.id, begins, event.name, event.attempt, event.rank, facts.get("error"))
            self._marks.append(mark)
            return
        if event.attempt is None:
            return
        attempt = self._attempt(event.attempt)
        match event.kind:
            case "attempt_start":
                attempt.started_ns = at_ns
                attempt.command = facts.get("command")
                attempt.starting_state = facts.get("starting_state")
            case "attempt_end":
                attempt.ended_ns, attempt.outcome = min(at_ns, attempt.ended_ns or at_ns), event.name
                attempt.exit_code = facts.get("exit_code", attempt.exit_code)
                attempt.signal = facts.get("signal", attempt.signal)
            case "lookup":
                attempt.lookups.append(Lookup(event.rank or 0, event.name, at_ns, facts))
            case "process" if facts.get("process") == "engine":
                self._feed_process(attempt, event, at_ns)

    def _feed_process(self, attempt: Attempt, event: Event, at_ns: int) -> None:
        facts = event.attributes
        if event.name in ("spawned", "adopted"):
            attempt.pid, attempt.start_ticks = facts.get("pid"), facts.get("start_ticks")
        elif event.name == "exited" and attempt.pid in (None, facts.get("pid")):
            attempt.exit_code, attempt.signal = facts.get("exit_code"), facts.get("signal")
            if attempt.outcome is None:  # its attempt_end follows, unless the writer died as well
                attempt.ended_ns, attempt.outcome = at_ns, "crashed"

    def _close(self, outcome: str, at_ns: int) -> None:
        self.outcome, self.closed_ns = outcome, max(at_ns, self.fault_ns)
        for attempt in self.attempts:
            if attempt.outcome is None:
                is_last = attempt is self.attempts[-1]
                attempt.outcome = outcome if is_last else "crashed"
                attempt.ended_ns = self.closed_ns if is_last else self._attempt_ends(None)[attempt.number]


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
        episode._feed(event, at_ns)
        if event.kind == "episode_close" and episode.is_open:
            episode.verified, episode.generation = event.attributes.get("verified"), event.attributes.get("generation")
            episode._closed_path = event.attributes.get("path")
            episode.stopped = event.name == "abandoned" and event.attributes.get("reason") == "stopped"
            return change._replace(closed=self._close(episode, event.name, at_ns))
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
            episode._feed(early, self.clock.place(early))
        return episode, closed

    def _close(self, episode: Episode, outcome: str, at_ns: int) -> Episode:
        episode._close(outcome, at_ns)
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


def _current(intervals: Iterable[Interval]) -> Interval | None:
    unfinished = (interval for interval in intervals if interval.end_ns is None and not interval.is_part)
    return max(unfinished, default=None, key=lambda interval: interval.order)
