"""What the journal remembers for a daemon that starts: who was attached, what was quarantined, and what was lost."""

import contextlib
import logging
import sqlite3
from typing import Any, Final, NamedTuple

import msgspec

from weightcache.errors import ConfigError
from weightcache.fingerprint import CacheConfig
from weightcache.journal import Context, Event, Journal

_log: Final = logging.getLogger("weightcache.recollection")


class Residence(NamedTuple):
    """Weights that became resident, and how they were lost if that is known."""

    generation: str
    config: CacheConfig
    boot_id: str
    lost: str | None = None
    device: str | None = None

    @property
    def place(self) -> str:
        """What can be resident once: an identity, on a GPU if it is for one."""
        return f"{self.config.key()} {self.device or ''}".rstrip()


class Recollection:
    """Filled by `recall`.

    ``quarantined`` maps generations to reasons, ``leases`` the names of leases to their clients' contexts.
    ``residences`` holds, by identity and GPU, what was published and never given up; it need not be resident still.
    """

    def __init__(self) -> None:
        self.quarantined: dict[str, str] = {}
        self.leases: dict[str, Context] = {}
        self.residences: dict[str, Residence] = {}

    def feed(self, event: Event) -> None:
        """Take in an event; in the order of their ids."""
        facts = event.attributes
        generation = str(facts.get("generation"))
        match event.kind, event.name:
            case "publish", "published":
                self._published(generation, facts, event.boot_id)
            case "release", how:
                self._released(generation, how, str(facts.get("detail", "keeper_lost")))
            case "quarantine", "set":
                self.quarantined[generation] = str(facts.get("reason"))
            case "quarantine", _:
                self.quarantined.pop(generation, None)
            case "lease_open", _:
                context = Context(event.node, event.slot, event.episode, event.attempt, event.rank)
                self.leases[str(facts.get("lease"))] = context
            case "lease_close", _:
                self.leases.pop(str(facts.get("lease")), None)

    def state(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "quarantined": self.quarantined,
            "leases": {name: list(context) for name, context in self.leases.items()},
            "residences": [
                [it.generation, it.config.to_dict(), it.boot_id, it.lost] for it in self.residences.values()
            ],
            "devices": {it.generation: it.device for it in self.residences.values() if it.device},
            "identities": {it.generation: it.config.key() for it in self.residences.values()},  # earlier releases ask
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a `state`.

        Raises:
            KeyError, TypeError, ValueError: it is none.
        """
        self.quarantined |= state["quarantined"]
        self.leases |= {name: Context(*context) for name, context in state["leases"].items()}
        devices = state.get("devices", {})  # earlier releases name none
        for generation, config, boot_id, lost in state["residences"]:
            with contextlib.suppress(msgspec.ValidationError):  # as in `_published`
                residence = Residence(generation, CacheConfig.from_dict(config), boot_id, lost, devices.get(generation))
                self.residences[residence.place] = residence

    def _published(self, generation: str, facts: dict[str, Any], boot_id: str) -> None:
        try:
            config = CacheConfig.from_dict(facts["config"])
        except (KeyError, msgspec.ValidationError):
            return  # written by a release with other fields: no client of today can ask for it
        residence = Residence(generation, config, boot_id, device=facts.get("device"))
        self.residences.pop(config.key(), None)  # of an earlier release, which did not say on which GPU
        self.residences[residence.place] = residence

    def _released(self, generation: str, how: str, detail: str) -> None:
        residence = next((it for it in self.residences.values() if it.generation == generation), None)
        if residence is None:
            return  # published again since: this was an older copy of the same weights
        if how == "lost":
            self.residences[residence.place] = residence._replace(lost=detail)
        else:
            del self.residences[residence.place]


def recall(journal: Journal) -> Recollection:
    """Read it from the journal. One that cannot be read tells nothing: weights are served without it."""
    recollection, position = Recollection(), 0
    kinds = "('publish', 'release', 'quarantine', 'lease_open', 'lease_close')"
    try:
        with contextlib.suppress(sqlite3.OperationalError, OSError):  # busy: what waits in spools waits on
            journal.merge_spools()
        snapshots = [it for it in map(journal.snapshot, ("latest", "base")) if it is not None]
        for snapshot in sorted(snapshots, key=lambda it: it.position):
            kept = Recollection()
            with contextlib.suppress(KeyError, TypeError, ValueError):  # telemetry says so
                kept.restore(snapshot.state["recollection"])
                recollection, position = kept, snapshot.position
        for event in journal.query(f"WHERE id > ? AND kind IN {kinds} ORDER BY id", position):
            recollection.feed(event)
    except (sqlite3.Error, ConfigError) as error:
        _log.error("quarantines and losses of the past are unknown, because the journal cannot be read: %s", error)
    return recollection
