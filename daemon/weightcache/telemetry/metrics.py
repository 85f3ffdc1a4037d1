"""The Prometheus collector: the running accounts, and what is true at the moment of a scrape."""

import math
import platform
import threading
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Final, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from weightcache.episodes import Episode, Replay, Slot
from weightcache.journal import SCHEMA_VERSION
from weightcache.slo import CLOCKS, Objectives
from weightcache.telemetry.accounts import Accounts
from weightcache.telemetry.budget import CLASSES
from weightcache.telemetry.health import Health
from weightcache.telemetry.shown import Shown
from weightcache.telemetry.worst import WINDOWS_S
from weightcache.version import VERSION
from weightcache.vocabulary import PATHS, PHASES, UNATTRIBUTED

FAILURE_PATHS: Final = ("miss", "partial")
"""The paths of the failure tail: the cache could not be used."""
REFUSALS: Final = ("peer_refused", "protocol", "protocol_version", "timeout", "other")
"""Why the daemon ends a connection: whose it is, what it says, or that it says nothing (or there are too many)."""
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
    @property
    def refused(self) -> Mapping[str, int]: ...


class Outlook(Protocol):
    """What the collector needs of a verdict about a slot's next start."""

    @property
    def would_hit(self) -> bool: ...
    @property
    def reason(self) -> str: ...


class Foresight(Protocol):
    """What the collector needs of `weightcache.forecast.Forecast`."""

    @property
    def verdicts(self) -> Mapping[str, Outlook]: ...


class Collector:
    """Yields every metric family of the node; `prometheus_client` calls it at each scrape.

    Args:
        replay: the journal's state.
        accounts: its running accounts.
        residents: what is resident.
        health: how telemetry itself is doing.
        objectives: what is promised.
        forecast: whether the next start of each slot would hit.
        shown: what scrapes have shown before.

    ``lock`` guards replay and accounts; until ``caught_up`` is set they do not tell the whole past, and a scrape waits.
    With ``unreadable`` it gets what is known without them, and no counter: 0 would be a lie.
    """

    def __init__(
        self,
        replay: Replay,
        accounts: Accounts,
        residents: Residents,
        health: Health,
        objectives: Objectives,
        forecast: Foresight | None = None,
        shown: Shown | None = None,
    ) -> None:
        self.lock = threading.Lock()
        self.caught_up = threading.Event()
        self._replay = replay
        self._accounts = accounts
        self._residents = residents
        self._health = health
        self._objectives = objectives
        self._forecast = forecast
        self._shown = shown or Shown()
        self.unreadable = False

    def show(self, replay: Replay, accounts: Accounts) -> None:
        """Show other books from now on."""
        with self.lock:
            self._replay, self._accounts = replay, accounts

    def collect(self) -> Iterable[Metric]:
        """Every family, at one moment.

        Raises:
            TimeoutError: the journal's past is still being replayed; half of it would look like a counter that reset.
        """
        if not self.caught_up.is_set() and self.unreadable:
            return [it for it in (*self._cache(), *self._promises(), *self._telemetry()) if it.type == "gauge"]
        if not self.caught_up.wait(_PATIENCE_S):
            raise TimeoutError("the journal is still being replayed; scrape again")
        with self.lock:
            now = self._replay.clock.now()
            families = [
                *self._accounts.collect(),
                *self._cache(),
                *self._rent(now),
                *self._recoveries(now),
                *self._clocks(now),
                *self._slots(now),
                *self._promises(),
                *self._telemetry(),
            ]
            self._shown.save(self._replay.position)
            return families

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
        yield self._refusals()
        next_start = GaugeMetricFamily(
            "weightcache_next_start_would_hit",
            "1 if the slot's engine, started now, would map resident weights; if 0, reason says why not.",
            labels=["slot", "reason"],
        )
        for slot, verdict in (self._forecast.verdicts if self._forecast else {}).items():
            next_start.add_metric([slot, verdict.reason], verdict.would_hit)
        yield next_start

    def _rent(self, now: int) -> Iterator[Metric]:
        leased, idle, standby = self._accounts.rent.seconds(now)
        rent = CounterMetricFamily(
            "weightcache_resident_byte_seconds_total",
            "Bytes of resident weights times the seconds they were, leased by an engine or idle.",
            labels=["use"],
        )
        rent.add_metric(["leased"], self._rising("rent", "leased", leased))
        rent.add_metric(["idle"], self._rising("rent", "idle", idle))
        yield rent
        yield _counter(
            "readmit_standby_gpu_seconds_not_held_total",
            "GPU time that a hot standby of every engine on resident weights would have held.",
            self._rising("rent", "standby", standby),
        )

    def _refusals(self) -> Metric:
        family = CounterMetricFamily(
            "weightcache_connections_refused_total", "Connections that the daemon ended, by reason.", labels=["reason"]
        )
        counted = dict.fromkeys(REFUSALS, 0)
        for reason, count in self._residents.refused.items():
            counted[reason if reason in counted else "other"] += count
        for reason, count in counted.items():
            family.add_metric([reason], self._shown.carried(f"refused|{reason}", count))
        return family

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
        late = [age for path, age in ages if path == "unknown" and age > self._objectives.thresholds_s["hit"]]
        for window, seconds in WINDOWS_S.items():
            by_path = {path: self._accounts.worst[path].within(seconds, now) for path in PATHS}
            for path, age in ages:
                by_path[path] = max(by_path[path], age)
            for path, value in by_path.items():
                worst.add_metric([path, window], value)
            tail.add_metric([window], max([by_path[path] for path in FAILURE_PATHS] + late))
        yield tail
        yield worst
        yield self._kept(now)
        availability = self._accounts.availability
        outage = availability.outage
        yield _gauge(
            "readmit_service_outage_started_timestamp_seconds",
            "When the last ready slot was lost; 0 while there is one.",
            self._wall_s(outage.begin_ns) if outage else 0,
        )
        yield _counter(
            "readmit_takeovers_total", "Slots lost while another one was ready and served on.", availability.takeovers
        )

    def _kept(self, now: int) -> Metric:
        """Recoveries by promise kept; an open one counts as soon as it is late."""
        family = GaugeMetricFamily(
            "readmit_slo_events",
            "Recoveries of the last 90 days from faults, and planned ones that were late: good, late or failed. Open "
            "ones count as late once they are.",
            labels=["path", "class"],
        )
        overdue = dict.fromkeys(PATHS, 0)
        for episode in self._replay.open_episodes:
            overdue[episode.path] += now > self._deadline_ns(self._replay.slots[episode.slot], episode)
        for path in PATHS:
            counts = self._accounts.budget[path].counts(now)
            counts["late"] += overdue[path]
            for class_ in CLASSES:
                family.add_metric([path, class_], counts[class_])
        return family

    def _clocks(self, now: int) -> Iterator[Metric]:
        """What runs by itself: the time that each slot and the node were ready or not."""
        unready = CounterMetricFamily(
            "readmit_unready_seconds_total", "Seconds without semantic readiness.", labels=["slot"]
        )
        burned = CounterMetricFamily(
            "readmit_budget_burned_seconds_total",
            "Seconds without semantic readiness, but for planned recoveries before their deadline.",
            labels=["slot"],
        )
        observed = CounterMetricFamily(
            "readmit_observed_seconds_total", "Seconds in which the slot was meant to be ready.", labels=["slot"]
        )
        for name, readiness in self._accounts.availability.slots.items():
            unready.add_metric([name], self._rising("unready", name, readiness.unready_s(now)))
            burned.add_metric([name], self._rising("burned", name, readiness.burned_s(now)))
            observed.add_metric([name], self._rising("observed", name, readiness.observed_s(now)))
        yield from (unready, burned, observed)
        service = self._accounts.availability.service
        yield _counter(
            "readmit_service_unready_seconds_total",
            "Seconds in which no slot of the node was ready and some should have been.",
            self._rising("service", "unready", service.unready_s(now)),
        )
        yield _counter(
            "readmit_service_budget_burned_seconds_total",
            "Of those, all but planned recoveries before their deadline.",
            self._rising("service", "burned", service.burned_s(now)),
        )
        yield _counter(
            "readmit_service_observed_seconds_total",
            "Seconds in which some slot of the node was meant to be ready.",
            self._rising("service", "observed", service.observed_s(now)),
        )

    def _slots(self, now: int) -> Iterator[Metric]:
        def family(name: str, text: str, *labels: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(name, text, labels=["slot", *labels])

        ready = family("readmit_slot_ready", "1 while the slot's last answers were right and no episode is open.")
        wanted = family("readmit_slot_wanted", "1 while the slot is meant to be ready; 0 while it is stopped.")
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
        for name, slot in self._replay.slots.items():
            readiness = self._accounts.availability.slots.get(name)
            if readiness is None:
                continue  # named by an event, never by an episode: nobody recovers it
            episode = slot.episode
            ready.add_metric([name], readiness.state == "ready")
            wanted.add_metric([name], readiness.state != "stopped")
            started.add_metric([name], self._wall_s(episode.fault_ns) if episode else 0)
            deadline.add_metric([name], self._wall_s(self._deadline_ns(slot, episode)) if episode else 0)
            attempts.add_metric([name], len(episode.attempts) if episode else 0)
            interval = episode.phase if episode else None
            for word in PHASES:
                phase.add_metric([name, word], interval is not None and interval.name == word)
            phase_started.add_metric([name], self._wall_s(interval.begin_ns) if interval else 0)
            phases = slot.last.phases_s() if slot.last else {}
            for word in (*PHASES, UNATTRIBUTED):
                last.add_metric([name, word], phases.get(word, 0))
        yield from (ready, wanted, started, deadline, attempts, phase, phase_started, last)

    def _promises(self) -> Iterator[Metric]:
        objectives = self._objectives
        thresholds = GaugeMetricFamily(
            "readmit_slo_threshold_seconds", "How long a recovery may take, by path.", labels=["path"]
        )
        budgets = GaugeMetricFamily(
            "readmit_slo_late_events", "How many recoveries in 90 days may be late or fail, by path.", labels=["path"]
        )
        for path in PATHS:
            thresholds.add_metric([path], objectives.thresholds_s[path])
            budgets.add_metric([path], objectives.late_events[path])
        yield thresholds
        yield budgets
        limits = GaugeMetricFamily(
            "readmit_slo_phase_limit_seconds", "How long a recovery may stay in one phase.", labels=["phase"]
        )
        for phase in PHASES:
            limits.add_metric([phase], objectives.phase_limits_s[phase])
        yield limits
        yield _gauge(
            "readmit_slo_outage_threshold_seconds", "How long no slot may be ready.", objectives.outage_threshold_s
        )
        ratios = GaugeMetricFamily(
            "readmit_slo_ready_ratio",
            "The promised share of observed time that a slot is ready, and that the service is.",
            labels=["clock"],
        )
        for clock in CLOCKS:
            ratios.add_metric([clock], objectives.ready_ratio[clock])
        yield ratios

    def _telemetry(self) -> Iterator[Metric]:
        health = self._health
        yield _gauge("readmit_journal_degraded", "1 while events wait in spools or are lost.", health.degraded)
        yield _gauge("readmit_journal_spool_bytes", "Bytes of events that wait in spools.", health.spool_bytes)
        yield _gauge(
            "readmit_journal_last_event_timestamp_seconds",
            "The latest event.",
            self._wall_s(self._replay.seen_ns) if self._replay.seen_ns else 0,
        )
        carried = self._shown.carried
        yield _counter(
            "readmit_journal_lost_events_total",
            "Events of the daemon that nothing would take.",
            carried("lost", health.lost),
        )
        yield _counter(
            "readmit_journal_salvages_total",
            "Damaged journals that were set aside.",
            carried("salvages", health.salvages),
        )
        exported = CounterMetricFamily("readmit_spans_exported_total", "Spans handed over.", labels=["sink"])
        dropped = CounterMetricFamily("readmit_spans_dropped_total", "Spans nobody would take.", labels=["sink"])
        for sink in health.sinks:
            exported.add_metric([sink], carried(f"exported|{sink}", health.exported[sink]))
            dropped.add_metric([sink], carried(f"dropped|{sink}", health.dropped[sink]))
        yield exported
        yield dropped
        labels = {"version": VERSION, "schema": str(SCHEMA_VERSION), "python": platform.python_version()}
        info = GaugeMetricFamily("readmit_build_info", "Versions.", labels=list(labels))
        info.add_metric(list(labels.values()), 1)
        yield info

    def _deadline_ns(self, slot: Slot, episode: Episode) -> int:
        last = slot.last.path if slot.last else None
        return episode.fault_ns + round(self._objectives.threshold_s(episode.path, last) * 1e9)

    def _wall_s(self, at_ns: int) -> float:
        return self._replay.clock.to_wall(at_ns) / 1e9

    def _rising(self, what: str, slot: str, value: float) -> float:
        """A counter of running time: an end that is dated back must not take back what was shown."""
        return self._shown.rising(f"{what}|{slot}", value)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, value=value)
