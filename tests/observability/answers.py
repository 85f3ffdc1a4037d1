"""What every query, rule and alert should say, worked out from the journal.

An answer leaves out the label ``job``, which is the same everywhere. Where nothing should come back the answer is
empty, and SQL has said so: no query is excused.
"""

from collections.abc import Callable, Mapping
from typing import Final

from tests.observability.facts import Facts, Found
from tests.observability.figures import (
    DETAIL,
    MISSED,
    MONTH_MIN,
    REASON,
    WINDOW_MIN,
    Answer,
    above,
    budget_left,
    budgets,
    burn,
    clocked,
    gpu_lost,
    gpu_saved,
    hit_rate,
    label,
    late_or_failed,
    load_share,
    lookups,
    members,
    outage,
    p95,
    promises,
    rate,
    recorded,
    rent,
    slo_events,
    slot_share,
    standbys,
    started,
    tail,
    takeovers,
    unexpected,
    unready_share,
    verified,
    week,
    worst_hit,
)

from readmit.observability.config import BURNS, FAULTS, WINDOWS
from weightcache.version import VERSION
from weightcache.vocabulary import CAUSES, MISS_REASONS, PATHS

# Rules. --------------------------------------------------------------------------------------------------------------

_WOULD_MISS: Final = "job_reason:weightcache_next_start_would_miss:count"
_COLD: Final = "job_reason:readmit_unexpected_cold_starts:increase1h"
_FAULTS: Final = ", ".join(f"'{cause}'" for cause in FAULTS)


def _ready(facts: Facts) -> Found:
    return facts.one("SELECT sum(state = 'ready') FROM slots")


def _wanted(facts: Facts) -> Found:
    return facts.one("SELECT sum(state != 'stopped') FROM slots")


def _clock(what: str, clock: str) -> Answer:
    return lambda f: {(): rate(f, what)[clock]}


def _window(what: str, minutes: int) -> Answer:
    return lambda f: clocked(recorded(f, what, minutes))


RULES: Final[Mapping[str, Answer]] = {
    **{
        f"job_clock:readmit_{what}_seconds:rate5m {clock}": _clock(what, clock)
        for what in ("burned", "observed")
        for clock in ("slot", "service")
    },
    "job_result:weightcache_lookups:rate5m": lambda f: {
        labels: count / 300 for labels, count in members(lookups(f, 5), *_RESULTS).items()
    },
    **{
        f"job_clock:readmit_{what}_seconds:rate{window}": _window(what, WINDOW_MIN[window])
        for what in ("burned", "observed")
        for window in WINDOWS
    },
    "job_result:weightcache_lookups:increase7d": lambda f: members(
        {label(result=result): count for result, count in week(f).items()}, *_RESULTS
    ),
    "job_clock:readmit_slo_ready_ratio:max": lambda f: clocked(promises(f)),
    "job_path_class:readmit_slo_events:sum": slo_events,
    "job_path:readmit_slo_late_events:sum": budgets,
    _COLD: lambda f: members(unexpected(f, 60, "reason", "reason"), *(label(reason=reason) for reason in MISS_REASONS)),
    _WOULD_MISS: lambda f: f.by("reason", "SELECT reason, count(*) FROM verdicts WHERE NOT hit GROUP BY 1"),
    "job_window:readmit_failure_tail_seconds:max": lambda f: {
        label(window=name): tail(f, days)[()] for name, days in (("24h", 1), ("7d", 7), ("30d", 30))
    },
    "job:readmit_slot_ready:sum": _ready,
    "job:readmit_slot_wanted:sum": _wanted,
}
"""What recording rules should say, by name and, where several share one, by clock."""


# Dashboards. ---------------------------------------------------------------------------------------------------------

_PHASE_MEANS: Final = """
SELECT r.path, phase,
       sum(p.seconds) / (SELECT count(*) FROM recoveries x WHERE x.path = r.path AND x.closed_ns > :since)
FROM recoveries r JOIN phase_seconds p USING (node, episode) WHERE closed_ns > :since GROUP BY 1, 2
"""
_LOAD_MEANS: Final = """
SELECT path, avg(p.seconds) FROM recoveries JOIN phase_seconds p USING (node, episode)
WHERE closed_ns > :since AND phase = 'load_weights' AND path != 'unknown' GROUP BY 1
"""
_LATEST: Final = """
SELECT node, slot, phase, p.seconds FROM recoveries r JOIN phase_seconds p USING (node, episode)
WHERE closed_ns = (
  SELECT max(closed_ns) FROM recoveries x WHERE x.node = r.node AND x.slot = r.slot AND x.path != 'standby')
"""
_EMPTY_PATHS: Final = tuple(label(path=path) for path in PATHS)
_RESULTS: Final = (label(result="hit"), label(result="miss"))

EVER: Final[Mapping[str, Answer]] = {
    "readmit-overview/Ready slots/A": _ready,
    "readmit-overview/Ready slots/B": _wanted,
    "readmit-overview/Oldest open recovery/A": lambda f: f.one("SELECT max(seconds) FROM still"),
    "readmit-overview/Slots that would start cold/A": lambda f: f.one("SELECT count(*) FROM verdicts WHERE NOT hit"),
    "readmit-overview/Failure tail, 30 days/A": lambda f: tail(f, 30),
    "readmit-overview/Worst hit, 30 days/A": worst_hit,
    "readmit-overview/Time to semantic readiness by hit/A": lambda f: verified(f, "hit", 5),
    "readmit-overview/Time to semantic readiness by miss/A": lambda f: verified(f, "miss", 5),
    "readmit-overview/Would the next start hit?/A": lambda f: f.by(
        "instance slot reason", "SELECT node, slot, reason, hit FROM verdicts"
    ),
    "readmit-recovery/Phase/A": lambda f: f.by(
        "instance slot",
        "SELECT s.node, s.slot, coalesce(place, 0) FROM slots s "
        "LEFT JOIN stages t ON (t.node, t.slot) = (s.node, s.slot)",
    ),
    "readmit-recovery/Attempts of the open recovery/A": lambda f: f.by(
        "instance slot",
        "SELECT s.node, s.slot, (SELECT count(*) FROM still JOIN attempts a USING (node, episode), moment "
        "WHERE still.node = s.node AND still.slot = s.slot AND heard_ns <= moment.now_ns) FROM slots s",
    ),
    "readmit-recovery/Time left to the deadline/A": lambda f: f.by(
        "instance slot",
        "SELECT s.node, s.slot, coalesce(deadline_s - now_ns / 1e9, 0) FROM slots s LEFT JOIN still t "
        "ON (t.node, t.slot) = (s.node, s.slot)",
    ),
    "readmit-recovery/Share of the last hour that was not ready/A": slot_share,
    "readmit-recovery/Latest recovery by phase/A": lambda f: above(f.by("instance slot phase", _LATEST)),
    "readmit-recovery/Recoveries, with traces/A": lambda f: members(
        f.recovered("path", "path", where="outcome = 'ready' AND verified", minutes=5), *_EMPTY_PATHS
    ),
    "readmit-cache/Resident bytes/A": lambda f: f.by(
        "instance", "SELECT n.node, (SELECT sum(bytes) FROM resident r WHERE r.node = n.node) FROM nodes n"
    ),
    "readmit-cache/Generations/A": lambda f: members(
        {label(state="active"): f.one("SELECT count(*) FROM resident")[()]}, label(state="quarantined")
    ),
    "readmit-cache/Attached clients/A": lambda f: f.by(
        "instance",
        "SELECT n.node, (SELECT count(*) FROM leases l, moment WHERE l.node = n.node AND l.begin_ns <= now_ns "
        "AND coalesce(l.end_ns, 9e18) > now_ns) FROM nodes n",
    ),
    "readmit-cache/Loads under way/A": lambda f: f.by(
        "instance",
        "SELECT n.node, (SELECT sum(name = 'begin') - sum(name != 'begin') FROM e, moment WHERE kind = 'publish' "
        "AND e.node = n.node AND at_ns <= now_ns) FROM nodes n",
    ),
    "readmit-cache/Attaches/A": lambda f: members(lookups(f, 5), *_RESULTS),
    "readmit-cache/Journal degraded/A": lambda f: f.by("instance", "SELECT node, 0 FROM nodes"),
    "readmit-fleet/Slots that would start cold, by reason/A": lambda f: RULES[_WOULD_MISS](f) or {(): 0},
    "readmit-fleet/Unexpected cold starts in an hour/A": RULES[_COLD],
    "readmit-fleet/Slots not ready/A": lambda f: f.one("SELECT sum(state = 'unready') FROM slots"),
    "readmit-fleet/Worst failure tail by node, 7 days/A": lambda f: tail(f, 7, "instance"),
    "readmit-fleet/Releases of readmit/A": lambda f: {label(version=VERSION): f.one("SELECT count(*) FROM nodes")[()]},
    "readmit-fleet/Generations by node/A": lambda f: f.by(
        "instance", "SELECT n.node, (SELECT count(*) FROM resident r WHERE r.node = n.node) FROM nodes n"
    ),
    "readmit-fleet/Nodes that answer/A": lambda f: f.one("SELECT count(*) FROM nodes"),
    "readmit-fleet/Nodes that answer/B": lambda f: f.one("SELECT count(*) FROM nodes"),
}
"""What panels show at any moment."""

MONTHLY: Final[Mapping[str, Answer]] = {
    "readmit-overview/Ready, 30 days/A": lambda f: clocked(
        {clock: 1 - share for clock, share in unready_share(f, MONTH_MIN).items()}
    ),
    "readmit-overview/Budget left, 30 days/A": budget_left,
    "readmit-overview/Late or failed recoveries left, 90 days/A": lambda f: {
        labels: budget - late_or_failed(f)[dict(labels)["path"]] for labels, budget in budgets(f).items()
    },
    "readmit-overview/Cache hit rate/A": lambda f: {(): hit_rate(f, MONTH_MIN)},
    "readmit-overview/Attaches/A": lambda f: {(): sum(lookups(f, MONTH_MIN).values())},
    "readmit-overview/p95 by hit, and n/A": p95("hit"),
    "readmit-overview/p95 by hit, and n/B": lambda f: {(): verified(f, "hit", MONTH_MIN)[label(le="+Inf")]},
    "readmit-overview/p95 by miss, and n/A": p95("miss"),
    "readmit-overview/p95 by miss, and n/B": lambda f: {(): verified(f, "miss", MONTH_MIN)[label(le="+Inf")]},
    "readmit-overview/Why weights were missed/A": lambda f: f.events("reason", REASON, MISSED),
    "readmit-overview/Recoveries by path and outcome/A": lambda f: f.recovered("path outcome", "path, outcome"),
    "readmit-recovery/Mean recovery by path and phase/A": lambda f: above(f.by("path phase", _PHASE_MEANS)),
    "readmit-recovery/Amdahl: share of a cold recovery that loads weights/A": lambda f: {(): load_share(f)},
    "readmit-recovery/Amdahl: the limit/A": lambda f: {(): 1 / (1 - load_share(f))},
    "readmit-recovery/GPU-hours lost to recoveries/A": gpu_lost,
    "readmit-recovery/GPU-hours saved by hits/A": gpu_saved,
    "readmit-recovery/Recoveries by cause/A": lambda f: f.recovered("cause", "cause"),
    "readmit-cache/Misses by reason and detail/A": lambda f: f.events("reason detail", f"{REASON}, {DETAIL}", MISSED),
    "readmit-cache/Publications and releases/A": lambda f: members(
        f.events("result", "name", "kind = 'publish' AND name != 'begin'"),
        label(result="published"),
        label(result="failed"),
    ),
    "readmit-cache/Publications and releases/B": lambda f: members(
        f.events("how", "name", "kind = 'release'"),
        *(label(how=how) for how in ("released", "evicted", "replaced", "lost")),
    ),
    "readmit-cache/Mean seconds to have the weights/A": lambda f: f.by("path", _LOAD_MEANS),
    "readmit-cache/Rent, GiB-hours/A": rent,
    "readmit-cache/GPU-hours of standbys not held/A": standbys,
    "readmit-cache/Daemon starts/A": lambda f: members(
        f.by("how", "SELECT how, count(*) FROM daemons WHERE at_ns > :since AND at_ns <= :now GROUP BY 1"),
        label(how="started"),
        label(how="readopted"),
    ),
    "readmit-fleet/Recoveries by cause/A": lambda f: started(
        f, ", ".join(f"'{cause}'" for cause in CAUSES), MONTH_MIN, "cause", "cause"
    ),
    "readmit-fleet/Takeovers/A": takeovers,
}
"""What panels show whose range is that of the dashboard, here 30 days."""


# Alerts. -------------------------------------------------------------------------------------------------------------


def _redundancy(facts: Facts) -> Found:
    query = (
        "SELECT node, sum(state = 'ready') FROM slots GROUP BY node "
        "HAVING sum(state != 'stopped') >= 2 AND sum(state = 'ready') < sum(state != 'stopped')"
    )
    return facts.by("instance", query)


def _loop(facts: Facts) -> Found:
    attempts = (
        "SELECT still.node, count(*) FROM still JOIN attempts a USING (node, episode), moment "
        "WHERE heard_ns <= moment.now_ns GROUP BY still.node, still.slot HAVING count(*) >= 3"
    )
    return {**above(started(facts, _FAULTS, 30), 2.5), **facts.by("instance", attempts)}


def _wrong(facts: Facts) -> Found:
    wrong = facts.events("instance", "node", "kind = 'probe' AND name = 'wrong'", 15)
    return {**above(wrong, 4.5), **started(facts, "'wrong_answer'", 15)}


def _lost(facts: Facts) -> Found:
    missed = facts.events("instance detail", f"node, {DETAIL}", f"{MISSED} AND {REASON} = 'residency_lost'", 15)
    return {**facts.events("instance", "node", "kind = 'release' AND name = 'lost'", 15), **missed}


def _low(facts: Facts) -> Found:
    counts = week(facts)
    total = sum(counts.values())
    return {(): counts["hit"] / total} if total >= 20 and counts["hit"] / total < 0.9 else {}


def _nothing(facts: Facts) -> Found:
    """What no journal tells of: every scrape of the history succeeds, and no event waits in a spool."""
    return {}


ALERTS: Final[Mapping[str, Answer]] = {
    "ReadmitNextStartWouldMiss": lambda f: f.by(
        "instance slot reason",
        "SELECT node, slot, reason, 0 FROM verdicts v WHERE NOT hit AND NOT EXISTS "
        "(SELECT 1 FROM slots s WHERE (s.node, s.slot) = (v.node, v.slot) AND state = 'stopped')",
    ),
    "ReadmitRedundancyLost": _redundancy,
    "ReadmitRecoveryOverdue": lambda f: above(
        f.by("instance slot", "SELECT node, slot, now_ns / 1e9 - deadline_s FROM still")
    ),
    "ReadmitNobodyRecovers": lambda f: f.by(
        "instance slot",
        "SELECT node, slot, 1 FROM slots s WHERE state = 'unready' AND NOT EXISTS (SELECT 1 FROM still t "
        "WHERE (t.node, t.slot) = (s.node, s.slot))",
    ),
    "ReadmitWrongAnswer": _wrong,
    "ReadmitRecoveryStuck": lambda f: f.by(
        "instance slot phase",
        "SELECT node, slot, phase, (now_ns - begin_ns) / 1e9 FROM stages JOIN limits l USING (phase), moment "
        "WHERE (now_ns - begin_ns) / 1e9 > l.seconds",
    ),
    "ReadmitRecoveryLoop": _loop,
    "ReadmitRecoveryFailed": lambda f: f.recovered(
        "instance", "node", where="outcome != 'ready' AND NOT stopped", minutes=15
    ),
    "ReadmitServiceOutage": lambda f: above(outage(f), f.outage_threshold_s),
    "ReadmitColdStart": lambda f: unexpected(f, 15, "instance reason", "node, reason"),
    "ReadmitColdStartsAcrossFleet": lambda f: above({(): sum(unexpected(f, 60, "reason", "reason").values())}, 2.5),
    "ReadmitQuantNotAllowed": lambda f: f.events(
        "instance detail", f"node, {DETAIL}", f"{MISSED} AND {REASON} = 'quant_not_allowed'", 60
    ),
    "ReadmitResidencyLost": _lost,
    "ReadmitHitRateLow": _low,
    **{f"ReadmitReadinessBudgetBurn {it.long}": burn(it.long, it.short, it.factor) for it in BURNS},
    "ReadmitLateBudgetExhausted": lambda f: {
        label(path=path): late for path, late in late_or_failed(f).items() if late > budgets(f)[label(path=path)]
    },
    "ReadmitDaemonAbsent": _nothing,
    "ReadmitTelemetryAbsent": _nothing,
    "ReadmitJournalDegraded": _nothing,
}
"""What alerts should say, by name and, where several share one, by their longer window. Empty is silent."""

VARIABLES: Final[Mapping[str, Callable[[Facts], list[str]]]] = {
    "job": lambda f: ["readmit"],
    "instance": lambda f: [node for (node,) in f.rows("SELECT node FROM nodes ORDER BY 1")],
    "slot": lambda f: [slot for (slot,) in f.rows("SELECT DISTINCT slot FROM slots ORDER BY 1")],
}
"""What template variables offer."""
