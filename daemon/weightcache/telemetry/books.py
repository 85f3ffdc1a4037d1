"""The books: everything that a journal's events add up to, and how it is written down in a snapshot.

What is restored from a snapshot is what replaying the same events gives: a test holds both against each other after
any history. A snapshot of an earlier release is taken for what it has: a family that is new counts from there on.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, Final

from weightcache.availability import Outage, Readiness
from weightcache.episodes import Attempt, Change, Episode, Lookup, Replay, Slot
from weightcache.forecast import Forecast
from weightcache.journal import Event
from weightcache.journal.snapshots import Snapshot
from weightcache.phases import Mark
from weightcache.recollection import Recollection
from weightcache.registry import Registry
from weightcache.slo import Objectives
from weightcache.telemetry.accounts import Accounts
from weightcache.telemetry.families import Counter, Histogram
from weightcache.telemetry.gpus import Mean
from weightcache.telemetry.rent import Held

REMEMBERED_EPISODES: Final = 16
"""Closed episodes kept for events that come late and for links between traces."""

_EPISODE: Final = [
    it.name for it in dataclasses.fields(Episode) if it.name not in ("attempts", "_marks", "_closed_phases")
]
_ATTEMPT: Final = [it.name for it in dataclasses.fields(Attempt) if it.name not in ("episode", "lookups")]
_READINESS: Final = [it.name for it in dataclasses.fields(Readiness)]


class Books:
    """Replay, running accounts, what engines asked for last, and what a daemon that starts must know.

    Args:
        objectives: what is promised.
    """

    def __init__(self, objectives: Objectives) -> None:
        self.replay = Replay(keep=REMEMBERED_EPISODES)
        self.accounts = Accounts(objectives)
        self.forecast = Forecast(Registry())
        self.recollection = Recollection()

    def feed(self, event: Event) -> Change:
        """Take in one event; returns what it did to the episodes."""
        change = self.replay.feed(event)
        self.accounts.feed(event, self.replay, change)
        self.forecast.learn(event)
        self.recollection.feed(event)
        return change

    def hand_over(self, forecast: Forecast) -> None:
        """Have another forecast learn from now on, beginning with what was learned so far."""
        forecast.recall(self.forecast.asked)
        self.forecast = forecast

    def snapshot(self) -> Snapshot:
        """All of it, as of the latest event."""
        state = {
            "replay": _replay(self.replay),
            "accounts": _accounts(self.accounts),
            "asked": {slot: list(ranks.items()) for slot, ranks in self.forecast.asked.items()},
            "recollection": self.recollection.state(),
        }
        return Snapshot(self.replay.position, state)

    def restore(self, snapshot: Snapshot) -> None:
        """Become what a snapshot tells. Only for new books; those that this fails on are good for nothing.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: it tells something else.
        """
        state = snapshot.state
        _restore_replay(self.replay, state["replay"], snapshot.position)
        _restore_accounts(self.accounts, state["accounts"])
        self.forecast.recall({slot: {int(rank): fields for rank, fields in it} for slot, it in state["asked"].items()})
        self.recollection.restore(state["recollection"])


def _replay(replay: Replay) -> dict[str, Any]:
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


def _restore_replay(replay: Replay, state: dict[str, Any], position: int) -> None:
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
        {**_facts(attempt, _ATTEMPT), "lookups": [list(lookup) for lookup in attempt.lookups]}
        for attempt in episode.attempts
    ]
    return {**_facts(episode, _EPISODE), "attempts": attempts, "marks": [list(mark) for mark in episode._marks]}


def _restored_episode(state: dict[str, Any]) -> Episode:
    episode = Episode(**_known(state, _EPISODE))
    episode._marks = [Mark(*mark) for mark in state["marks"]]
    for told in state["attempts"]:
        lookups = [Lookup(*lookup) for lookup in told["lookups"]]
        episode.attempts.append(Attempt(episode=episode, lookups=lookups, **_known(told, _ATTEMPT)))
    return episode


def _accounts(accounts: Accounts) -> dict[str, Any]:
    availability, rent = accounts.availability, accounts.rent
    return {
        "families": {family.name: family.state() for family in _families(accounts)},
        "worst": {path: list(worst.recoveries) for path, worst in accounts.worst.items()},
        "budget": {path: list(budget.hours) for path, budget in accounts.budget.items()},
        "slots": {name: _facts(readiness, _READINESS) for name, readiness in availability.slots.items()},
        "service": _facts(availability.service, _READINESS),
        "outage": availability.outage,
        "takeovers": availability.takeovers,
        "cold": accounts.gpu_time.cold,
        "gpus": accounts.gpu_time.gpus,
        "held": [[name, it.bytes, it.on_gpu, sorted(it.leases)] for name, it in rent.held.items()],
        "rent": [rent.leased_byte_ns, rent.idle_byte_ns, rent.standby_gpu_ns, rent.since_ns],
        "last_exit": accounts.last_exit,
    }


def _restore_accounts(accounts: Accounts, state: dict[str, Any]) -> None:
    availability, rent = accounts.availability, accounts.rent
    for family in _families(accounts):
        if family.name in state["families"]:
            family.restore(state["families"][family.name])
    for path, recoveries in _known(state["worst"], accounts.worst).items():
        accounts.worst[path].recoveries.extend((at_ns, seconds) for at_ns, seconds in recoveries)
    for path, hours in _known(state["budget"], accounts.budget).items():
        accounts.budget[path].hours.extend((hour, counts) for hour, counts in hours)
    availability.slots |= {name: Readiness(**_known(it, _READINESS)) for name, it in state["slots"].items()}
    availability.service = Readiness(**_known(state["service"], _READINESS))
    availability.outage = Outage(*state["outage"]) if state["outage"] else None
    availability.takeovers = state["takeovers"]
    accounts.gpu_time.cold |= {start: Mean(*mean) for start, mean in state["cold"].items()}
    accounts.gpu_time.gpus |= state["gpus"]
    rent.held |= {name: Held(bytes_, on_gpu, set(leases)) for name, bytes_, on_gpu, leases in state["held"]}
    rent.leased_byte_ns, rent.idle_byte_ns, rent.standby_gpu_ns, rent.since_ns = state["rent"]
    accounts.last_exit |= {process: (boot, pid) for process, (boot, pid) in state["last_exit"].items()}


def _families(accounts: Accounts) -> Iterable[Counter | Histogram]:
    return (it for it in vars(accounts).values() if isinstance(it, Counter | Histogram))


def _facts(thing: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(thing, name) for name in names}


def _known(state: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Without what this release does not know."""
    return {name: state[name] for name in names if name in state}
