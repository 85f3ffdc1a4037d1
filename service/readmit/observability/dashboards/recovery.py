"""What a slot's recovery is doing, and where the time of past ones went."""

from typing import Final

from readmit.observability.panels import Dashboard, Panel, Target
from readmit.observability.queries import grown, of, ratio
from weightcache.vocabulary import PHASES

_READY: Final = "readmit_time_to_semantic_readiness_seconds"
_HOURS: Final = "/ 3600"


def dashboard() -> Dashboard:
    panels = [*_one_recovery(), *_where_time_went()]
    return Dashboard("readmit-recovery", "readmit / recovery", __doc__ or "", panels, slots=True)


def _one_recovery() -> list[Panel]:
    slot = 'slot=~"$slot"'
    steps = (f"{place} * {of('readmit_recovery_phase', slot, phase=name)}" for place, name in enumerate(PHASES, 1))
    phase = f"sum by (instance, slot) ({' or '.join(steps)})"
    left = f"({of('readmit_recovery_deadline_timestamp_seconds', slot)} > 0) - time()"
    burned = of("readmit_budget_burned_seconds_total", slot)
    observed = of("readmit_observed_seconds_total", slot)
    unready = ratio(f"sum by (instance, slot) (rate({burned}[1h]))", f"sum by (instance, slot) (rate({observed}[1h]))")
    return [
        Panel(
            "Phase",
            [Target(phase, "{{instance}} {{slot}}")],
            "none",
            "The phase each slot's open recovery is in. One colour for long: it is stuck.",
            "ReadmitRecoveryStuck",
            "state-timeline",
            24,
            names={0: "none", **dict(enumerate(PHASES, 1))},
        ),
        Panel(
            "Attempts of the open recovery",
            [Target(of("readmit_recovery_attempts", slot), "{{instance}} {{slot}}")],
            "short",
            "Each is an engine process. Three or more are a loop: read the engine's last words.",
            "ReadmitRecoveryLoop",
            red=3,
        ),
        Panel(
            "Time left to the deadline",
            [Target(f"{left} or 0 * {of('readmit_slot_wanted', slot)}", "{{instance}} {{slot}}")],
            "s",
            "Below 0 the recovery is late; 0 without one.",
            "ReadmitRecoveryOverdue",
        ),
        Panel(
            "Share of the last hour that was not ready",
            [Target(unready, "{{instance}} {{slot}}")],
            "percentunit",
            "Without planned recoveries that were in time.",
            "ReadmitReadinessBudgetBurn",
        ),
    ]


def _where_time_went() -> list[Panel]:
    slot = 'slot=~"$slot"'
    cold, seconds = 'path=~"miss|off"', "readmit_recovery_phase_seconds_total"
    share = ratio(grown(seconds, cold, phase="load_weights"), grown(seconds, cold))
    mean = (
        f"({grown(seconds, by='path, phase')} > 0) / on (path) group_left () "
        f"({grown('readmit_recoveries_total', by='path')} > 0)"
    )
    return [
        Panel(
            "Latest recovery by phase",
            [Target(f"{of('readmit_last_recovery_phase_seconds', slot)} > 0", "{{slot}} {{phase}}", instant=True)],
            "s",
            "Along the slowest rank. The longest bar is the next one worth work.",
            "ReadmitRecoveryStuck",
            "bargauge",
            12,
            empty="no recovery yet",
        ),
        Panel(
            "Mean recovery by path and phase",
            [Target(mean, "{{path}} {{phase}}", instant=True)],
            "s",
            "Every path for itself. What is long by hit is what resident weights cannot help with.",
            "ReadmitRecoveryOverdue",
            "bargauge",
            12,
            empty="no recoveries",
        ),
        Panel(
            "Amdahl: share of a cold recovery that loads weights",
            [Target(share, "F", instant=True)],
            "percentunit",
            "F in Amdahl's law.",
            "ReadmitColdStart",
            "stat",
            6,
            empty="no cold recovery",
        ),
        Panel(
            "Amdahl: the limit",
            [Target(f"1 / (1 - {share})", "times faster at most", instant=True)],
            "none",
            "However fast weights are there, a recovery gets no more times faster than this.",
            "ReadmitColdStart",
            "stat",
            6,
            empty="no cold recovery",
        ),
        Panel(
            "GPU-hours lost to recoveries",
            [Target(f"{grown('readmit_gpu_seconds_lost_total')} {_HOURS}", "lost", instant=True)],
            "h",
            "Seconds of recoveries times the GPUs of their engines.",
            "ReadmitColdStart",
            "stat",
            6,
        ),
        Panel(
            "GPU-hours saved by hits",
            [Target(f"{grown('readmit_gpu_seconds_saved_total')} {_HOURS}", "saved", instant=True)],
            "h",
            "Against cold starts measured here, of the same model from the same starting state.",
            "ReadmitColdStart",
            "stat",
            6,
        ),
        Panel(
            "Recoveries, with traces",
            [Target(grown(f"{_READY}_count", by="path", over="$__rate_interval"), "{{path}}", exemplar=True)],
            "short",
            "Each diamond is one recovery and leads to its trace.",
            "ReadmitRecoveryOverdue",
            width=12,
        ),
        Panel(
            "Recoveries by cause",
            [Target(f"{grown('readmit_recoveries_by_cause_total', by='cause')} > 0", "{{cause}}", instant=True)],
            "short",
            "A cause is never guessed: what nobody can prove is a crash.",
            "ReadmitRecoveryLoop",
            "bargauge",
            12,
            empty="no recoveries",
        ),
    ]
