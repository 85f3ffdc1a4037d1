"""Recording rules: sums over a job, from which alerts and dashboards divide.

Numerators and denominators are recorded on their own: a ratio of averages is right, an average of ratios is not. Longer
windows average the recorded rates over 5 minutes, so that a thousand nodes cost as little as one.
"""

from typing import Any

from readmit.observability.config import INTERVAL_S, WINDOWS

Rule = dict[str, Any]
Group = dict[str, Any]


def recording_rules() -> list[Group]:
    """The groups of ``readmit.rules.yaml``, every group after those it reads from."""
    return [
        {"name": "readmit-rates", "interval": f"{INTERVAL_S}s", "rules": [*_clock_rates(), *_rates()]},
        {"name": "readmit-windows", "interval": f"{INTERVAL_S}s", "rules": list(_windows())},
        {"name": "readmit-fleet", "interval": f"{INTERVAL_S}s", "rules": _sums()},
    ]


def _clock_rates() -> list[Rule]:
    """Of the two clocks, how fast the budget burns and how much time there is to be ready in."""
    rules = []
    for clock, prefix in (("slot", "readmit"), ("service", "readmit_service")):
        for what, counter in (("burned", "budget_burned"), ("observed", "observed")):
            expr = f"sum by (job) (rate({prefix}_{counter}_seconds_total[5m]))"
            rules.append(_rule(f"job_clock:readmit_{what}_seconds:rate5m", expr, clock=clock))
    return rules


def _rates() -> list[Rule]:
    expr = "sum by (job, result) (rate(weightcache_lookups_total[5m]))"
    return [_rule("job_result:weightcache_lookups:rate5m", expr)]


def _windows() -> list[Rule]:
    rules = []
    for window in WINDOWS:
        for what in ("burned", "observed"):
            base = f"job_clock:readmit_{what}_seconds"
            rules.append(_rule(f"{base}:rate{window}", f"avg_over_time({base}:rate5m[{window}])"))
    # A sum and not an average, which would make a week of the first hours.
    week = f"{INTERVAL_S} * sum_over_time(job_result:weightcache_lookups:rate5m[7d])"
    return [*rules, _rule("job_result:weightcache_lookups:increase7d", week)]


def _sums() -> list[Rule]:
    cold = "sum by (job, reason) (round(increase(readmit_unexpected_cold_starts_total[1h])))"
    return [
        _rule("job_clock:readmit_slo_ready_ratio:max", "max by (job, clock) (readmit_slo_ready_ratio)"),
        _rule("job_path_class:readmit_slo_events:sum", "sum by (job, path, class) (readmit_slo_events)"),
        _rule("job_path:readmit_slo_late_events:sum", "sum by (job, path) (readmit_slo_late_events)"),
        _rule("job_reason:readmit_unexpected_cold_starts:increase1h", cold),
        _rule(
            "job_reason:weightcache_next_start_would_miss:count",
            "count by (job, reason) (weightcache_next_start_would_hit == 0)",
        ),
        _rule("job_window:readmit_failure_tail_seconds:max", "max by (job, window) (readmit_failure_tail_seconds)"),
        _rule("job:readmit_slot_ready:sum", "sum by (job) (readmit_slot_ready)"),
        _rule("job:readmit_slot_wanted:sum", "sum by (job) (readmit_slot_wanted)"),
    ]


def _rule(record: str, expr: str, **labels: str) -> Rule:
    rule: Rule = {"record": record, "expr": expr}
    return {**rule, "labels": labels} if labels else rule
