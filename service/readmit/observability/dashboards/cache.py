"""What is resident, and why it was not used."""

from typing import Final

from readmit.observability.panels import Dashboard, Panel, Target
from readmit.observability.queries import grown, of, ratio

_HOURS: Final = "/ 3600"
_GIB_HOURS: Final = "/ 1024 ^ 3 / 3600"


def dashboard() -> Dashboard:
    panels = [*_cache()]
    return Dashboard("readmit-cache", "readmit / weight cache", __doc__ or "", panels)


def _cache() -> list[Panel]:
    def line(title: str, expr: str, legend: str, unit: str, text: str, runbook: str, **more: float) -> Panel:
        return Panel(title, [Target(expr, legend)], unit, text, runbook, red=more.get("red"))

    rent = grown("weightcache_resident_byte_seconds_total", by="use")
    load = ratio(grown("weightcache_load_seconds_sum", by="path"), grown("weightcache_load_seconds_count", by="path"))
    return [
        line(
            "Resident bytes",
            of("weightcache_resident_bytes"),
            "{{instance}}",
            "bytes",
            "A drop without a release is a loss.",
            "ReadmitResidencyLost",
        ),
        line(
            "Generations",
            f"sum by (state) ({of('weightcache_generations')})",
            "{{state}}",
            "short",
            "A quarantined one is handed to nobody.",
            "ReadmitWrongAnswer",
        ),
        line(
            "Attached clients",
            of("weightcache_leases"),
            "{{instance}}",
            "short",
            "One a rank of each engine on resident weights.",
            "ReadmitColdStart",
        ),
        line(
            "Loads under way",
            of("weightcache_loads"),
            "{{instance}}",
            "short",
            "Each holds the right to publish one identity.",
            "ReadmitRecoveryStuck",
        ),
        line(
            "Attaches",
            grown("weightcache_lookups_total", by="result", over="$__rate_interval"),
            "{{result}}",
            "short",
            "Hits and misses, one a rank.",
            "ReadmitHitRateLow",
        ),
        Panel(
            "Misses by reason and detail",
            [
                Target(
                    f"{grown('weightcache_misses_total', by='reason, detail')} > 0",
                    "{{reason}} {{detail}}",
                    instant=True,
                )
            ],
            "short",
            "The detail of a fingerprint is the first field that differs.",
            "ReadmitColdStart",
            "bargauge",
            empty="no misses",
        ),
        Panel(
            "Publications and releases",
            [
                Target(grown("weightcache_publishes_total", by="result"), "{{result}}", instant=True),
                Target(grown("weightcache_releases_total", by="how"), "{{how}}", instant=True),
            ],
            "short",
            "Lost is red: memory went without being released.",
            "ReadmitResidencyLost",
            "bargauge",
        ),
        Panel(
            "Mean seconds to have the weights",
            [Target(load, "{{path}}", instant=True)],
            "s",
            "The phase load_weights along the slowest rank; by hit it is no recovery time.",
            "ReadmitRecoveryStuck",
            "bargauge",
            empty="no recoveries",
        ),
        Panel(
            "Rent, GiB-hours",
            [Target(f"{rent} {_GIB_HOURS}", "{{use}}", instant=True)],
            "none",
            "What warmth costs: resident weights over time, used by an engine or idle.",
            "ReadmitNextStartWouldMiss",
            "bargauge",
        ),
        Panel(
            "GPU-hours of standbys not held",
            [Target(f"{grown('readmit_standby_gpu_seconds_not_held_total')} {_HOURS}", "not held", instant=True)],
            "h",
            "What a hot standby of every engine on resident weights would have held.",
            "ReadmitNextStartWouldMiss",
            "stat",
        ),
        Panel(
            "Daemon starts",
            [Target(grown("weightcache_daemon_starts_total", by="how"), "{{how}}", instant=True)],
            "short",
            "Readopted: with the weights of its predecessor.",
            "ReadmitDaemonAbsent",
            "bargauge",
        ),
        line(
            "Journal degraded",
            of("readmit_journal_degraded"),
            "{{instance}}",
            "short",
            "1: events wait in spools or are lost. See the disk.",
            "ReadmitJournalDegraded",
            red=1,
        ),
    ]
