"""The report: what recoveries took, by path, and why the slow ones were slow.

Hits and misses are never added up, nor are durations that began from different starting states. Everything is computed
from the journal, so the report is right also for what happened while nobody watched.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from readmit.quantiles import QUANTILES, tell
from readmit.remedies import REMEDIES
from weightcache.amdahl import LOAD, Account, account
from weightcache.availability import Availability, Outage
from weightcache.episodes import Attempt, Episode, Lookup, Replay
from weightcache.journal import Journal
from weightcache.slo import Objectives
from weightcache.starting_state import COMPARED, differences
from weightcache.vocabulary import PATHS

_BATCH: Final = 5_000


@dataclass(frozen=True)
class ByPath:
    """Recoveries by one path, from fault to first correct answer. ``worst_s`` has open ones at their age."""

    path: str
    closed: int
    outcomes: dict[str, int]
    unverified: int
    open: int
    worst_s: float
    worst_episode: str
    quantiles: dict[str, float | str]
    threshold_s: float
    late: int


@dataclass(frozen=True)
class Group:
    """Ready recoveries by one path from one starting state: mean seconds of each phase, which add up to ``total_s``."""

    path: str
    state: dict[str, Any] | None
    n: int
    total_s: float
    phases: dict[str, float]
    parts: dict[str, float]


@dataclass(frozen=True)
class Reason:
    """One reason why resident weights were not mapped."""

    reason: str
    detail: str | None
    recoveries: int
    lookups: int
    message: str | None
    remedy: str


@dataclass(frozen=True)
class SlotClock:
    """Seconds one slot was not ready, of those in which it was meant to be."""

    slot: str
    unready_s: float
    observed_s: float


@dataclass(frozen=True)
class OpenRecovery:
    """A recovery that is still under way."""

    episode: str
    slot: str
    cause: str
    path: str
    age_s: float
    attempts: int
    phase: str | None
    reason: str | None
    late: bool


@dataclass(frozen=True)
class DeadEngine:
    """An engine process that ended, and the file with its last words, if it is still kept."""

    episode: str
    slot: str
    attempt: int
    outcome: str
    exit_code: int | None
    signal: int | None
    output: str | None


@dataclass
class Report:
    """Everything, ready to be printed or written as JSON by `to_dict`."""

    node: str
    since_wall_ns: int | None
    started: int
    paths: list[ByPath]
    open: list[OpenRecovery]
    hits: int
    misses: int
    mapped: int
    """Closed recoveries that mapped resident weights on every rank."""
    tried: int
    """Closed recoveries that tried to."""
    reasons: list[Reason]
    groups: list[Group]
    amdahl: Account | None
    refused: list[str]
    """Why there is no account."""
    slots: list[SlotClock]
    outages: int
    outage_s: float
    worst_outage_s: float
    outage_open_s: float | None
    dead: list[DeadEngine]
    spool_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """JSON-compatible facts; times in seconds."""
        return asdict(self)


@dataclass
class History:
    """What a journal says, replayed."""

    replay: Replay = field(default_factory=Replay)
    availability: Availability = field(default_factory=Availability)
    outages: list[Outage] = field(default_factory=list)

    @classmethod
    def read(cls, journal: Journal) -> "History":
        """Replay a journal.

        Raises:
            ConfigError, sqlite3.Error: it cannot be read.
        """
        history = cls()
        past = "WHERE id > ? AND kind != 'probe' ORDER BY id LIMIT ?"
        while events := journal.query(past, history.replay.position, _BATCH):
            for event in events:
                change = history.replay.feed(event)
                if outage := history.availability.feed(event, history.replay, change):
                    history.outages.append(outage)
        return history


def build(
    journal: Journal,
    *,
    since_ns: int | None = None,
    slot: str | None = None,
    output: Path | None = None,
    objectives: Objectives | None = None,
) -> Report:
    """Compute the report of a journal.

    Args:
        journal: what to read.
        since_ns: Unix nanoseconds; recoveries and outages that ended before are left out.
        slot: one slot only.
        output: the folder of the engines' output.
        objectives: what is promised.

    Raises:
        ConfigError, sqlite3.Error: the journal cannot be read.
    """
    objectives = objectives or Objectives()
    history = History.read(journal)
    replay = history.replay
    now = replay.clock.now()
    start = since_ns or 0
    episodes = [it for it in replay.episodes if it.end_ns(now) >= start and slot in (None, it.slot)]
    closed = [episode for episode in episodes if not episode.is_open]
    lookups = [lookup for episode in episodes for attempt in episode.attempts for lookup in attempt.lookups]
    groups = _groups(closed)
    comparison, refused = _compare(groups)
    outages = [outage for outage in history.outages if outage.end_ns is not None and outage.end_ns >= start]
    durations = [(outage.end_ns - outage.begin_ns) / 1e9 for outage in outages if outage.end_ns is not None]
    lasting = history.availability.outage
    return Report(
        node=journal.context.node,
        since_wall_ns=since_ns,
        started=len(episodes),
        paths=[
            _path(path, here, now, objectives.thresholds_s[path])
            for path in PATHS
            if (here := [it for it in episodes if it.path == path])
        ],
        open=[_open(it, now, objectives, replay.slots[it.slot].last) for it in episodes if it.is_open],
        hits=sum(lookup.result == "hit" for lookup in lookups),
        misses=sum(lookup.result == "miss" for lookup in lookups),
        mapped=sum(episode.path == "hit" for episode in closed),
        tried=sum(episode.path in ("hit", "partial", "miss") for episode in closed),
        reasons=_reasons(closed, lookups),
        groups=groups,
        amdahl=comparison,
        refused=refused,
        slots=[
            SlotClock(name, readiness.unready_s(now), readiness.observed_s(now))
            for name, readiness in sorted(history.availability.slots.items())
            if slot in (None, name)
        ],
        outages=len(durations),
        outage_s=sum(durations),
        worst_outage_s=max(durations, default=0.0),
        outage_open_s=(now - lasting.begin_ns) / 1e9 if lasting else None,
        dead=list(_dead(episodes, output)),
        spool_bytes=journal.spool_bytes(),
    )


def _path(path: str, episodes: list[Episode], now: int, threshold: float) -> ByPath:
    closed = [episode for episode in episodes if not episode.is_open]
    worst = max(episodes, key=lambda episode: episode.age_s(now))
    ready = [episode.total_s for episode in closed if episode.outcome == "ready" and episode.verified]
    return ByPath(
        path=path,
        closed=len(closed),
        outcomes=dict(Counter(str(episode.outcome) for episode in closed)),
        unverified=sum(episode.outcome == "ready" and not episode.verified for episode in closed),
        open=len(episodes) - len(closed),
        worst_s=worst.age_s(now),
        worst_episode=worst.id,
        quantiles={name: tell(ready, quantile) for name, quantile in QUANTILES.items()},
        threshold_s=threshold,
        late=sum(it.age_s(now) > threshold or it.failed for it in episodes),
    )


def _open(episode: Episode, now: int, objectives: Objectives, last: Episode | None) -> OpenRecovery:
    age, phase = episode.age_s(now), episode.phase
    return OpenRecovery(
        episode=episode.id,
        slot=episode.slot,
        cause=episode.cause,
        path=episode.path,
        age_s=age,
        attempts=len(episode.attempts),
        phase=phase.name if phase else None,
        reason=episode.reason,
        late=age > objectives.threshold_s(episode.path, last.path if last else None),
    )


def _reasons(closed: Iterable[Episode], lookups: Iterable[Lookup]) -> list[Reason]:
    recoveries = Counter((episode.reason, episode.detail) for episode in closed if episode.reason)
    by_reason: dict[tuple[str, str | None], list[Lookup]] = {}
    for lookup in lookups:
        if lookup.result == "miss" and lookup.reason:
            by_reason.setdefault((lookup.reason, lookup.detail), []).append(lookup)
    reasons = [
        Reason(
            reason=reason,
            detail=detail,
            recoveries=recoveries[reason, detail],
            lookups=len(missed),
            message=missed[-1].attributes.get("message"),
            remedy=missed[-1].attributes.get("remedy") or REMEDIES.get(reason, ""),
        )
        for (reason, detail), missed in by_reason.items()
    ]
    return sorted(reasons, key=lambda it: (-it.recoveries, -it.lookups, it.reason))


def _groups(closed: Iterable[Episode]) -> list[Group]:
    alike: dict[tuple[Any, ...], list[Episode]] = {}
    for episode in closed:
        if episode.outcome == "ready":
            state = _state(episode) or {}
            alike.setdefault((PATHS.index(episode.path), *(state.get(name) for name in COMPARED)), []).append(episode)
    return [_group(episodes) for _, episodes in sorted(alike.items(), key=lambda it: (it[0][0], -len(it[1])))]


def _group(episodes: list[Episode]) -> Group:
    return Group(
        path=episodes[0].path,
        state=_state(episodes[0]),
        n=len(episodes),
        total_s=sum(episode.total_s for episode in episodes) / len(episodes),
        phases=_mean([episode.phases_s() for episode in episodes]),
        parts=_mean([episode.parts_s() for episode in episodes]),
    )


def _state(episode: Episode) -> dict[str, Any] | None:
    """The state that the recovery began from: its first attempt's."""
    return next((it.starting_state for it in episode.attempts if it.starting_state), None)


def _mean(measured: list[dict[str, float]]) -> dict[str, float]:
    names = {name: None for phases in measured for name in phases}
    return {name: sum(phases.get(name, 0.0) for phases in measured) / len(measured) for name in names}


def _compare(groups: list[Group]) -> tuple[Account | None, list[str]]:
    """Amdahl's account of the largest two groups that compare, or why none do."""
    resident = [group for group in groups if group.path == "hit" and group.phases.get(LOAD)]
    cold = [group for group in groups if group.path in ("miss", "off") and group.phases.get(LOAD)]
    if not resident or not cold:
        missing = "by hit" if not resident else "by miss or off"
        return None, [f"no recovery {missing} has been measured yet"]
    pairs = [(one, other) for one in cold for other in resident]
    comparable = [(one, other) for one, other in pairs if not differences(one.state, other.state)]
    one, other = max(comparable or pairs, key=lambda pair: min(pair[0].n, pair[1].n))
    if not comparable:
        return None, differences(one.state, other.state)
    return account(one.phases, other.phases), []


def _dead(episodes: Iterable[Episode], output: Path | None) -> Iterator[DeadEngine]:
    for episode in episodes:
        for attempt in episode.attempts:
            ended = attempt.exit_code is not None or attempt.signal is not None
            if ended or attempt.outcome not in (None, "ready"):
                yield DeadEngine(
                    episode=episode.id,
                    slot=episode.slot,
                    attempt=attempt.number,
                    outcome=attempt.outcome or "running",
                    exit_code=attempt.exit_code,
                    signal=attempt.signal,
                    output=last_words(output, episode, attempt),
                )


def last_words(output: Path | None, episode: Episode, attempt: Attempt) -> str | None:
    """The file that the keeper keeps of an engine's output, its last 200 lines or all of it; None if it is gone."""
    if output is None:
        return None
    log = output / f"{episode.slot}-{episode.id[:8]}-{attempt.number}.log"
    return next((str(file) for file in (log.with_name(log.name + ".tail"), log) if file.exists()), None)
