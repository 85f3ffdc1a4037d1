"""Phases: from marks in the journal to intervals, and from intervals to a partition of time.

Standard library only: the keeper imports this module.
"""

import itertools
from collections.abc import Iterable
from typing import Final, NamedTuple

from weightcache.vocabulary import PHASES, UNATTRIBUTED

_ORDER: Final = {name: place for place, name in enumerate(PHASES)}


class Mark(NamedTuple):
    """One end of a phase as journaled. ``name`` is ``phase`` or ``phase.part``."""

    at_ns: int
    id: int
    begins: bool
    name: str
    attempt: int | None
    rank: int | None
    error: str | None


class Interval(NamedTuple):
    """A phase or a part of one on one rank, as marked. ``end_ns`` is None while no end was journaled."""

    name: str
    begin_ns: int
    end_ns: int | None
    attempt: int | None
    rank: int | None
    error: str | None = None

    @property
    def phase(self) -> str:
        return self.name.partition(".")[0]

    @property
    def is_part(self) -> bool:
        return "." in self.name

    @property
    def order(self) -> tuple[int, int, bool]:
        """The later one of two overlapping intervals has the time they share; a phase comes before its parts."""
        return self.begin_ns, _ORDER.get(self.phase, len(PHASES)), self.is_part


class Bounded(NamedTuple):
    """An interval and when it was over, marked or not."""

    interval: Interval
    end_ns: int


class Segment(NamedTuple):
    """A piece of an episode's time and the phase it belongs to. Segments neither overlap nor leave gaps."""

    phase: str
    part: str | None
    begin_ns: int
    end_ns: int
    attempt: int | None


def pair(marks: Iterable[Mark]) -> list[Interval]:
    """The intervals that marks, in whatever order they came, make; by time of beginning."""
    begun: dict[tuple[int | None, int | None, str], list[Mark]] = {}
    intervals = []
    for mark in sorted(marks):
        opened = begun.setdefault((mark.attempt, mark.rank, mark.name), [])
        if mark.begins:
            opened.append(mark)
        elif opened:
            begin = opened.pop()
            intervals.append(Interval(mark.name, begin.at_ns, mark.at_ns, mark.attempt, mark.rank, mark.error))
    unfinished = (Interval(it.name, it.at_ns, None, it.attempt, it.rank) for rest in begun.values() for it in rest)
    return sorted([*intervals, *unfinished], key=lambda interval: interval.order)


def partition(bounded: list[Bounded], start_ns: int, end_ns: int) -> list[Segment]:
    """Cut the time from start to end into segments along the slowest rank of each attempt.

    Where marked phases overlap the one that began later has the time. A phase without an end is over when a later phase
    (in the order of `PHASES`) begins. Time that no phase covers is `UNATTRIBUTED`.
    """
    chain = _slowest(bounded)
    tops = [it.interval for it in chain if not it.interval.is_part]
    cut = [Bounded(it.interval, _end_of(it, tops)) for it in chain]
    marked = (edge for it in cut for edge in (it.interval.begin_ns, it.end_ns))
    edges = sorted({start_ns, end_ns, *(edge for edge in marked if start_ns < edge < end_ns)})
    segments: list[Segment] = []
    for begin, end in itertools.pairwise(edges):
        covering = [it.interval for it in cut if it.interval.begin_ns <= begin and it.end_ns >= end]
        top = max((it for it in covering if not it.is_part), default=None, key=lambda it: it.order)
        parts = (it for it in covering if it.is_part and top is not None and it.phase == top.name)
        part = max(parts, default=None, key=lambda it: it.order)
        segment = Segment(
            top.name if top else UNATTRIBUTED,
            part.name.partition(".")[2] if part else None,
            begin,
            end,
            top.attempt if top else None,
        )
        if segments and _same(segments[-1], segment):
            segment = segment._replace(begin_ns=segments.pop().begin_ns)
        segments.append(segment)
    return segments


def seconds(named: Iterable[tuple[str, Segment]]) -> dict[str, float]:
    """Seconds by name."""
    nanoseconds: dict[str, int] = {}
    for name, segment in named:
        nanoseconds[name] = nanoseconds.get(name, 0) + segment.end_ns - segment.begin_ns
    return {name: total / 1e9 for name, total in nanoseconds.items()}


def _slowest(bounded: list[Bounded]) -> list[Bounded]:
    """The intervals of no rank in particular, and of each attempt's rank that finished last.

    A rank that outlives its attempt, whose main process was killed, is no slower for what it began after the end.
    """
    last: dict[int | None, dict[int, int]] = {}
    for interval, end_ns in bounded:
        if interval.rank is not None and end_ns > interval.begin_ns:
            ranks = last.setdefault(interval.attempt, {})
            ranks[interval.rank] = max(end_ns, ranks.get(interval.rank, 0))
    slowest = {attempt: max(ranks, key=lambda rank: (ranks[rank], -rank)) for attempt, ranks in last.items()}
    return [it for it in bounded if it.interval.rank is None or it.interval.rank == slowest.get(it.interval.attempt)]


def _end_of(bounded: Bounded, tops: Iterable[Interval]) -> int:
    interval = bounded.interval
    if interval.end_ns is not None:
        return bounded.end_ns
    later = (
        top.begin_ns
        for top in tops
        if interval.attempt in (None, top.attempt)
        and top.begin_ns > interval.begin_ns
        and top.order[1] > interval.order[1]
    )
    return min([*later, bounded.end_ns])


def _same(one: Segment, other: Segment) -> bool:
    return (one.phase, one.part, one.attempt) == (other.phase, other.part, other.attempt)
