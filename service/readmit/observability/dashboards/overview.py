"""Are promises kept, do recoveries map resident weights, and how bad was the worst one?"""

from typing import Final

from readmit.observability.panels import Dashboard, Panel, Target
from readmit.observability.queries import grown, of, ratio, recorded

_NEEDED: Final = 59
"""Recoveries without which nothing can be said of their 95th percentile."""

_READY: Final = "readmit_time_to_semantic_readiness_seconds"


def dashboard() -> Dashboard:
    panels = [*_now(), *_promises(), *_figures(), *_causes()]
    return Dashboard("readmit-overview", "readmit / overview", __doc__ or "", panels)


def _now() -> list[Panel]:
    oldest = f"max(time() - ({of('readmit_recovery_started_timestamp_seconds')} > 0)) or vector(0)"
    return [
        Panel(
            "Ready slots",
            [
                Target(f"sum({of('readmit_slot_ready')})", "ready"),
                Target(f"sum({of('readmit_slot_wanted')})", "wanted"),
            ],
            "short",
            "Slots whose last answers were right, and slots meant to be. If they differ, see the recovery dashboard.",
            "ReadmitRedundancyLost",
            "stat",
            4,
        ),
        Panel(
            "Oldest open recovery",
            [Target(oldest, "age")],
            "s",
            "0 without one. Red: longer than a hit may take. See which phase it is in.",
            "ReadmitRecoveryOverdue",
            "stat",
            4,
            red=60,
        ),
        Panel(
            "Slots that would start cold",
            [Target(f"count({of('weightcache_next_start_would_hit')} == 0) or vector(0)", "slots")],
            "short",
            "Red: load their weights before an engine dies. The table below says why.",
            "ReadmitNextStartWouldMiss",
            "stat",
            4,
            red=1,
        ),
    ]


def _promises() -> list[Panel]:
    burned, observed = (recorded(f"job_clock:readmit_{what}_seconds:rate30d") for what in ("burned", "observed"))
    promised = recorded("job_clock:readmit_slo_ready_ratio:max")
    events = recorded("job_path_class:readmit_slo_events:sum", 'class=~"late|failed"')
    late = f"sum by (job, path) ({events})"
    return [
        Panel(
            "Ready, 30 days",
            [Target(f"1 - {ratio(burned, observed)}", "{{job}} {{clock}}")],
            "percentunit",
            "By slot, and by service (some slot of the node ready). Planned recoveries in time do not count.",
            "ReadmitReadinessBudgetBurn",
            "stat",
            6,
        ),
        Panel(
            "Budget left, 30 days",
            [Target(f"1 - {ratio(burned, observed)} / (1 - {promised})", "{{job}} {{clock}}")],
            "percentunit",
            "Red: spent. Find out whether many short recoveries or few long ones did it.",
            "ReadmitReadinessBudgetBurn",
            "stat",
            6,
            red=0,
            red_below=True,
        ),
        Panel(
            "Late or failed recoveries left, 90 days",
            [Target(f"{recorded('job_path:readmit_slo_late_events:sum')} - {late}", "{{job}} {{path}}", instant=True)],
            "short",
            "Whole events by path. Below 0: exhausted; read each late one's trace.",
            "ReadmitLateBudgetExhausted",
            "bargauge",
            12,
        ),
    ]


def _figures() -> list[Panel]:
    hits = grown("weightcache_lookups_total", result="hit")
    panels = [
        Panel(
            "Cache hit rate",
            [Target(ratio(hits, grown("weightcache_lookups_total")), "hit rate", instant=True)],
            "percentunit",
            "Attaches that mapped, of those that tried; each rank counts. Red: see the miss reasons beside it.",
            "ReadmitHitRateLow",
            "stat",
            4,
            red=0.9,
            red_below=True,
            empty="no attach",
        ),
        Panel(
            "Attaches",
            [Target(grown("weightcache_lookups_total"), "attaches", instant=True)],
            "short",
            "How many the hit rate rests on. Of few it says little.",
            "ReadmitHitRateLow",
            "stat",
            4,
        ),
        Panel(
            "Failure tail, 30 days",
            [Target(f"max({of('readmit_failure_tail_seconds', window='30d')})", "worst")],
            "s",
            "The worst recovery in which the cache could not be used, whatever came of it; open ones at their age.",
            "ReadmitColdStart",
            "stat",
            4,
        ),
        Panel(
            "Worst hit, 30 days",
            [Target(f"max({of('readmit_worst_recovery_seconds', path='hit', window='30d')})", "worst")],
            "s",
            "From the fault to the first correct answer. What a hit promises is in readmit_slo_threshold_seconds.",
            "ReadmitRecoveryOverdue",
            "stat",
            4,
            red=60,
        ),
    ]
    for path in ("hit", "miss"):
        count = grown(f"{_READY}_count", path=path)
        quantile = f"histogram_quantile(0.95, {grown(f'{_READY}_bucket', by='le', path=path)})"
        panels.append(
            Panel(
                f"p95 by {path}, and n",
                [
                    Target(f"{quantile} and on () ({count} >= {_NEEDED})", "p95", instant=True),
                    Target(count, "n", instant=True),
                ],
                "none",
                f"Seconds. Fewer than {_NEEDED} recoveries say nothing about a 95th percentile; see the worst one.",
                "ReadmitRecoveryOverdue",
                "stat",
                4,
                empty=f"insufficient data (need {_NEEDED})",
            )
        )
    for path in ("hit", "miss"):
        panels.append(
            Panel(
                f"Time to semantic readiness by {path}",
                [Target(grown(f"{_READY}_bucket", by="le", over="$__rate_interval", path=path))],
                "s",
                "Recoveries whose answers were checked. A second cloud above the first is a second cause.",
                "ReadmitRecoveryOverdue",
                "heatmap",
                12,
            )
        )
    return panels


def _causes() -> list[Panel]:
    return [
        Panel(
            "Why weights were missed",
            [Target(f"{grown('weightcache_misses_total', by='reason')} > 0", "{{reason}}", instant=True)],
            "short",
            "Failed attaches by reason. Each reason's remedy is in readmit report.",
            "ReadmitColdStart",
            "bargauge",
            empty="no misses",
        ),
        Panel(
            "Recoveries by path and outcome",
            [
                Target(
                    f"{grown('readmit_recoveries_total', by='path, outcome')} > 0", "{{path}} {{outcome}}", instant=True
                )
            ],
            "short",
            "Anything but ready has left a slot that is not.",
            "ReadmitRecoveryFailed",
            "bargauge",
            empty="no recoveries",
        ),
        Panel(
            "Would the next start hit?",
            [Target(of("weightcache_next_start_would_hit"), "{{instance}} {{slot}} {{reason}}", instant=True)],
            "short",
            "0 is a cold start to come, and its reason.",
            "ReadmitNextStartWouldMiss",
            "table",
            names={0: "cold", 1: "hit"},
        ),
    ]
