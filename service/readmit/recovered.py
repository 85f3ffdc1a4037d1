"""Waiting for a recovery that was ordered, and what it cost."""

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from readmit.gate.operator import order
from readmit.where import Where
from weightcache.episodes import Episode
from weightcache.episodes.state import resumed
from weightcache.errors import ConfigError
from weightcache.journal import Journal
from weightcache.telemetry.gpus import GpuTime

LIMIT_S: Final = 1800.0
"""Three times the slowest published cold start."""
_LOOK_S: Final = 0.05


class Recovered(NamedTuple):
    """A recovery that has ended (or was waited for in vain, and is open), in GPU-hours.

    ``gpus`` is 0 on a CPU. ``saved`` is against the mean cold start of these weights here from the same starting state,
    None where none was measured.
    """

    episode: Episode
    gpus: int
    lost: float
    saved: float | None

    @property
    def ready(self) -> bool:
        return self.episode.outcome == "ready"

    def to_dict(self) -> dict[str, Any]:
        """JSON-compatible facts; ``total_s`` is None while it is open."""
        it = self.episode
        return {
            "slot": it.slot,
            "episode": it.id,
            "cause": it.cause,
            "path": it.path,
            "reason": it.reason,
            "outcome": it.outcome,
            "total_s": None if it.is_open else round(it.total_s, 3),
            "gpus": self.gpus,
            "gpu_hours_lost": self.lost,
            "gpu_hours_saved": self.saved,
        }

    def __str__(self) -> str:
        """For people: one line, the account included."""
        it = self.episode
        if it.is_open:
            return f"{it.slot} has not answered correctly within {LIMIT_S:g} s"
        why = f"{it.path}, {it.reason}" if it.reason else it.path
        said = f"{it.slot} is {it.outcome} after {it.total_s:.2f} s ({why})"
        if not self.gpus:
            return f"{said}; on the CPU, so no GPU-hours"
        than = ": nothing to compare with" if self.saved is None else f", {self.saved:.4f} saved against a cold start"
        return f"{said}; {self.gpus} GPU{'s' * (self.gpus > 1)} waited, {self.lost:.4f} GPU-hours{than}"


def account(recoveries: Sequence[Recovered]) -> str:
    """What several recoveries cost together, for people: one line."""
    paths = ", ".join(f"{n} {path}" for path, n in Counter(it.episode.path for it in recoveries).items())
    said = f"{len(recoveries)} engines in {sum(it.episode.total_s for it in recoveries):.2f} s of recoveries ({paths})"
    if not any(it.gpus for it in recoveries):
        return said
    saved = [it.saved for it in recoveries if it.saved is not None]
    than = f", {sum(saved):.4f} saved against cold starts" if saved else ""
    return f"{said}: {sum(it.lost for it in recoveries):.4f} GPU-hours{than}"


def is_drained(where: Where, slot: str) -> bool:
    """Whether the gate gives a slot neither requests nor questions, by an operator's order."""
    try:
        slots = order(where.runtime_dir, "GET", "/api/status")["slots"]
    except ConfigError:  # no gate here
        return False
    return any(it["slot"] == slot and it["state"] == "draining" for it in slots)


def check_asked(where: Where, slot: str) -> None:
    """See that a recovery of a slot can end at all.

    Raises:
        ConfigError: ``drained``: its engine is asked nothing, so no answer of it would be found correct.
    """
    if is_drained(where, slot):
        raise ConfigError(
            "drained",
            f"slot {slot} is drained, so nobody asks its engine for answers, and its recovery would not end",
            remedy=f"readmit drain {slot} --undo first",
        )


def wait(where: Where, episode_id: str) -> Recovered:
    """Wait until an episode has ended, at most `LIMIT_S`.

    Raises:
        ConfigError: ``journal_unreadable``.
    """
    with where.reading() as journal:
        return _wait(journal, episode_id)


def _wait(journal: Journal, episode_id: str) -> Recovered:
    time_of = GpuTime()
    snapshot = journal.furthest_snapshot()
    replay = resumed(snapshot, keep=None)
    if snapshot is not None:
        time_of.restore(snapshot.state["accounts"])
    accounted = {episode.id for episode in replay.episodes if not episode.is_open} - {episode_id}
    deadline = time.monotonic() + LIMIT_S
    while True:
        replay.catch_up(journal)
        for episode in replay.episodes:
            if episode.is_open or episode.id in accounted:
                continue
            accounted.add(episode.id)
            cost = time_of.close(episode)
            if episode.id == episode_id:
                saved = None if cost.saved is None else cost.saved / 3600
                return Recovered(episode, time_of.gpus.get(episode.slot, 0), cost.lost / 3600, saved)
        found = replay.episode(episode_id)
        if found is not None and time.monotonic() > deadline:
            return Recovered(found, 0, 0.0, None)
        time.sleep(_LOOK_S)
