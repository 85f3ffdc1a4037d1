"""Which nodes would start cold, and which recover badly."""

from readmit.observability.panels import Dashboard, Panel, Target
from readmit.observability.queries import grown, of, recorded


def dashboard() -> Dashboard:
    panels = [*_fleet()]
    return Dashboard("readmit-fleet", "readmit / fleet", __doc__ or "", panels)


def _fleet() -> list[Panel]:
    tail = of("readmit_failure_tail_seconds", window="7d")
    missing = f"({of('readmit_slot_wanted')} - {of('readmit_slot_ready')}) > 0"
    return [
        Panel(
            "Slots that would start cold, by reason",
            [
                Target(
                    f"{recorded('job_reason:weightcache_next_start_would_miss:count')} or on () vector(0)", "{{reason}}"
                )
            ],
            "short",
            "Before a roll-out all of them should be 0.",
            "ReadmitNextStartWouldMiss",
            red=1,
        ),
        Panel(
            "Unexpected cold starts in an hour",
            [Target(recorded("job_reason:readmit_unexpected_cold_starts:increase1h"), "{{reason}}")],
            "short",
            "Three or more page. Stop the roll-out.",
            "ReadmitColdStartsAcrossFleet",
            red=3,
        ),
        Panel(
            "Slots not ready",
            [Target(f"sum({missing}) or vector(0)", "slots")],
            "short",
            "Of those meant to be.",
            "ReadmitRedundancyLost",
            red=1,
        ),
        Panel(
            "Worst failure tail by node, 7 days",
            [Target(f"topk(10, max by (instance) ({tail}))", "{{instance}}", instant=True)],
            "s",
            "The nodes to look at first.",
            "ReadmitColdStart",
            "bargauge",
            12,
        ),
        Panel(
            "Releases of readmit",
            [Target(f"count by (version) ({of('readmit_build_info')})", "{{version}}", instant=True)],
            "short",
            "Nodes by version. Two at once are a roll-out.",
            "ReadmitColdStartsAcrossFleet",
            "bargauge",
            6,
        ),
        Panel(
            "Generations by node",
            [Target(f"sum by (instance) ({of('weightcache_generations')})", "{{instance}}", instant=True)],
            "short",
            "A node without any starts cold.",
            "ReadmitNextStartWouldMiss",
            "table",
            6,
        ),
        Panel(
            "Recoveries by cause",
            [Target(f"{grown('readmit_recoveries_started_total', by='cause')} > 0", "{{cause}}", instant=True)],
            "short",
            "gpu_fault and node_reboot are disaster recoveries.",
            "ReadmitRecoveryLoop",
            "bargauge",
            empty="no recoveries",
        ),
        Panel(
            "Takeovers",
            [Target(grown("readmit_takeovers_total"), "takeovers", instant=True)],
            "short",
            "Slots lost while another one served on.",
            "ReadmitRedundancyLost",
            "stat",
        ),
        Panel(
            "Nodes that answer",
            [Target(f"sum({of('up')})", "up"), Target(f"count({of('up')})", "all")],
            "short",
            "Daemons that Prometheus can scrape.",
            "ReadmitDaemonAbsent",
            "stat",
        ),
    ]
