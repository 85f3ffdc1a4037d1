"""``/api/status``: what the gate knows, as JSON-compatible data."""

from collections import Counter
from typing import Any, Final

from readmit.gate.gate import Gate
from readmit.gate.slots import Slot
from readmit.gate.verifier import Finding
from readmit.remedies import REMEDIES
from weightcache.availability import Outage
from weightcache.episodes import Episode, Lookup
from weightcache.journal import boottime_ns

NOTHING: Final = Finding("no_probes", 0)
"""Found by nobody yet."""


def report(gate: Gate) -> dict[str, Any]:
    """The state of the gate, its slots and the recoveries it remembers, newest first. Times are in seconds."""
    gate.chronicle.poll()
    slots = [_slot(gate, slot) for slot in gate.slots]
    probe_set = gate.probes.current()
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
        "serving": None if (serving := gate.choose()) is None else serving.name,
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
        "open": [_recovery(episode, clock) for episode in gate.chronicle.replay.open_episodes],
        "recoveries": [_recovery(episode, clock) for episode in reversed(past)],
        "outages": [_outage(it, clock) for it in (*([lasting] if lasting else []), *reversed(gate.chronicle.outages))],
    }


def _slot(gate: Gate, slot: Slot) -> dict[str, Any]:
    measured, next_start = gate.costs.get(slot.name), gate.next_starts.get(slot.name)
    return {
        **gate.outlook(slot).to_dict(),
        "active": slot is gate.succession.active,
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


def _recovery(episode: Episode, now_ns: int) -> dict[str, Any]:
    miss = episode.miss
    return {
        "id": episode.id,
        "slot": episode.slot,
        "cause": episode.cause,
        "outcome": episode.outcome,
        "verified": episode.verified,
        "path": episode.path,
        "reason": episode.reason,
        "detail": episode.detail,
        "message": miss.attributes.get("message") if miss else None,
        "remedy": _remedy(miss) if miss else None,
        "attempts": len(episode.attempts),
        "ended_s": None if episode.is_open else round((now_ns - episode.end_ns()) / 1e9, 3),
        "total_s": round(episode.age_s(now_ns), 3),
        "phases_s": {name: round(seconds, 3) for name, seconds in episode.phases_s(now_ns).items()},
        "segments": [
            {
                "phase": segment.phase,
                "attempt": segment.attempt,
                "begin_s": round((segment.begin_ns - episode.fault_ns) / 1e9, 4),
                "end_s": round((segment.end_ns - episode.fault_ns) / 1e9, 4),
            }
            for segment in episode.segments(now_ns)
        ],
    }


def _remedy(miss: Lookup) -> str:
    return str(miss.attributes.get("remedy") or REMEDIES.get(miss.reason or "", ""))


def _outage(outage: Outage, now_ns: int) -> dict[str, Any]:
    end_ns = now_ns if outage.end_ns is None else outage.end_ns
    return {
        "seconds": round((end_ns - outage.begin_ns) / 1e9, 3),
        "ended_s": None if outage.end_ns is None else round((now_ns - outage.end_ns) / 1e9, 3),
    }
