"""Would the next start of each slot map what is resident? Asked before it starts, because afterwards it is too late.

What a slot will ask for is what it asked for last, as journaled, with the identity that its checkpoint's files have
now. An engine upgraded on disk and not yet started cannot be foreseen.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from weightcache import identity
from weightcache.asked import Asked, Fields, question
from weightcache.checkpoint import Folder
from weightcache.errors import CacheMiss, CheckpointError, ConfigError
from weightcache.journal import Event
from weightcache.registry import Registry

EVERY_S: Final = 60.0
"""How often files are looked at where nothing changed that the daemon knows of."""
_NOTICE_S: Final = 0.5
_AFTER_FAULT_S: Final = 30.0

log: Final = logging.getLogger("weightcache.forecast")


class Verdict(NamedTuple):
    """About one slot. A miss has the reason of its lowest rank that would miss."""

    would_hit: bool
    reason: str = ""
    detail: str = ""
    message: str = ""


class Forecast:
    """Verdicts about all slots whose engines have asked for weights.

    `learn` and `look` may run in other threads, one at a time each; `judge` runs where the registry changes.

    Args:
        registry: what is resident.
        state: the folder where digests are remembered, by default one in the state folder.
    """

    def __init__(self, registry: Registry, state: Path | None = None) -> None:
        self.verdicts: Mapping[str, Verdict] = {}
        self._asked = Asked()
        self.learned = 0
        """How often something else was asked for."""
        self._registry = registry
        self._state = state
        self._wanted: dict[str, dict[int, Fields]] = {}

    @property
    def asked(self) -> dict[str, dict[int, Fields]]:
        """What each rank of each slot asked for last."""
        return self._asked.slots

    def learn(self, event: Event) -> None:
        """Take in an event."""
        self.learned += self._asked.learn(event)

    def recall(self, asked: dict[str, dict[int, Fields]]) -> None:
        """Go on from what a snapshot tells."""
        self._asked.slots = asked
        self.learned += 1

    async def keep(self) -> None:
        """Keep the verdicts up to date, until cancelled."""
        looked, learned, there = -EVERY_S, -1, None
        while True:
            try:
                if self.learned != learned or time.monotonic() - looked >= EVERY_S:
                    learned, there = self.learned, None
                    await asyncio.to_thread(self.look)
                    looked = time.monotonic()
                if there != (resident := self._resident()):
                    there = resident
                    self.judge()
            except Exception:  # a fault of the forecast must not take the weights along
                log.exception("the forecast failed; it goes on in %d s", _AFTER_FAULT_S)
                await asyncio.sleep(_AFTER_FAULT_S)
            await asyncio.sleep(_NOTICE_S)

    def look(self) -> None:
        """See what identity the checkpoints have now. No weight file is read, but their file system may hang."""
        digests: dict[str, str | None] = {}
        wanted: dict[str, dict[int, Fields]] = {}
        for slot, ranks in self.asked.items():
            for rank, fields in ranks.items():
                path = str(fields["model_path"])
                if path not in digests:
                    digests[path] = self._digest(path, fields.get("checkpoint_digest"))
                wanted.setdefault(slot, {})[rank] = {**fields, "checkpoint_digest": digests[path]}
        self._wanted = wanted

    def judge(self) -> None:
        """Compare what will be asked for with what is resident."""
        self.verdicts = {slot: self._verdict(ranks) for slot, ranks in self._wanted.items()}

    def _resident(self) -> object:
        """All that a verdict depends on besides what is asked for."""
        registry = self._registry
        generations = [(generation.name, generation.quarantined) for generation in registry.generations.values()]
        return generations, [id(claim) for claim in registry.claims], len(registry.losses)

    def _verdict(self, ranks: Mapping[int, Fields]) -> Verdict:
        for rank in sorted(ranks):
            try:
                self._registry.find(*question(ranks[rank]))
            except CacheMiss as miss:
                return Verdict(False, miss.reason, miss.detail or "", str(miss))
        return Verdict(True)

    def _digest(self, path: str, asked: str | None) -> str | None:
        """The digest of the files as they are; the one asked for where this process cannot see them."""
        try:
            return identity.digest_of(Folder.open(path), hash_limit_bytes=0, state=self._state).digest
        except (CheckpointError, ConfigError) as error:
            log.debug("the checkpoint %s is taken as unchanged: %s", path, error)
            return asked
