"""What the gate counts: ``readmit_gate_*`` only. All else comes from the daemon, which reads the journal."""

from collections.abc import Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from readmit.gate.cost import Cost
from readmit.gate.slots import REVOCATIONS, Slot, Transition
from readmit.probes import RESULTS, Verdict
from weightcache.vocabulary import SLOT_STATES

REQUEST_OUTCOMES: Final = (
    "answered",
    "not_ready",
    "draining",
    "overloaded",
    "engine_refused",
    "engine_died",
    "cut_off",
    "first_byte_late",
    "stalled",
    "client_gone",
)
"""How a request to ``/v1`` ended. ``engine_died`` is before the first byte of the response, ``cut_off`` after it."""

_SECONDS: Final = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class GateMetrics:
    """The gate's metrics in a registry of the caller's; every combination of labels is there from the start.

    Args:
        registry: one for each gate.
        slots: the slots' names.
    """

    def __init__(self, registry: CollectorRegistry, slots: Sequence[str]) -> None:
        self.registry = registry
        self.ready = Gauge(
            "readmit_gate_ready", "1 while some slot is ready and the gate admits requests.", registry=registry
        )
        self.unverified = Gauge(
            "readmit_gate_open_unverified", "1 while the gate is open without golden answers.", registry=registry
        )
        self.probe_set_suspect = Gauge(
            "readmit_gate_probe_set_suspect",
            "1 while several ready slots answer wrongly: the golden answers are doubted, not the fleet.",
            registry=registry,
        )
        self.override_ends = Gauge(
            "readmit_gate_override_ends_timestamp_seconds",
            "Until when an operator's override lets engines in whatever they answer; 0 without one.",
            registry=registry,
        )
        self.in_flight = Gauge("readmit_gate_in_flight_requests", "Requests being passed on.", registry=registry)
        self.requests = Counter(
            "readmit_gate_requests", "Requests to /v1 by how they ended.", ["outcome"], registry=registry
        )
        self.first_byte = Histogram(
            "readmit_gate_first_byte_seconds",
            "From a request's arrival to the engine's first byte.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._state = Gauge(
            "readmit_gate_slot_state", "1 for the state a slot is in.", ["slot", "state"], registry=registry
        )
        self._wrong = Gauge(
            "readmit_gate_slot_wrong_verifications",
            "Wrong ones among the last verifications of a slot that is ready.",
            ["slot"],
            registry=registry,
        )
        self.unanswered = Gauge(
            "readmit_gate_slot_unanswered_requests",
            "Different requests in a row that a slot's engine gave no first byte; many make it leave.",
            ["slot"],
            registry=registry,
        )
        self._openings = Counter("readmit_gate_openings", "How often a slot became ready.", ["slot"], registry=registry)
        self._revocations = Counter(
            "readmit_gate_revocations", "How often readiness ended, and why.", ["slot", "reason"], registry=registry
        )
        self._probes = Counter(
            "readmit_gate_probes", "Golden questions by what came of them.", ["slot", "result"], registry=registry
        )
        self._probe_seconds = Histogram(
            "readmit_gate_probe_seconds",
            "From a golden question to its answer.",
            ["slot"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._private = Gauge(
            "readmit_gate_engine_private_bytes",
            "Memory that would be free if the slot's engine ended; 0 while that is not known.",
            ["slot"],
            registry=registry,
        )
        self._gpu = Gauge(
            "readmit_gate_engine_gpu_bytes",
            "GPU memory that the driver counts for the slot's engine; 0 where it counts none.",
            ["slot"],
            registry=registry,
        )
        self._kv_tokens = Gauge(
            "readmit_gate_engine_kv_tokens",
            "Tokens that the slot's engine has room for in its KV cache; 0 where it does not say.",
            ["slot"],
            registry=registry,
        )
        self._last_correct = Gauge(
            "readmit_gate_last_correct_answer_timestamp_seconds",
            "When a slot last answered all golden questions correctly; 0 for never.",
            ["slot"],
            registry=registry,
        )
        for outcome in REQUEST_OUTCOMES:
            self.requests.labels(outcome)
        for slot in slots:
            for state in SLOT_STATES:
                self._state.labels(slot, state)
            for reason in REVOCATIONS:
                self._revocations.labels(slot, reason)
            for result in RESULTS:
                self._probes.labels(slot, result)
            for metric in (
                self._wrong,
                self.unanswered,
                self._openings,
                self._probe_seconds,
                self._private,
                self._gpu,
                self._kv_tokens,
                self._last_correct,
            ):
                metric.labels(slot)

    def transition(self, step: Transition) -> None:
        """Count a step of a slot."""
        name = step.slot.name
        for state in SLOT_STATES:
            self._state.labels(name, state).set(state == step.state)
        if step.state == "ready":
            self._openings.labels(name).inc()
        elif step.previous == "ready":
            self._revocations.labels(name, step.reason).inc()

    def verdict(self, slot: Slot, verdict: Verdict) -> None:
        """Count one answer."""
        self._probes.labels(slot.name, verdict.result).inc()
        if verdict.result in ("correct", "wrong"):
            self._probe_seconds.labels(slot.name).observe(verdict.seconds)

    def verified(self, slot: Slot, at_s: float) -> None:
        """Note when all answers were correct, in Unix time."""
        self._last_correct.labels(slot.name).set(at_s)

    def cost(self, slot: Slot, cost: Cost | None) -> None:
        """Note what a slot's engine costs."""
        self._private.labels(slot.name).set(cost.private_bytes or 0 if cost else 0)
        self._gpu.labels(slot.name).set(cost.gpu_bytes or 0 if cost else 0)
        self._kv_tokens.labels(slot.name).set(cost.kv_tokens or 0 if cost else 0)

    def fleet(self, slots: Sequence[Slot], *, admitting: bool, probe_set_suspect: bool) -> None:
        """Bring the gauges about all slots up to date."""
        ready = [slot for slot in slots if slot.ready]
        self.ready.set(bool(ready) and admitting)
        self.unverified.set(any(slot.lease is not None and not slot.lease.verified for slot in ready))
        self.probe_set_suspect.set(probe_set_suspect)
        for slot in slots:
            self._wrong.labels(slot.name).set(slot.wrong_while_ready)
