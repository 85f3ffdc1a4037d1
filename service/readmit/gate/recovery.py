"""Recoveries as JSON-compatible data, for ``/api/status`` and the page. Times are in seconds."""

from collections.abc import Sequence
from typing import Any

from readmit.remedies import REMEDIES
from weightcache.episodes import Episode, Lookup


class Recoveries:
    """Closed recoveries, each worked out once: a page that is open asks for all of them every second."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[int, dict[str, Any]]] = {}

    def tell(self, closed: Sequence[Episode], now_ns: int) -> list[dict[str, Any]]:
        """The facts of closed episodes, the latest first."""
        before, self._told = self._told, {}
        for episode in reversed(closed):
            told = before.get(episode.id)
            if told is None or told[0] != episode.seen_ns:  # something late came in
                told = episode.seen_ns, facts(episode, now_ns)
            self._told[episode.id] = told
        ends = {episode.id: round((now_ns - episode.end_ns()) / 1e9, 3) for episode in closed}
        return [{**known, "ended_s": ends[id_]} for id_, (_, known) in self._told.items()]


def facts(episode: Episode, now_ns: int) -> dict[str, Any]:
    """One recovery; ``ended_s`` is None, which is so while it is open."""
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
        "ended_s": None,
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
