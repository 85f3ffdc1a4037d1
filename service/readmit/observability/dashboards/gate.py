"""Who gets in, and why not."""

from readmit.observability.panels import Dashboard, Panel, Target
from readmit.observability.queries import grown, of, ratio
from weightcache.vocabulary import SLOT_STATES


def dashboard() -> Dashboard:
    panels = [*_gate()]
    return Dashboard("readmit-gate", "readmit / gate", __doc__ or "", panels, build_info="readmit_gate_ready")


def _gate() -> list[Panel]:
    states = (f"{place} * {of('readmit_gate_slot_state', state=name)}" for place, name in enumerate(SLOT_STATES, 1))
    quantile = grown("readmit_gate_first_byte_seconds_bucket", by="le", over="$__rate_interval")
    probe = grown("readmit_gate_probe_seconds_sum", over="$__rate_interval")
    asked = grown("readmit_gate_probe_seconds_count", over="$__rate_interval")
    return [
        Panel(
            "State of each slot",
            [Target(f"sum by (instance, slot) ({' or '.join(states)})", "{{instance}} {{slot}}")],
            "none",
            "Only ready and draining slots get requests.",
            "ReadmitServiceOutage",
            "state-timeline",
            24,
            names=dict(enumerate(SLOT_STATES, 1)),
        ),
        Panel(
            "Gate ready",
            [Target(f"min({of('readmit_gate_ready')})", "ready")],
            "short",
            "0: every request is refused with 503 and Retry-After.",
            "ReadmitServiceOutage",
            "stat",
            4,
            red=1,
            red_below=True,
        ),
        Panel(
            "Open without golden answers",
            [Target(f"max({of('readmit_gate_open_unverified')})", "unverified")],
            "short",
            "1: nobody checks the answers. Record some: readmit probe record.",
            "ReadmitWrongAnswer",
            "stat",
            5,
            red=1,
        ),
        Panel(
            "Golden answers doubted",
            [Target(f"max({of('readmit_gate_probe_set_suspect')})", "suspect")],
            "short",
            "1: several slots answer wrongly at once. Suspect the golden answers.",
            "ReadmitWrongAnswer",
            "stat",
            5,
            red=1,
        ),
        Panel(
            "Override, time left",
            [Target(f"max(clamp_min({of('readmit_gate_override_ends_timestamp_seconds')} - time(), 0))", "left")],
            "s",
            "Above 0 an operator lets engines in whatever they answer. End it: readmit gate override --lift.",
            "ReadmitWrongAnswer",
            "stat",
            5,
            red=1,
        ),
        Panel(
            "Since the last correct answer",
            [
                Target(
                    f"max(time() - ({of('readmit_gate_last_correct_answer_timestamp_seconds')} > 0)) or vector(0)",
                    "age",
                )
            ],
            "s",
            "Of the slot that is worst off. Red: verifications do not succeed.",
            "ReadmitWrongAnswer",
            "stat",
            5,
            red=120,
        ),
        Panel(
            "Requests by how they ended",
            [Target(grown("readmit_gate_requests_total", by="outcome", over="$__rate_interval"), "{{outcome}}")],
            "short",
            "cut_off and engine_died are what clients felt of a fault.",
            "ReadmitServiceOutage",
        ),
        Panel(
            "Requests in flight",
            [Target(of("readmit_gate_in_flight_requests"), "{{instance}}")],
            "short",
            "At max_in_flight further ones are answered 429.",
            "ReadmitServiceOutage",
        ),
        Panel(
            "First byte, p95",
            [Target(f"histogram_quantile(0.95, {quantile}) and on () (sum({quantile}) > 0)", "p95")],
            "s",
            "From a request's arrival to the engine's first byte.",
            "ReadmitServiceOutage",
            empty="no requests",
        ),
        Panel(
            "Golden questions",
            [Target(grown("readmit_gate_probes_total", by="result", over="$__rate_interval"), "{{result}}")],
            "short",
            "Wrong ones eject a slot, k of n on an idle one.",
            "ReadmitWrongAnswer",
        ),
        Panel(
            "Mean time of a golden answer",
            [Target(ratio(probe, asked), "mean")],
            "s",
            "Rising: the engine is loaded, or hangs soon.",
            "ReadmitWrongAnswer",
            empty="none asked",
        ),
        Panel(
            "Openings and revocations",
            [
                Target(grown("readmit_gate_openings_total", by="slot"), "{{slot}} opened", instant=True),
                Target(
                    f"{grown('readmit_gate_revocations_total', by='slot, reason')} > 0",
                    "{{slot}} {{reason}}",
                    instant=True,
                ),
            ],
            "short",
            "How often a slot became ready, and why it ceased to be.",
            "ReadmitRecoveryLoop",
            "bargauge",
        ),
    ]
