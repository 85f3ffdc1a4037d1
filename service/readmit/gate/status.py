"""``/api/status``: what the gate knows, as JSON-compatible data."""

from collections import Counter
from typing import Any

from readmit.gate.gate import Gate
from weightcache.episodes import Episode
from weightcache.journal import boottime_ns


def report(gate: Gate) -> dict[str, Any]:
    """The state of the gate, its slots and the recoveries it remembers, newest first. Times are in seconds."""
    slots = [gate.outlook(slot).to_dict() for slot in gate.slots]
    probe_set = gate.probes.current()
    past = [episode for episode in gate.chronicle.replay.episodes if not episode.is_open]
    lookups = [lookup for episode in past for attempt in episode.attempts for lookup in attempt.lookups]
    results = Counter(lookup.result for lookup in lookups)
    attached = results["hit"] + results["miss"]
    return {
        "node": gate.chronicle.node,
        "ready": gate.ready,
        "draining": gate.draining,
        "serving": next((slot.name for slot in gate.slots if slot.serves), None),
        "in_flight": gate.in_flight,
        "last_request_s": None if gate.last_request_ns is None else _ago_s(gate.last_request_ns),
        "slots": slots,
        "probes": {
            "path": str(gate.probes.path) if gate.probes.path else None,
            "set": probe_set and probe_set.digest,
            "model": probe_set and probe_set.model,
            "count": len(probe_set.probes) if probe_set else 0,
            "recorded_at": probe_set and probe_set.recorded_at,
            "error": str(gate.probes.error) if gate.probes.error else None,
            "suspect": gate.probe_set_suspect,
        },
        "journal": {"kept": gate.chronicle.kept, "error": gate.chronicle.failure},
        "lookups": {
            "hits": results["hit"],
            "misses": results["miss"],
            "hit_rate": results["hit"] / attached if attached else None,
            "reasons": dict(Counter(lookup.reason or "unknown" for lookup in lookups if lookup.result == "miss")),
        },
        "recoveries": [_recovery(episode) for episode in reversed(past)],
    }


def _ago_s(at_ns: int) -> float:
    return round((boottime_ns() - at_ns) / 1e9, 3)


def _recovery(episode: Episode) -> dict[str, Any]:
    return {
        "id": episode.id,
        "slot": episode.slot,
        "cause": episode.cause,
        "outcome": episode.outcome,
        "verified": episode.verified,
        "path": episode.path,
        "reason": episode.reason,
        "detail": episode.detail,
        "attempts": len(episode.attempts),
        "total_s": round(episode.total_s, 3),
        "phases_s": {name: round(seconds, 3) for name, seconds in episode.phases_s().items()},
    }
