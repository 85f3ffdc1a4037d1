"""``/api/status``: what the gate knows, as JSON-compatible data."""

from collections import Counter
from typing import Any, Final

from readmit.gate import recovery
from readmit.gate.gate import Gate
from readmit.gate.slots import Slot
from readmit.gate.verifier import Finding
from weightcache.availability import Outage
from weightcache.journal import boottime_ns

NOTHING: Final = Finding("no_probes", 0)
"""Found by nobody yet."""


def report(gate: Gate) -> dict[str, Any]:
    """The state of the gate, its slots and the recoveries it remembers, newest first. Times are in seconds."""
    gate.chronicle.poll()
    slots = [_slot(gate, slot) for slot in gate.slots]
    serving = gate.choose()
    probe_set = gate.probes.of(gate.chronicle.weights((serving or gate.slots[0]).name))
    past = [episode for episode in gate.chronicle.replay.episodes if not episode.is_open]
    clock = gate.chronicle.replay.clock.now()
    lasting = gate.chronicle.availability.outage
    lookups = [lookup for episode in past for attempt in episode.attempts for lookup in attempt.lookups]
    results = Counter(lookup.result for lookup in lookups)
    attached = results["hit"] + results["miss"]
    return {
        "node": gate.chronicle.node,
        "ready": gate.ready,
        "draining": gate.draining,
        "serving": serving and serving.name,
        "override": _override(gate),
        "in_flight": gate.in_flight,
        "last_request_s": None if gate.last_request_ns is None else _ago_s(gate.last_request_ns),
        "slots": slots,
        "probes": {
            "path": str(gate.probes.path) if gate.probes.path else None,
            "set": probe_set and probe_set.digest,
            "model": probe_set and probe_set.model,
            "count": len(probe_set.probes) if probe_set else 0,
            "recorded_at": probe_set and probe_set.recorded_at,
            "checkpoint_digest": probe_set and probe_set.checkpoint_digest,
            "error": gate.probes_trouble,
            "suspect": gate.probe_set_suspect,
        },
        "journal": {"kept": gate.chronicle.kept, "error": gate.chronicle.failure},
        "lookups": {
            "hits": results["hit"],
            "misses": results["miss"],
            "hit_rate": results["hit"] / attached if attached else None,
            "reasons": dict(Counter(lookup.reason or "unknown" for lookup in lookups if lookup.result == "miss")),
        },
        "open": [recovery.facts(episode, clock) for episode in gate.chronicle.replay.open_episodes],
        "recoveries": gate.recoveries.tell(past, clock),
        "outages": [_outage(it, clock) for it in (*([lasting] if lasting else []), *reversed(gate.chronicle.outages))],
    }


def _slot(gate: Gate, slot: Slot) -> dict[str, Any]:
    measured, next_start = gate.costs.get(slot.name), gate.next_starts.get(slot.name)
    return {
        **gate.outlook(slot).to_dict(),
        "active": slot is gate.succession.active,
        "unanswered": gate.neglect.requests(slot.name),
        "cost": measured.to_dict() if measured else None,
        "next_start": next_start._asdict() if next_start else None,
        "verdicts": [
            {"probe": verdict.probe, "result": verdict.result, "seconds": round(verdict.seconds, 3)}
            for verdict in (gate.watches[slot.name].finding or NOTHING).verdicts
        ],
    }


def _override(gate: Gate) -> dict[str, Any] | None:
    override = gate.overrides.current
    if override is None or not gate.overrides.active:
        return None
    return {**override.facts(), "left_s": round(override.left_s, 3)}


def _ago_s(at_ns: int) -> float:
    return round((boottime_ns() - at_ns) / 1e9, 3)


def _outage(outage: Outage, now_ns: int) -> dict[str, Any]:
    end_ns = now_ns if outage.end_ns is None else outage.end_ns
    return {
        "seconds": round((end_ns - outage.begin_ns) / 1e9, 3),
        "ended_s": None if outage.end_ns is None else round((now_ns - outage.end_ns) / 1e9, 3),
    }
