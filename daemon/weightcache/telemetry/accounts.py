"""The running accounts: everything countable that a journal's events add up to, in constant space.

Fed with the same events again they give the same numbers, so a counter never goes down when the daemon is restarted.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from prometheus_client.core import Metric

from weightcache.availability import Availability
from weightcache.episodes import Change, Episode, Replay
from weightcache.fingerprint import FIELDS
from weightcache.journal import Event
from weightcache.slo import Objectives
from weightcache.telemetry.budget import Budget
from weightcache.telemetry.families import Counter, Histogram, Trace
from weightcache.telemetry.gpus import GpuTime
from weightcache.telemetry.rent import Rent
from weightcache.telemetry.worst import Worst
from weightcache.vocabulary import (
    CAUSES,
    MISS_REASONS,
    OUTCOMES,
    PATHS,
    PHASES,
    PLANNED_CAUSES,
    QUANT_FAMILIES,
    RESIDENCY_DETAILS,
    RESOURCE_DETAILS,
    UNATTRIBUTED,
)

DETAILS: Final[Mapping[str, tuple[str, ...]]] = {
    "fingerprint": (*FIELDS, "unknown_field"),
    "quant_not_allowed": QUANT_FAMILIES,
    "residency_lost": RESIDENCY_DETAILS,
    "resource": RESOURCE_DETAILS,
}
"""The closed list of details of each reason that has one; where it is not known the detail is empty."""

EXPECTED_CAUSES: Final = frozenset({"first_start", "scale_out"})
"""Causes of recoveries that miss because nothing can be resident yet."""

PROCESSES: Final = ("daemon", "keeper", "engine", "gate", "other")

_LOADING_NOTHING: Final = ("standby", "unknown")
"""Paths without a load that could be timed: a takeover has none, and of the unknown nothing is known."""
_LOAD_BOUNDS_S: Final = (0.05, 1, 10, 60, 600, 1800)
"""Few, for series' sake: they tell mapped from read, and what the published 0.63 s and 495 s would be beside. The last
one is beyond any load that was heard of, so that no percentile stays at a bound for ever."""


class Accounts:
    """Counters, histograms and worst recoveries of one node.

    Args:
        objectives: what is promised.
    """

    def __init__(self, objectives: Objectives) -> None:
        self._objectives = objectives
        reasons = [(reason, detail) for reason in MISS_REASONS for detail in ("", *DETAILS.get(reason, ()))]
        self.lookups = Counter(
            "weightcache_lookups_total",
            "Attaches that tried to map resident weights, one per rank. Hit rate = hits over both.",
            ["result"],
            [("hit",), ("miss",)],
        )
        self.misses = Counter(
            "weightcache_misses_total", "Failed attaches by reason, one per rank.", ["reason", "detail"], reasons
        )
        self.publishes = Counter(
            "weightcache_publishes_total",
            "Generations published, and loads whose publishing failed.",
            ["result"],
            [("published",), ("failed",)],
        )
        self.releases = Counter(
            "weightcache_releases_total",
            "Generations that left memory, by how.",
            ["how"],
            [(how,) for how in ("released", "evicted", "replaced", "lost")],
        )
        self.quarantines = Counter("weightcache_quarantines_total", "Generations put into quarantine.")
        self.daemon_starts = Counter(
            "weightcache_daemon_starts_total",
            "Starts of the daemon: empty, or with weights adopted from its predecessor.",
            ["how"],
            [("started",), ("readopted",)],
        )
        self.started = Counter(
            "readmit_recoveries_started_total",
            "Episodes opened, by cause. Minus readmit_recoveries_total: those open now.",
            ["cause"],
            [(cause,) for cause in CAUSES],
        )
        self.recoveries = Counter(
            "readmit_recoveries_total",
            "Episodes closed, by how they got their weights and how they ended.",
            ["path", "outcome"],
            [(path, outcome) for path in PATHS for outcome in OUTCOMES],
        )
        self.by_cause = Counter(
            "readmit_recoveries_by_cause_total",
            "Episodes closed, by cause.",
            ["cause"],
            [(cause,) for cause in CAUSES],
        )
        self.late = Counter(
            "readmit_recoveries_late_total",
            "Episodes closed later than readmit_slo_threshold_seconds of their path, or without becoming ready.",
            ["path"],
            [(path,) for path in PATHS],
        )
        self.failed = Counter(
            "readmit_recoveries_failed_total",
            "Episodes that ended without becoming ready, but for those whose slot was stopped on purpose.",
        )
        self.unverified = Counter(
            "readmit_recoveries_unverified_total",
            "Episodes closed as ready although no answer was checked: no gate, or a gate without probes.",
        )
        self.cold_starts = Counter(
            "readmit_cold_starts_total",
            "Recoveries that missed, by the reason of their lowest failing rank; each counts once.",
            ["reason", "detail"],
            reasons,
        )
        self.unexpected_cold_starts = Counter(
            "readmit_unexpected_cold_starts_total",
            "Cold starts of slots whose weights could have been resident: not by first_start, not by scale_out.",
            ["reason"],
            [(reason,) for reason in MISS_REASONS],
        )
        self.attempts_started = Counter("readmit_attempts_started_total", "Engine processes started.")
        self.attempts = Counter(
            "readmit_attempts_total",
            "Attempts of closed episodes, by how they ended.",
            ["outcome"],
            [(outcome,) for outcome in OUTCOMES],
        )
        self.phase_seconds = Counter(
            "readmit_recovery_phase_seconds_total",
            "Seconds of closed episodes in each phase along the slowest rank. All phases of a path add up to its time.",
            ["path", "phase"],
            [(path, phase) for path in PATHS for phase in (*PHASES, UNATTRIBUTED)],
        )
        self.phases = Counter(
            "readmit_recovery_phases_total",
            "Closed episodes that went through each phase; readmit_recovery_phase_seconds_total over it is the mean.",
            ["path", "phase"],
            [(path, phase) for path in PATHS for phase in (*PHASES, UNATTRIBUTED)],
        )
        self.gpu_lost = Counter(
            "readmit_gpu_seconds_lost_total",
            "Seconds of closed episodes times the GPUs of their engine, by path. 3,600 of them are a GPU-hour.",
            ["path"],
            [(path,) for path in PATHS],
        )
        self.gpu_saved = Counter(
            "readmit_gpu_seconds_saved_total",
            "By hits, against the mean cold start here of the same model from the same starting state.",
        )
        self.unmeasured_hits = Counter(
            "readmit_hits_without_cold_start_total",
            "Hits whose saving is not known: no cold start of that model from that starting state was measured.",
        )
        self.process_exits = Counter(
            "readmit_process_exits_total", "Processes seen to end.", ["process"], [(name,) for name in PROCESSES]
        )
        self.probes = Counter(
            "readmit_probes_total",
            "Known answers asked for.",
            ["result"],
            [(result,) for result in ("correct", "wrong", "late", "error")],
        )
        self.readiness = Histogram(
            "readmit_time_to_semantic_readiness_seconds",
            "From the fault to the first correct answer, by path. Only recoveries whose answers were checked.",
            "path",
            PATHS,
            objectives.bounds_s(),
        )
        self.load = Histogram(
            "weightcache_load_seconds",
            "Seconds in load_weights along the slowest rank of a closed episode, by path.",
            "path",
            [path for path in PATHS if path not in _LOADING_NOTHING],
            _LOAD_BOUNDS_S,
        )
        self.outages = Histogram(
            "readmit_service_outage_seconds",
            "Times in which no slot of the node was ready.",
            None,
            (),
            objectives.bounds_s(),
        )
        self.worst = {path: Worst() for path in PATHS}
        self.budget = {path: Budget() for path in PATHS}
        self.availability = Availability(objectives)
        self.gpu_time = GpuTime()
        self.rent = Rent()
        self.last_exit: dict[str, tuple[str, object]] = {}
        """By role, boot and pid of the process that ended last."""

    def collect(self) -> Iterator[Metric]:
        """Every family."""
        for family in vars(self).values():
            if isinstance(family, Counter | Histogram):
                yield family.collect()

    def feed(self, event: Event, replay: Replay, change: Change) -> None:
        """Take in an event after the replay did.

        Args:
            event: the event.
            replay: the replay that was fed with it.
            change: what that returned.
        """
        self.rent.feed(event, replay, change)
        if change.opened is not None:
            self.started.step(change.opened.cause)
        if change.closed is not None:
            self._close(change.closed, replay)
        if outage := self.availability.feed(event, replay, change):
            assert outage.end_ns is not None
            self.outages.observe(value=(outage.end_ns - outage.begin_ns) / 1e9)
        match event.kind, event.name:
            case "lookup", ("hit" | "miss") as result:
                self.lookups.step(result)
                if result == "miss":
                    self.misses.step(*_member(event.attributes.get("reason"), event.attributes.get("detail")))
            case "publish", ("published" | "failed") as result:
                self.publishes.step(result)
            case "release", how:
                self.releases.step(how)
            case "quarantine", "set":
                self.quarantines.step()
            case "attempt_start", _:
                self.attempts_started.step()
            case "probe", result:
                self.probes.step(result)
            case "process", "exited":
                self._exit(event)
            case "process", ("started" | "readopted") as how if event.attributes.get("process") == "daemon":
                self.daemon_starts.step(how)

    def _exit(self, event: Event) -> None:
        process = event.attributes.get("process")
        member = process if process in PROCESSES else "other"
        ended = (event.boot_id, event.attributes.get("pid"))
        if self.last_exit.get(member) != ended:  # both a daemon and its keeper say that it ended
            self.process_exits.step(member)
        self.last_exit[member] = ended

    def _close(self, episode: Episode, replay: Replay) -> None:
        assert episode.outcome is not None
        assert episode.closed_ns is not None
        path, ready = episode.path, episode.outcome == "ready"
        trace = Trace(episode.id, replay.clock.to_wall(episode.closed_ns) / 1e9)
        self.recoveries.step(path, episode.outcome, trace=trace)
        self.by_cause.step(episode.cause)
        late = episode.total_s > self._objectives.thresholds_s[path]
        if late or episode.failed:
            self.late.step(path)
        if episode.failed:
            self.failed.step()
        if late or not (episode.stopped or episode.cause in PLANNED_CAUSES):
            self.budget[path].add(episode.closed_ns, "failed" if episode.failed else "late" if late else "good")
        if ready and episode.verified:
            self.readiness.observe(path, value=episode.total_s, trace=trace)
        elif ready:
            self.unverified.step()
        if episode.reason is not None:
            self.cold_starts.step(*_member(episode.reason, episode.detail), trace=trace)
            if episode.cause not in EXPECTED_CAUSES:
                self.unexpected_cold_starts.step(episode.reason, trace=trace)
        for attempt in episode.attempts:
            assert attempt.outcome is not None
            self.attempts.step(attempt.outcome)
        phases = episode.phases_s()
        for phase, seconds in phases.items():
            self.phase_seconds.step(path, phase, by=seconds)
            self.phases.step(path, phase)
        if "load_weights" in phases and path not in _LOADING_NOTHING:
            self.load.observe(path, value=phases["load_weights"], trace=trace)
        self.worst[path].add(episode.closed_ns, episode.total_s)
        gpu = self.gpu_time.close(episode)
        self.gpu_lost.step(path, by=gpu.lost)
        if gpu.saved is None:
            self.unmeasured_hits.step()
        else:
            self.gpu_saved.step(by=gpu.saved)


def _member(reason: str | None, detail: str | None) -> tuple[str, str]:
    """The closed list's words for a reason and its detail; a detail it does not know becomes the empty one."""
    return reason or "", detail if detail and detail in DETAILS.get(reason or "", ()) else ""
