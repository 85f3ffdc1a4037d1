"""One recovery of one slot, and the attempts it took."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from weightcache.journal import Event
from weightcache.phases import Bounded, Interval, Mark, Segment, pair, partition, seconds
from weightcache.vocabulary import domain


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
    def failed(self) -> bool:
        """Whether it ended without a correct answer, though nobody had stopped its slot on purpose."""
        return self.outcome not in (None, "ready") and not self.stopped

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

    def feed(self, event: Event, at_ns: int) -> None:
        """Take in an event of it; that it is over is for `close` to say."""
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

    def close(self, outcome: str, at_ns: int, facts: Mapping[str, Any] | None = None) -> None:
        """End it, and its attempts; ``facts`` are those of the event that says so, None where none did."""
        facts = facts or {}
        self.verified, self.generation = facts.get("verified"), facts.get("generation")
        self._closed_path = facts.get("path")
        self.stopped = outcome == "abandoned" and facts.get("reason") == "stopped"
        self.outcome, self.closed_ns = outcome, max(at_ns, self.fault_ns)
        for attempt in self.attempts:
            if attempt.outcome is None:
                is_last = attempt is self.attempts[-1]
                attempt.outcome = outcome if is_last else "crashed"
                attempt.ended_ns = self.closed_ns if is_last else self._attempt_ends(None)[attempt.number]


def _current(intervals: Iterable[Interval]) -> Interval | None:
    unfinished = (interval for interval in intervals if interval.end_ns is None and not interval.is_part)
    return max(unfinished, default=None, key=lambda interval: interval.order)
