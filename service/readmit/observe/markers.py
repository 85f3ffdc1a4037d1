"""From lines of an engine's log to phases and lookups, by a table for one engine."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

END: Final = "end"
"""Instead of a phase: what was going on is over, and nothing begins that a line would end."""


class Miss(NamedTuple):
    """Why resident weights were not mapped, as a pattern in the line that says so.

    ``detail`` names a group of the pattern whose text is looked up in ``details``.
    """

    pattern: str
    reason: str
    details: Mapping[str, str] = {}


class Marker(NamedTuple):
    """What a line means: a phase begins (which ends the one before), or an attach has had its result."""

    pattern: str
    phase: str | None = None
    result: Literal["hit", "miss"] | None = None


@dataclass(frozen=True)
class Table:
    """The lines of one engine.

    Attributes:
        engine: its name.
        versions: beginnings of the versions whose lines these are; empty where the engine does not say its version.
        version: a pattern whose first group is the version; nothing is believed before it has matched. Where the engine
            does not say it, nothing is known before a line of these has come.
        rank: a pattern whose first group is the rank of the process that speaks.
        first: the phase that the process is in when it says nothing yet.
        markers: in no particular order; the first that matches counts.
        misses: in order; the last is for all that is left.
        asks: words of a command line with which the engine looks for resident weights at all.
        own: words of a command line with which it tells the journal itself, so that nothing is to be added.
    """

    engine: str
    versions: tuple[str, ...]
    version: str | None
    rank: str
    first: str
    markers: tuple[Marker, ...]
    misses: tuple[Miss, ...]
    asks: str
    own: str | None = None

    def covers(self, version: str) -> bool:
        """Whether the lines of a version are known."""
        return any(version == it or version.startswith(f"{it}.") for it in self.versions)


class Finding(NamedTuple):
    """One event for the journal."""

    kind: Literal["phase_begin", "phase_end", "lookup"]
    name: str
    rank: int | None
    reason: str | None = None
    detail: str | None = None
    message: str | None = None


@dataclass
class Reading:
    """One start of an engine, line by line.

    Args:
        table: how to read.
        looks: whether it may look for resident weights; if not, its path is ``off``.
    """

    table: Table
    looks: bool
    known: bool = False
    """Whether this version's lines are known, and have come."""
    version: str | None = None
    over: bool = False
    """It serves, or nothing more can be learned."""
    _phase: dict[int | None, str] = field(default_factory=dict)
    _told: set[int | None] = field(default_factory=set)

    def line(self, text: str) -> Iterator[Finding]:
        """What one line says."""
        if self.over:
            return
        if not self.known and self.table.version is not None:
            match = re.search(self.table.version, text)
            if match is None:
                return
            self.version = match[1]
            self.over = not self.table.covers(match[1])
            if self.over:
                return
            yield self._begun()
        for marker in self.table.markers:
            if re.search(marker.pattern, text):
                if not self.known:
                    yield self._begun()
                rank = re.search(self.table.rank, text)
                yield from self._said(marker, int(rank[1]) if rank else None, text.strip())
                return

    def _begun(self) -> Finding:
        """The phase in which the process has been from its beginning."""
        self.known, self._phase[None] = True, self.table.first
        return Finding("phase_begin", self.table.first, None)

    def _said(self, marker: Marker, rank: int | None, text: str) -> Iterator[Finding]:
        if marker.result is not None and rank not in self._told:
            self._told.add(rank)
            yield self._missed(rank, text) if marker.result == "miss" else Finding("lookup", "hit", rank)
        if marker.phase is None or marker.phase == self._phase.get(rank):
            return
        # One of several workers speaks for itself, and ends what the process that started it was doing; a process that
        # is no worker speaks once all of them are done.
        for speaker in list(self._phase) if rank is None else (rank, None):
            if (before := self._phase.pop(speaker, None)) is not None:
                yield Finding("phase_end", before, speaker)
        if marker.phase == END:
            self.over = rank is None
            return
        self._phase[rank] = marker.phase
        yield Finding("phase_begin", marker.phase, rank)
        if marker.phase == "load_weights" and not self.looks and rank not in self._told:
            self._told.add(rank)
            yield Finding("lookup", "off", rank)

    def _missed(self, rank: int | None, text: str) -> Finding:
        for miss in self.table.misses:
            if (match := re.search(miss.pattern, text)) is not None:
                detail = miss.details.get(match[1]) if miss.details else None
                return Finding("lookup", "miss", rank, miss.reason, detail, text)
        raise ValueError(f"the table of {self.table.engine} has no last miss")
