"""What a drill measured: everything about recoveries from the journal, with what it takes to compare machines."""

import os
import platform
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from readmit.quantiles import QUANTILES, tell
from readmit.report import History
from weightcache.episodes import Episode
from weightcache.journal import Journal
from weightcache.version import VERSION
from weightcache.vocabulary import PATHS


@dataclass(frozen=True)
class Recovery:
    """One engine's recovery. ``outage_s`` is how much of it no slot of the node was ready."""

    episode: str
    cause: str
    path: str
    outcome: str | None
    verified: bool | None
    reason: str | None
    detail: str | None
    attempts: int
    total_s: float
    outage_s: float
    phases_s: dict[str, float]
    parts_s: dict[str, float]
    starting_state: dict[str, Any] | None


@dataclass(frozen=True)
class DaemonRecovery:
    """From a daemon's SIGKILL until another process serves the same weights to the same engines.

    ``leases`` are those of engines that were not killed with it.
    """

    seconds: float
    generations: int
    generations_kept: int
    leases: int
    leases_kept: int
    engine_kept: bool

    @property
    def whole(self) -> bool:
        """Whether nothing was lost."""
        return (self.generations_kept, self.leases_kept) == (self.generations, self.leases)


@dataclass(frozen=True)
class Spread:
    """Seconds of n events. A quantile that n is too small for is a sentence instead."""

    n: int
    quantiles: dict[str, float | str]
    max_s: float

    @classmethod
    def of(cls, seconds: list[float]) -> "Spread":
        return cls(len(seconds), {name: tell(seconds, at) for name, at in QUANTILES.items()}, max(seconds))


@dataclass(frozen=True)
class ByPath:
    """Recoveries by one path that ended in a correct answer, and where their time went on average."""

    path: str
    recovery: Spread
    outage: Spread
    phases_s: dict[str, float]
    parts_s: dict[str, float]


@dataclass(frozen=True)
class DrillReport:
    """A drill, ready to be printed or written as JSON.

    ``stopped`` says why it ended early; ``astray`` counts recoveries that took another path than was asked for.
    """

    node: str
    slot: str
    order: dict[str, Any]
    stopped: str
    outcomes: dict[str, int]
    astray: int
    paths: list[ByPath]
    daemon: Spread | None
    machine: dict[str, Any]
    recoveries: list[Recovery]
    daemons: list[DaemonRecovery]

    @property
    def passed(self) -> bool:
        """Whether every fault ended well, by the path that was asked for."""
        bad = sum(n for outcome, n in self.outcomes.items() if outcome != "ready")
        return not (self.stopped or self.astray or bad) and all(it.whole for it in self.daemons)

    def to_dict(self) -> dict[str, Any]:
        """JSON-compatible facts; times in seconds."""
        return {**asdict(self), "passed": self.passed}


def account(
    journal: Journal,
    order: dict[str, Any],
    slot: str,
    episodes: list[str],
    daemons: list[DaemonRecovery],
    stopped: str = "",
) -> DrillReport:
    """The report of a drill.

    Args:
        journal: where its recoveries are.
        order: what was asked for.
        slot: whose engine failed.
        episodes: ids, in order.
        daemons: what was measured of the daemon.
        stopped: why it ended early, empty if it did not.
    """
    history = History.read(journal)
    found = [it for it in map(history.replay.episode, episodes) if it is not None]
    now = history.replay.clock.now()
    recoveries = [_recovery(it, history, now) for it in found]
    if order["path"] == "standby":  # each fault has two: the service's, by a standby, and then the engine's own
        astray = len(recoveries) - 2 * sum(it.path == "standby" for it in recoveries)
    else:
        astray = sum(it.path != order["path"] for it in recoveries)
    return DrillReport(
        node=journal.context.node,
        slot=slot,
        order=order,
        stopped=stopped,
        outcomes=dict(Counter(it.outcome or "open" for it in recoveries)),
        astray=astray,
        paths=[
            _by_path(path, here)
            for path in PATHS
            if (here := [it for it in recoveries if it.path == path and it.outcome == "ready"])
        ],
        daemon=Spread.of([it.seconds for it in daemons]) if daemons else None,
        machine=machine(),
        recoveries=recoveries,
        daemons=daemons,
    )


def machine() -> dict[str, Any]:
    """What this machine is, as far as it makes numbers differ."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "readmit": VERSION,
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": pages,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model")))
    return next(names, platform.machine())


def _recovery(episode: Episode, history: History, now: int) -> Recovery:
    end = episode.end_ns(now)
    lasting = history.availability.outage
    outages = [*history.outages, *([lasting] if lasting else [])]
    shared = (min(end, it.end_ns or end) - max(episode.fault_ns, it.begin_ns) for it in outages)
    return Recovery(
        episode=episode.id,
        cause=episode.cause,
        path=episode.path,
        outcome=episode.outcome,
        verified=episode.verified,
        reason=episode.reason,
        detail=episode.detail,
        attempts=len(episode.attempts),
        total_s=episode.age_s(now),
        outage_s=sum(max(0, each) for each in shared) / 1e9,
        phases_s=episode.phases_s(now),
        parts_s=episode.parts_s(now),
        starting_state=next((it.starting_state for it in episode.attempts if it.starting_state), None),
    )


def _by_path(path: str, recoveries: list[Recovery]) -> ByPath:
    return ByPath(
        path=path,
        recovery=Spread.of([it.total_s for it in recoveries]),
        outage=Spread.of([it.outage_s for it in recoveries]),
        phases_s=_mean([it.phases_s for it in recoveries]),
        parts_s=_mean([it.parts_s for it in recoveries]),
    )


def _mean(measured: list[dict[str, float]]) -> dict[str, float]:
    names = {name: None for seconds in measured for name in seconds}
    return {name: sum(it.get(name, 0.0) for it in measured) / len(measured) for name in names}
