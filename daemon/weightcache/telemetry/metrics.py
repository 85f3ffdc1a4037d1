"""The Prometheus collector: the running accounts, and what is true at the moment of a scrape."""

import math
import platform
import threading
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Final, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from weightcache.episodes import Episode, Replay, Slot
from weightcache.journal import SCHEMA_VERSION
from weightcache.slo import OUTAGE_THRESHOLD_S, READY_RATIO
from weightcache.telemetry.accounts import Accounts
from weightcache.telemetry.health import Health
from weightcache.telemetry.worst import WINDOWS_S
from weightcache.version import VERSION
from weightcache.vocabulary import PATHS, PHASES, UNATTRIBUTED

FAILURE_PATHS: Final = ("miss", "partial")
"""The paths of the failure tail: the cache could not be used."""
_PATIENCE_S: Final = 8.0
"""How long a scrape waits for the first replay; Prometheus gives up after 10 s unless told otherwise."""


class Resident(Protocol):
    """What the collector needs of a generation."""

    @property
    def quarantined(self) -> str | None: ...


class Residents(Protocol):
    """What the collector needs of the daemon's registry."""

    @property
    def capacity(self) -> int | None: ...
    @property
    def resident_bytes(self) -> int: ...
    @property
    def leases(self) -> int: ...
    @property
    def generations(self) -> Mapping[str, Resident]: ...
    @property
    def claims(self) -> Sized: ...


class Collector:
    """Yields every metric family of the node; `prometheus_client` calls it at each scrape.

    Args:
        replay: the journal's state.
        accounts: its running accounts.
        residents: what is resident.
        health: how telemetry itself is doing.
        thresholds_s: promised seconds of a recovery, by path.

    ``lock`` guards replay and accounts; until ``caught_up`` is set they do not tell the whole past, and a scrape waits.
    """

    def __init__(
        self,
        replay: Replay,
        accounts: Accounts,
        residents: Residents,
        health: Health,
        thresholds_s: Mapping[str, float],
    ) -> None:
        self.lock = threading.Lock()
        self.caught_up = threading.Event()
        self._replay = replay
        self._accounts = accounts
        self._residents = residents
        self._health = health
        self._thresholds_s = thresholds_s
        self._highest: dict[tuple[str, str], float] = {}

    def collect(self) -> Iterable[Metric]:
        """Every family, at one moment.

        Raises:
            TimeoutError: the journal's past is still being replayed; half of it would look like a counter that reset.
        """
        if not self.caught_up.wait(_PATIENCE_S):
            raise TimeoutError("the journal is still being replayed; scrape again")
        with self.lock:
            now = self._replay.clock.now()
            return [
                *self._accounts.collect(),
                *self._cache(),
                *self._recoveries(now),
                *self._slots(now),
                *self._objectives(),
                *self._telemetry(),
            ]

    def _cache(self) -> Iterator[Metric]:
        residents = self._residents
        yield _gauge("weightcache_resident_bytes", "Bytes of resident weights.", residents.resident_bytes)
        capacity = math.inf if residents.capacity is None else residents.capacity
        yield _gauge(
            "weightcache_capacity_bytes", "Bytes that resident weights may take; +Inf without a limit.", capacity
        )
        yield _gauge("weightcache_leases", "Attached clients.", residents.leases)
        yield _gauge("weightcache_loads", "Loads under way.", len(residents.claims))
        generations = GaugeMetricFamily("weightcache_generations", "Resident generations.", labels=["state"])
        there = list(residents.generations.values())
        quarantined = sum(1 for generation in there if generation.quarantined)
        generations.add_metric(["active"], len(there) - quarantined)
        generations.add_metric(["quarantined"], quarantined)
        yield generations

    def _recoveries(self, now: int) -> Iterator[Metric]:
        open_episodes = self._replay.open_episodes
        yield _gauge("readmit_recoveries_open", "Episodes open now.", len(open_episodes))
        tail = GaugeMetricFamily(
            "readmit_failure_tail_seconds",
            "The worst recovery by miss or partial hit, whatever its outcome; open ones count with their age. One that "
            "has not looked for weights yet counts once it is late for a hit.",
            labels=["window"],
        )
        worst = GaugeMetricFamily(
            "readmit_worst_recovery_seconds",
            "The worst recovery by path, whatever its outcome; open ones count with their age.",
            labels=["path", "window"],
        )
        ages = [(episode.path, episode.age_s(now)) for episode in open_episodes]
        late = [age for path, age in ages if path == "unknown" and age > self._thresholds_s["hit"]]
        for window, seconds in WINDOWS_S.items():
            by_path = {path: self._accounts.worst[path].within(seconds, now) for path in PATHS}
            for path, age in ages:
                by_path[path] = max(by_path[path], age)
            for path, value in by_path.items():
                worst.add_metric([path, window], value)
            tail.add_metric([window], max([by_path[path] for path in FAILURE_PATHS] + late))
        yield tail
        yield worst
        outage = self._accounts.availability.outage
        yield _gauge(
            "readmit_service_outage_started_timestamp_seconds",
            "When the last ready slot was lost; 0 while there is one.",
            self._wall_s(outage.begin_ns) if outage else 0,
        )

    def _slots(self, now: int) -> Iterator[Metric]:
        def family(name: str, text: str, *labels: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(name, text, labels=["slot", *labels])

        ready = family("readmit_slot_ready", "1 while the slot's last answers were right and no episode is open.")
        started = family("readmit_recovery_started_timestamp_seconds", "The fault of the open episode; 0 without one.")
        deadline = family(
            "readmit_recovery_deadline_timestamp_seconds",
            "When the open episode is late, by the path it is on so far; 0 without one.",
        )
        attempts = family("readmit_recovery_attempts", "Attempts of the open episode.")
        phase = family("readmit_recovery_phase", "1 for the phase that the open episode is in.", "phase")
        phase_started = family(
            "readmit_recovery_phase_started_timestamp_seconds", "When that phase began; 0 between phases."
        )
        last = family(
            "readmit_last_recovery_phase_seconds", "Seconds of each phase in the latest closed episode.", "phase"
        )
        unready = CounterMetricFamily(
            "readmit_unready_seconds_total", "Seconds without semantic readiness.", labels=["slot"]
        )
        observed = CounterMetricFamily(
            "readmit_observed_seconds_total", "Seconds in which the slot was meant to be ready.", labels=["slot"]
        )
        for name, slot in self._replay.slots.items():
            readiness = self._accounts.availability.slots.get(name)
            if readiness is None:
                continue  # named by an event, never by an episode: nobody recovers it
            episode = slot.episode
            ready.add_metric([name], readiness.state == "ready")
            started.add_metric([name], self._wall_s(episode.fault_ns) if episode else 0)
            deadline.add_metric([name], self._deadline_s(slot, episode) if episode else 0)
            attempts.add_metric([name], len(episode.attempts) if episode else 0)
            interval = episode.phase if episode else None
            for word in PHASES:
                phase.add_metric([name, word], interval is not None and interval.name == word)
            phase_started.add_metric([name], self._wall_s(interval.begin_ns) if interval else 0)
            phases = slot.last.phases_s() if slot.last else {}
            for word in (*PHASES, UNATTRIBUTED):
                last.add_metric([name, word], phases.get(word, 0))
            unready.add_metric([name], self._rising("unready", name, readiness.unready_s(now)))
            observed.add_metric([name], self._rising("observed", name, readiness.observed_s(now)))
        yield from (ready, started, deadline, attempts, phase, phase_started, last, unready, observed)

    def _objectives(self) -> Iterator[Metric]:
        thresholds = GaugeMetricFamily(
            "readmit_slo_threshold_seconds", "How long a recovery may take, by path.", labels=["path"]
        )
        for path in PATHS:
            thresholds.add_metric([path], self._thresholds_s[path])
        yield thresholds
        yield _gauge("readmit_slo_outage_threshold_seconds", "How long no slot may be ready.", OUTAGE_THRESHOLD_S)
        yield _gauge(
            "readmit_slo_ready_ratio", "The promised share of observed time that a slot is ready.", READY_RATIO
        )

    def _telemetry(self) -> Iterator[Metric]:
        health = self._health
        yield _gauge("readmit_journal_degraded", "1 while events wait in spools or are lost.", health.degraded)
        yield _gauge("readmit_journal_spool_bytes", "Bytes of events that wait in spools.", health.spool_bytes)
        yield _gauge(
            "readmit_journal_last_event_timestamp_seconds",
            "The latest event.",
            self._wall_s(self._replay.seen_ns) if self._replay.seen_ns else 0,
        )
        yield _counter(
            "readmit_journal_lost_events_total", "Events of the daemon that nothing would take.", health.lost
        )
        yield _counter("readmit_journal_salvages_total", "Damaged journals that were set aside.", health.salvages)
        exported = CounterMetricFamily("readmit_spans_exported_total", "Spans handed over.", labels=["sink"])
        dropped = CounterMetricFamily("readmit_spans_dropped_total", "Spans nobody would take.", labels=["sink"])
        for sink in health.sinks:
            exported.add_metric([sink], health.exported[sink])
            dropped.add_metric([sink], health.dropped[sink])
        yield exported
        yield dropped
        labels = {"version": VERSION, "schema": str(SCHEMA_VERSION), "python": platform.python_version()}
        info = GaugeMetricFamily("readmit_build_info", "Versions.", labels=list(labels))
        info.add_metric(list(labels.values()), 1)
        yield info

    def _deadline_s(self, slot: Slot, episode: Episode) -> float:
        path = episode.path
        if path == "unknown":  # until it is known: as fast as this slot can be expected to be
            path = "off" if slot.last and slot.last.path == "off" else "miss" if slot.last is None else "hit"
        return self._wall_s(episode.fault_ns) + self._thresholds_s[path]

    def _wall_s(self, at_ns: int) -> float:
        return self._replay.clock.to_wall(at_ns) / 1e9

    def _rising(self, what: str, slot: str, value: float) -> float:
        """A counter of running time: an end that is dated back must not take back what was shown."""
        self._highest[what, slot] = value = max(value, self._highest.get((what, slot), 0.0))
        return value


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, value=value)
