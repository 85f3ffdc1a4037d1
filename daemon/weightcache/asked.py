"""What engines asked of the cache last, from the journal: what their next starts are going to ask for."""

from collections.abc import Mapping
from typing import Any

from weightcache.journal import Event

Fields = Mapping[str, Any]
"""A `CacheConfig` as plain data, and ``device``, the UUID of the GPU it is for, where that is known."""


def question(fields: Fields) -> tuple[dict[str, Any], str | None]:
    """The `CacheConfig` alone, and the device."""
    config = dict(fields)
    return config, config.pop("device", None)


class Asked:
    """The `Fields` of each rank of each slot whose engine uses the cache, kept up to date event by event.

    ``slots`` is replaced, never changed: other threads may read it.
    """

    def __init__(self) -> None:
        self.slots: dict[str, dict[int, Fields]] = {}

    def learn(self, event: Event) -> bool:
        """Take in an event; returns whether something else is asked for since.

        Who publishes says more than who looks up: the digest of files that only a load has read.
        """
        config = event.attributes.get("config")
        if event.slot is None or event.kind not in ("lookup", "publish"):
            return False
        ranks, rank = self.slots.get(event.slot, {}), event.rank or 0
        if event.name == "off":
            ranks = {}
        elif config:
            device = event.attributes.get("device")
            fields = {**config, "device": device} if device else config
            if event.kind == "publish":
                fields = {**ranks.get(rank, {}), **fields}
            ranks = {it: each for it, each in ranks.items() if _sizes(each) == _sizes(fields)} | {rank: fields}
        if ranks == self.slots.get(event.slot, {}):
            return False
        self.slots = {**self.slots, event.slot: ranks}
        return True


def _sizes(fields: Fields) -> tuple[object, ...]:
    return tuple(fields.get(name) for name in ("tp_size", "pp_size", "dp_size", "ep_size"))
