"""Forty days of three nodes, made of recorded journals: only ids and times are shifted.

The events go through the real replay, accounts, forecast and collector; what that exports is written as OpenMetrics at
the times of imagined scrapes. Everything is sampled around recoveries and every two hours, and what moves by itself,
the clocks that rates are taken of, every two minutes.
"""

import functools
import hashlib
import json
import os
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple, TextIO

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
DAYS: Final = 40
RECORDINGS: Final = Path(__file__).parent / "recordings"
OBJECTIVES: Final = Objectives.of({"thresholds_s": {"hit": 15.0, "miss": 40.0}, "late_events": {"hit": 4, "miss": 3}})
"""Promises that some of the recorded recoveries keep and others break."""

CLOCKS: Final = (
    "readmit_budget_burned_seconds_total",
    "readmit_observed_seconds_total",
    "readmit_service_budget_burned_seconds_total",
    "readmit_service_observed_seconds_total",
    "weightcache_lookups_total",
)
NODES: Final = {"demo": (2, 11, 21, 33), "pair": (1, 6, 14, 19, 25, 31, 38), "ranks": (3, 9, 17, 28, 39)}
"""Each node's recording begins anew on these days."""


class Span(NamedTuple):
    """One repetition, in Unix nanoseconds."""

    begin: int
    end: int


class Past:
    """One node's events.

    Args:
        node: its name, which is its recording's and its instance in Prometheus.
        end_s: the end of the history, in Unix seconds.
    """

    def __init__(self, node: str, end_s: int) -> None:
        self.node = node
        rows = [json.loads(line) for line in (RECORDINGS / f"{node}.jsonl").read_text().splitlines()]
        rows.sort(key=lambda row: row[1])
        self.events: list[Event] = []
        self.spans: list[Span] = []
        for turn, day in enumerate(NODES[node]):
            shift = (end_s - DAYS * 86_400 + day * 86_400) * SECOND - rows[0][2]
            shifted = [self._shifted(row, turn, shift) for row in rows]
            self.spans.append(Span(shifted[0].wall_ns, shifted[-1].wall_ns))
            self.events += shifted
        self.events = [event._replace(id=number) for number, event in enumerate(self.events, 1)]

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
            families = (*self.collector._slots(self.now_ns), *self.collector._recoveries(self.now_ns))
            families = (*families, self.accounts.lookups.collect())
        for family in families:
            if everything or family.name + "_total" in CLOCKS:
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


def scrapes(past: Past, end_s: int) -> dict[int, bool]:
    """When a node is scraped, in Unix seconds, and whether for everything."""
    start = end_s - DAYS * 86_400
    times = dict.fromkeys(range(start, end_s + 1, 120), False)
    times |= dict.fromkeys(range(start, end_s + 1, 7200), True)
    times |= dict.fromkeys(range(end_s - 3600, end_s + 1, 60), True)
    for begin, end in past.spans:
        times |= dict.fromkeys(range(begin // SECOND // 60 * 60 - 300, end // SECOND + 900, 60), True)
    return {at: times[at] for at in sorted(times) if start <= at <= end_s}


def write(file: TextIO, past: Past, end_s: int) -> None:
    """Write a node's history as OpenMetrics."""
    node = Node(past)
    sabotage = os.environ.get("SABOTAGE", "")
    for at, everything in scrapes(past, end_s).items():
        lines = [f"{text} {value} {at}\n" for text, value in _told(node.at(at, everything), past.node, sabotage)]
        if everything:
            lines.append(f'up{{instance="{past.node}",job="readmit"}} 1 {at}\n')
        file.writelines(lines)


def _told(samples: Iterator[Sample], node: str, sabotage: str) -> Iterator[tuple[str, str]]:
    for sample in samples:
        name, labels, value = sample.name, sample.labels, sample.value
        if sabotage:
            name, labels, value = sabotaged(sabotage, name, labels, value)
        yield _series(name, tuple(labels.items()), node), repr(float(value)).replace("inf", "Inf")


def sabotaged(how: str, name: str, labels: dict[str, str], value: float) -> tuple[str, dict[str, str], float]:
    """A collector with a mistake in it, that the proof must find.

    Raises:
        ValueError: there is no such mistake.
    """
    if how == "hit_miss":
        swap = {"hit": "miss", "miss": "hit"}
        return name, {key: swap.get(it, it) if key in ("result", "path") else it for key, it in labels.items()}, value
    if how == "units":
        return name, labels, value * 1000 if "_seconds" in name and "timestamp" not in name else value
    if how == "labels":
        return name, {("route" if key == "path" else key): it for key, it in labels.items()}, value
    raise ValueError(f"SABOTAGE={how}: there are hit_miss, units and labels")


@functools.cache
def _series(name: str, labels: tuple[tuple[str, str], ...], node: str) -> str:
    pairs = sorted([*labels, ("instance", node), ("job", "readmit")])
    inner = ",".join(f'{key}="{value}"' for key, value in pairs)
    return f"{name}{{{inner}}}"


def build(folder: Path, end_s: int) -> list[Past]:
    """Make Prometheus blocks of all histories in ``folder/data``, and one journal of all in ``journal.sqlite3``."""
    require("promtool")
    pasts = [Past(node, end_s) for node in NODES]
    for past in pasts:
        text = folder / f"{past.node}.om"
        with text.open("w") as file:
            write(file, past, end_s)
            file.write("# EOF\n")
        command = ["promtool", "tsdb", "create-blocks-from", "--max-block-duration=1200h", "openmetrics", "--quiet"]
        subprocess.run([*command, str(text), str(folder / "data")], check=True, capture_output=True)
        text.unlink()
    journal = connect(folder / "journal.sqlite3")
    journal.execute("BEGIN")
    for past in pasts:
        journal.executemany(INSERT, ([*event[1:-1], json.dumps(event.attributes)] for event in past.events))
    journal.execute("COMMIT")
    journal.close()
    return pasts


def _renamed(episode: str, turn: int) -> str:
    return hashlib.sha256(f"{episode} {turn}".encode()).hexdigest()[:32]
