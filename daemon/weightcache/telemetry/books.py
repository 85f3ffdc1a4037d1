"""The books: everything that a journal's events add up to, and how it is written down in a snapshot.

What is restored from a snapshot is what replaying the same events gives: a test holds both against each other after
any history. A snapshot of an earlier release is taken for what it has: a family that is new counts from there on.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, Final

from weightcache.asked import question
from weightcache.availability import Outage, Readiness
from weightcache.episodes import Change, Replay
from weightcache.episodes.state import REMEMBERED_EPISODES, facts, known, restore, state_of
from weightcache.forecast import Forecast
from weightcache.journal import Event
from weightcache.journal.snapshots import Snapshot
from weightcache.recollection import Recollection
from weightcache.registry import Registry
from weightcache.slo import Objectives
from weightcache.telemetry.accounts import Accounts
from weightcache.telemetry.families import Counter, Histogram
from weightcache.telemetry.rent import Held

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
        """All of it, as of the latest event. What a release adds is a field of its own: earlier ones read this too."""
        asked = self.forecast.asked
        state = {
            "replay": state_of(self.replay),
            "accounts": _accounts(self.accounts),
            "asked": {
                slot: [(rank, question(fields)[0]) for rank, fields in ranks.items()] for slot, ranks in asked.items()
            },
            "devices": {
                slot: [(rank, fields["device"]) for rank, fields in ranks.items() if "device" in fields]
                for slot, ranks in asked.items()
            },
            "recollection": self.recollection.state(),
        }
        return Snapshot(self.replay.position, state)

    def restore(self, snapshot: Snapshot) -> None:
        """Become what a snapshot tells. Only for new books; those that this fails on are good for nothing.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: it tells something else.
        """
        state = snapshot.state
        restore(self.replay, state["replay"], snapshot.position)
        _restore_accounts(self.accounts, state["accounts"])
        asked = {slot: {int(rank): fields for rank, fields in it} for slot, it in state["asked"].items()}
        for slot, ranks in state.get("devices", {}).items():
            for rank, device in ranks:
                asked[slot][int(rank)] = {**asked[slot][int(rank)], "device": device}
        self.forecast.recall(asked)
        self.recollection.restore(state["recollection"])


def _accounts(accounts: Accounts) -> dict[str, Any]:
    availability, rent = accounts.availability, accounts.rent
    return {
        "families": {family.name: family.state() for family in _families(accounts)},
        "worst": {path: list(worst.recoveries) for path, worst in accounts.worst.items()},
        "budget": {path: list(budget.hours) for path, budget in accounts.budget.items()},
        "slots": {name: facts(readiness, _READINESS) for name, readiness in availability.slots.items()},
        "service": facts(availability.service, _READINESS),
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
    for path, recoveries in known(state["worst"], accounts.worst).items():
        accounts.worst[path].recoveries.extend((at_ns, seconds) for at_ns, seconds in recoveries)
    for path, hours in known(state["budget"], accounts.budget).items():
        accounts.budget[path].hours.extend((hour, counts) for hour, counts in hours)
    availability.slots |= {name: Readiness(**known(it, _READINESS)) for name, it in state["slots"].items()}
    availability.service = Readiness(**known(state["service"], _READINESS))
    availability.outage = Outage(*state["outage"]) if state["outage"] else None
    availability.takeovers = state["takeovers"]
    accounts.gpu_time.restore(state)
    rent.held |= {name: Held(bytes_, on_gpu, set(leases)) for name, bytes_, on_gpu, leases in state["held"]}
    rent.leased_byte_ns, rent.idle_byte_ns, rent.standby_gpu_ns, rent.since_ns = state["rent"]
    accounts.last_exit |= {process: (boot, pid) for process, (boot, pid) in state["last_exit"].items()}


def _families(accounts: Accounts) -> Iterable[Counter | Histogram]:
    return (it for it in vars(accounts).values() if isinstance(it, Counter | Histogram))
