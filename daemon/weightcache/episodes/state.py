"""A replay written down: what snapshots keep of it, and how whoever looks at a long journal begins there."""

import dataclasses
from collections.abc import Iterable
from typing import Any, Final

from weightcache.episodes.episode import Attempt, Episode, Lookup
from weightcache.episodes.replay import Replay, Slot
from weightcache.journal import Event
from weightcache.journal.snapshots import Snapshot
from weightcache.phases import Mark

REMEMBERED_EPISODES: Final = 16
"""Closed episodes kept for events that come late and for links between traces."""

_EPISODE: Final = [
    it.name for it in dataclasses.fields(Episode) if it.name not in ("attempts", "_marks", "_closed_phases")
]
_ATTEMPT: Final = [it.name for it in dataclasses.fields(Attempt) if it.name not in ("episode", "lookups")]


def resumed(snapshot: Snapshot | None, keep: int | None = REMEMBERED_EPISODES) -> Replay:
    """A replay that goes on from a snapshot; from the first event where there is none, or one that does not fit."""
    replay = Replay(keep)
    if snapshot is not None:
        try:
            restore(replay, snapshot.state["replay"], snapshot.position)
        except (KeyError, TypeError, ValueError, AttributeError):  # another release's
            return Replay(keep)
    return replay


def state_of(replay: Replay) -> dict[str, Any]:
    """A replay as plain data."""
    episodes = {episode.id: episode for episode in replay.episodes}
    remembered = list(episodes)
    for slot in replay.slots.values():
        episodes |= {episode.id: episode for episode in (slot.episode, slot.last) if episode is not None}
    return {
        "boots": replay.clock.boots,
        "seen_ns": replay.seen_ns,
        "boot": replay.boot,
        "started": replay.started,
        "closed": replay.closed,
        "episodes": [_episode(episode) for episode in episodes.values()],
        "remembered": remembered,
        "slots": [
            [slot.name, slot.state, slot.state_ns, slot.episode and slot.episode.id, slot.last and slot.last.id]
            for slot in replay.slots.values()
        ],
        "pending": {id_: [list(event) for event in events] for id_, events in replay.pending.items()},
    }


def restore(replay: Replay, state: dict[str, Any], position: int) -> None:
    """Become what a state tells, as of the event with the id ``position``. Only for a new replay.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it tells something else.
    """
    replay.position, replay.seen_ns, replay.boot = position, state["seen_ns"], state["boot"]
    replay.started, replay.closed = state["started"], state["closed"]
    replay.clock.boots.update(state["boots"])
    episodes = {episode.id: episode for episode in map(_restored_episode, state["episodes"])}
    replay.remember(episodes[id_] for id_ in state["remembered"])
    for name, state_, state_ns, open_, last in state["slots"]:
        replay.slots[name] = Slot(
            name, episodes[open_] if open_ else None, episodes[last] if last else None, state_, state_ns
        )
    replay.pending.update({id_: [Event(*event) for event in events] for id_, events in state["pending"].items()})


def _episode(episode: Episode) -> dict[str, Any]:
    attempts = [
        {**facts(attempt, _ATTEMPT), "lookups": [list(lookup) for lookup in attempt.lookups]}
        for attempt in episode.attempts
    ]
    return {**facts(episode, _EPISODE), "attempts": attempts, "marks": [list(mark) for mark in episode._marks]}


def _restored_episode(state: dict[str, Any]) -> Episode:
    episode = Episode(**known(state, _EPISODE))
    episode._marks = [Mark(*mark) for mark in state["marks"]]
    for told in state["attempts"]:
        lookups = [Lookup(*lookup) for lookup in told["lookups"]]
        episode.attempts.append(Attempt(episode=episode, lookups=lookups, **known(told, _ATTEMPT)))
    return episode


def facts(thing: object, names: Iterable[str]) -> dict[str, Any]:
    """Some of its attributes."""
    return {name: getattr(thing, name) for name in names}


def known(state: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Without what this release does not know."""
    return {name: state[name] for name in names if name in state}
