"""Forty days of five nodes, made of recorded journals: only ids and times are shifted.

The events go through the real replay, accounts, forecast and collector; what that exports is written as OpenMetrics at
the times of imagined scrapes. Everything is sampled around recoveries and every two hours, and what moves by itself,
the clocks that rates are taken of, every two minutes. Between two repetitions a node is scraped as its recording left
it. The last repetition ends in the middle of a recovery.
"""

import functools
import hashlib
import json
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from prometheus_client.core import Metric
from prometheus_client.samples import Sample
from tests.observability.servers import require

from weightcache.episodes import Replay
from weightcache.fingerprint import CacheConfig
from weightcache.forecast import Forecast
from weightcache.journal import Event
from weightcache.journal.database import INSERT, connect
from weightcache.registry import Generation, Lease, Registry
from weightcache.slo import Objectives
from weightcache.telemetry.accounts import Accounts
from weightcache.telemetry.health import Health
from weightcache.telemetry.metrics import Collector

SECOND: Final = 1_000_000_000
DAY_S: Final = 86_400
END_S: Final = 1_796_004_000
"""The end of every history, in Unix seconds: on the grid of scrapes, so that windows begin and end at scrapes."""
RECORDINGS: Final = Path(__file__).parent / "recordings"
OBJECTIVES: Final = Objectives.of({"thresholds_s": {"hit": 15.0, "miss": 40.0}, "late_events": {"hit": 4, "miss": 3}})
"""Promises that some of the recorded recoveries keep and others break."""

CLOCKS: Final = (
    "readmit_budget_burned_seconds",
    "readmit_observed_seconds",
    "readmit_service_budget_burned_seconds",
    "readmit_service_observed_seconds",
    "weightcache_lookups",
)
NODES: Final = {
    "demo": (2, 11, 21, 33),
    "gpu": (3, 8, 15, 22, 28, 36),
    "pair": (1, 6, 11, 14, 17, 20, 23, 26, 29, 32, 35, 38),
    "twins": (4, 10, 16, 22, 27, 34),
    "ranks": (3, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29),
}
"""On these days each node's recording begins anew."""
LATER_S: Final = {"demo": 15, "gpu": 21_600}
"""So many seconds into the day: so that a scrape falls into the ten of them in which a phase was stuck, and so that
whole days before what is examined nothing happens."""
GIVEN_UP: Final = {"ranks": (10, 35)}
"""On these days it begins as well, and is left when its keeper has given up: nobody came to restart the engine."""
GIVEN_UP_AFTER_S: Final = 108
STOPPED: Final = {"ranks": (10,)}
"""On these of them the slot is stopped on purpose an hour later."""
STOPPED_AFTER_S: Final = 3600
CUT: Final = {"ranks": 96}
"""It begins once more so many seconds before the end."""


class Span(NamedTuple):
    """One repetition, in Unix nanoseconds."""

    begin: int
    end: int


class Past:
    """One node's events.

    Args:
        node: its name, which is its recording's and its instance in Prometheus.
        days: how long ago the history begins.
    """

    def __init__(self, node: str, days: int) -> None:
        self.node, self.days = node, days
        self.moved: set[str] = set()
        """Names of samples that had more than one value."""
        rows = [json.loads(line) for line in (RECORDINGS / f"{node}.jsonl").read_text().splitlines()]
        rows.sort(key=lambda row: row[1])
        self.events: list[Event] = []
        self.spans: list[Span] = []
        self.examined = Span(0, 0)
        """The repetition during which every question is asked, not only at the end: the last whole one."""
        for turn, (begin, lasts_s) in enumerate(self._begins()):
            shift, end = begin * SECOND - rows[0][2], (begin + lasts_s) * SECOND
            shifted = [event for row in rows if (event := self._shifted(row, turn, shift)).wall_ns < end]
            self.spans.append(Span(shifted[0].wall_ns, shifted[-1].wall_ns))
            self.events += shifted
            if self.days - (END_S - begin) // DAY_S in STOPPED.get(self.node, ()):
                self.events.append(self._stopped(shifted[-1], begin + STOPPED_AFTER_S))
            if len(shifted) == len(rows) and self.spans[-1].end <= END_S * SECOND:
                self.examined = self.spans[-1]
        self.events = [event._replace(id=number) for number, event in enumerate(self.events, 1)]

    def _begins(self) -> Iterator[tuple[int, int]]:
        """When the recording begins anew, in Unix seconds, and for how many seconds at most."""
        given_up = GIVEN_UP.get(self.node, ())
        for day in sorted({*NODES[self.node], *given_up}):
            if day < self.days:
                begin = END_S - (self.days - day) * DAY_S + LATER_S.get(self.node, 0)
                yield begin, GIVEN_UP_AFTER_S if day in given_up else DAY_S
        if self.node in CUT:
            yield END_S - CUT[self.node], DAY_S

    def _stopped(self, last: Event, at_s: int) -> Event:
        at_ns = at_s * SECOND
        times = {"boottime_ns": last.boottime_ns + at_ns - last.wall_ns, "wall_ns": at_ns}
        what = {"kind": "process", "name": "stopped", "attributes": {"process": "engine"}}
        return last._replace(episode=None, attempt=None, rank=None, slot="a", **times, **what)

    def _shifted(self, row: list[Any], turn: int, shift: int) -> Event:
        boot, boottime, wall, _, slot, episode, attempt, rank, kind, name, facts = row
        facts = dict(facts)
        if facts.get("previous"):
            facts["previous"] = _renamed(facts["previous"], turn)
        for field in ("fault_boottime_ns", "fault_wall_ns"):
            if facts.get(field):
                facts[field] += shift
        id_ = _renamed(episode, turn) if episode else None
        where = (self.node, slot, id_, attempt, rank)
        return Event(0, boot, boottime + shift, wall + shift, *where, kind, name, facts)


class Node:
    """A node as its daemon would export it at any time of its past."""

    def __init__(self, past: Past) -> None:
        self.past = past
        self._place = 0
        self.replay, self.accounts = Replay(keep=16), Accounts(OBJECTIVES)
        self.registry = Registry()
        self.forecast = Forecast(self.registry)
        self.forecast._digest = lambda path, asked: asked  # type: ignore[method-assign]  # no files of the past are here
        health = Health(sinks=["file"])
        self.now_ns = 0
        self.collector = Collector(self.replay, self.accounts, self.registry, health, OBJECTIVES, self.forecast)
        self.collector.caught_up.set()
        self.replay.clock.now = lambda: self.now_ns  # type: ignore[method-assign]
        self.replay.clock.to_wall = lambda at_ns: at_ns  # type: ignore[method-assign]

    def at(self, at_s: int, everything: bool) -> Iterator[Sample]:
        """What a scrape at a time would find, or of that the `CLOCKS`. Times must rise."""
        self.now_ns = at_s * SECOND
        events = self.past.events
        while self._place < len(events) and events[self._place].wall_ns <= self.now_ns:
            self._feed(events[self._place])
            self._place += 1
        if everything:
            self.forecast.look()
            self.forecast.judge()
            families: Iterable[Metric] = self.collector.collect()
        else:
            families = (*self.collector._clocks(self.now_ns), self.accounts.lookups.collect())
        for family in families:
            if everything or family.name in CLOCKS:
                yield from family.samples

    def _feed(self, event: Event) -> None:
        self.accounts.feed(event, self.replay, self.replay.feed(event))
        self.forecast.learn(event)
        facts, registry = event.attributes, self.registry
        there = registry.generations.get(str(facts.get("generation")))
        match event.kind, event.name:
            case "publish", "published":
                config = CacheConfig.from_dict(facts["config"])
                registry.add(Generation(facts["generation"], config, facts["bytes"], 1, "memfd", None, {}, []))
            case "release", _ if there is not None:
                registry.remove(there.name)
            case "quarantine", state if there is not None:
                there.quarantined = facts["reason"] if state == "set" else None
            case "lease_open", _ if there is not None:
                there.leases[facts["lease"]] = Lease(facts["lease"], facts["pid"], event.slot, event.wall_ns)
            case "lease_close", _ if there is not None:
                there.leases.pop(facts["lease"], None)
            case "process", ("started" | "readopted") if facts.get("process") == "daemon":
                for name in set(registry.generations) - set(facts.get("generations") or ()):
                    registry.remove(name)
                for generation in registry.generations.values():
                    kept = set(facts.get("lease_names") or ())
                    generation.leases = {name: it for name, it in generation.leases.items() if name in kept}


def scrapes(past: Past, examined: Iterable[Span]) -> dict[int, bool]:
    """When a node is scraped, in Unix seconds, and whether for everything."""
    start = END_S - past.days * DAY_S
    times = dict.fromkeys(range(start, END_S + 1, 120), False)
    times |= dict.fromkeys(range(start, END_S + 1, 7200), True)
    times |= dict.fromkeys(range(END_S - 3600, END_S + 1, 60), True)
    for before, spans in ((300, past.spans), (3900, examined)):
        for begin, end in spans:
            times |= dict.fromkeys(range(begin // SECOND // 60 * 60 - before, end // SECOND + 900, 60), True)
    return {at: times[at] for at in sorted(times) if start <= at <= END_S}


def exposition(past: Past, examined: Iterable[Span]) -> Iterator[str]:
    """A node's history as lines of OpenMetrics; notes in ``past`` which metrics move."""
    node = Node(past)
    first: dict[str, float] = {}
    for at, everything in scrapes(past, examined).items():
        for sample in node.at(at, everything):
            series = _series(sample.name, tuple(sample.labels.items()), past.node)
            if first.setdefault(series, sample.value) != sample.value:
                past.moved.add(sample.name)
            yield f"{series} {_number(sample.value)} {at}\n"
        if everything:
            yield f'up{{instance="{past.node}",job="readmit"}} 1 {at}\n'
    yield "# EOF\n"


@functools.cache
def _series(name: str, labels: tuple[tuple[str, str], ...], node: str) -> str:
    pairs = sorted([*labels, ("instance", node), ("job", "readmit")])
    inner = ",".join(f'{key}="{value}"' for key, value in pairs)
    return f"{name}{{{inner}}}"


def _number(value: float) -> str:
    return repr(float(value)).replace("inf", "Inf")


def write(folder: Path, days: int) -> list[Past]:
    """Write each node's history to ``NODE.om`` and its journal to ``NODE.sqlite3``, and all journals as one as well."""
    pasts = [Past(node, days) for node in NODES]
    examined = [past.examined for past in pasts]
    for past in pasts:
        with (folder / f"{past.node}.om").open("w") as file:
            file.writelines(exposition(past, examined))
        _write_journal(folder / f"{past.node}.sqlite3", [past])
    _write_journal(folder / "journal.sqlite3", pasts)
    return pasts


def _write_journal(path: Path, pasts: Iterable[Past]) -> None:
    journal = connect(path)
    journal.execute("BEGIN")
    for past in pasts:
        journal.executemany(INSERT, ([*event[1:-1], json.dumps(event.attributes)] for event in past.events))
    journal.execute("COMMIT")
    journal.close()


def make_blocks(text: Path, into: Path) -> None:
    """Make Prometheus blocks of a file of OpenMetrics."""
    require("promtool")
    command = ["promtool", "tsdb", "create-blocks-from", "--max-block-duration=1200h", "openmetrics", "--quiet"]
    subprocess.run([*command, str(text), str(into)], check=True, capture_output=True)


def _renamed(episode: str, turn: int) -> str:
    return hashlib.sha256(f"{episode} {turn}".encode()).hexdigest()[:32]
