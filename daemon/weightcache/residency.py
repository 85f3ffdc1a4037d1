"""Residency: generations that stay when processes go, and the leases on them.

Whatever becomes resident here is stored with the keeper (or systemd) before it counts, and what a keeper hands over is
checked before it counts again: seals, sizes, and a manifest that is the one its name promises.
"""

import asyncio
import logging
import time
from collections.abc import Iterable
from concurrent.futures import Future
from functools import partial
from typing import Final

import msgspec

from weightcache.arena.seals import require_sealed
from weightcache.deposit import Deposit
from weightcache.errors import CacheMiss, ImportRejected, ProtocolError, WeightCacheError
from weightcache.frames import close_all
from weightcache.journal import Context, Journal
from weightcache.manifest import Head, Manifest, read, read_head
from weightcache.recollection import Recollection
from weightcache.registry import Claim, Generation, Lease, Loss, Registry, another

_log: Final = logging.getLogger("weightcache.residency")


class Residency:
    """The registry's generations together with what keeps them alive.

    Args:
        registry: what is resident.
        journal: publications, releases and leases go there.
        deposit: what the keeper stores.
        instance: a token of this daemon process, part of the names of its leases.
    """

    def __init__(self, registry: Registry, journal: Journal, deposit: Deposit, instance: str) -> None:
        self.registry = registry
        self.journal = journal
        self.deposit = deposit
        self.instance = instance
        self._lease_number = 0
        self._publishing = asyncio.Lock()

    def adopt(self, handed: Iterable[tuple[str, int]], past: Recollection, boot: str) -> None:
        """Take over stored generations.

        Args:
            handed: ``manifest-GENERATION`` and ``arena-GENERATION-INDEX`` with their descriptors, taken over. What
                does not prove itself is dropped and journaled as lost.
            past: tells which are in quarantine, and what else was resident once and is lost.
            boot: id of this boot.
        """
        stored: dict[str, dict[str, int]] = {}
        for name, descriptor in handed:
            named = stored.setdefault(name.split("-")[1], {})
            if name in named:
                close_all([descriptor])
            else:
                named[name] = descriptor
        for generation, named in stored.items():
            ordered = [named[name] for name in sorted(named, key=_stored_order)]
            try:
                head = read_head(ordered[0], generation)
                _check_arena(head, ordered[1:])
            except WeightCacheError as error:
                _log.error("stored generation %s is not adopted: %s", generation, error)
                self.deposit.remove(named)
                close_all(ordered)
                facts = {"generation": generation, "detail": "keeper_lost", "error": error.to_dict()}
                self.journal.append("release", "lost", facts)
                continue
            adopted = Generation.of(generation, head, ordered)
            adopted.stored = self.deposit.active
            adopted.quarantined = past.quarantined.get(generation)
            self.registry.add(adopted)
        for residence in past.residences.values():
            if residence.generation not in self.registry.generations:
                why = residence.lost or ("keeper_lost" if residence.boot_id == boot else "node_reboot")
                self.registry.lose(Loss(residence.generation, residence.config, why, residence.device))

    def store_everything(self) -> None:
        """Leave every generation's descriptors with the keeper."""
        for generation in self.registry.generations.values():
            self.deposit.store(_stored(generation)).add_done_callback(partial(_note_stored, generation))

    async def publish(self, claim: Claim, descriptors: list[int], context: Context) -> Generation:
        """Make a generation resident.

        Args:
            claim: for what was claimed. Without a digest: whoever claimed it learns it while loading.
            descriptors: the manifest, then the arena's chunks. They are taken over, and the list emptied, on success.
            context: of the publisher.

        Raises:
            ImportRejected: the manifest or arena is not what it must be.
            ResourceError: it does not fit the capacity.
        """
        if not descriptors:
            raise ProtocolError("protocol", "publishing takes a manifest and an arena", found="no descriptors")
        name, manifest = await asyncio.to_thread(read, descriptors[0])
        _check_arena(manifest, descriptors[1:])
        claimed = claim.config
        if claimed.checkpoint_digest is None:
            claimed = msgspec.structs.replace(claimed, checkpoint_digest=manifest.config.checkpoint_digest)
        differences = claimed.differences(manifest.config)
        if differences:
            raise ImportRejected(
                "import_mismatch",
                f"the manifest is for another identity than was claimed: {differences[0]}",
                differences=msgspec.to_builtins(differences),
            )
        if another(claim.device, manifest.device):
            raise ImportRejected(
                "import_mismatch",
                "the weights are on another GPU than they were claimed for",
                expected=claim.device,
                found=manifest.device,
                remedy="Give attach the device that the engine loads onto",
            )
        async with self._publishing:  # one at a time, or two would both count on the same room
            resident = self.registry.generations.get(name)
            if resident is not None:
                return resident
            for evicted in self.registry.make_room(manifest.size):
                self.release(evicted.name, "evicted")
            generation = Generation.of(name, manifest, list(descriptors))
            await self._store(generation)
            descriptors.clear()
            facts = {
                "generation": name,
                "config": manifest.config.to_dict(),
                "bytes": manifest.size,
                "tensors": len(manifest),
                "device": generation.device,
                "publisher": generation.publisher,
                "stored": generation.stored,
            }
            self.journal.append("publish", "published", facts, context=context)
            self.registry.add(generation)
        return generation

    async def _store(self, generation: Generation) -> None:
        """Store a generation with the keeper: until it is, our death would end it."""
        if not self.deposit.active:
            return
        try:
            generation.stored = await asyncio.wrap_future(self.deposit.store(_stored(generation)))
        except asyncio.CancelledError:
            self.deposit.remove(name for name, _ in _stored(generation))
            raise
        if not generation.stored:
            _log.warning(
                "no keeper took generation %s: it lives only as long as this daemon or an engine", generation.name
            )

    def release(self, name: str, how: str) -> "Future[bool]":
        """Drop a generation: ``released``, ``evicted`` or ``replaced``. Its memory returns when its last lease ends.

        Returns:
            Whether the keeper has let go too, once that is known.
        """
        generation, gone = self._forget(name)
        self.journal.append("release", how, {"generation": name, "bytes": generation.bytes})
        return gone

    def lose(self, device: str, detail: str, message: str) -> None:
        """Drop what was on a GPU whose memory can no longer be what was put there.

        Args:
            device: the GPU's UUID.
            detail: from `weightcache.vocabulary.RESIDENCY_DETAILS`.
            message: what happened.
        """
        there = [each for each in self.registry.generations.values() if each.device == device]
        for generation in there:
            self._forget(generation.name)
            facts = {"generation": generation.name, "bytes": generation.bytes, "detail": detail, "message": message}
            self.journal.append("release", "lost", facts)
        for generation in there:
            self.registry.lose(Loss(generation.name, generation.config, detail, device))

    def _forget(self, name: str) -> tuple[Generation, "Future[bool]"]:
        generation = self.registry.remove(name)
        gone = self.deposit.remove(name for name, _ in _stored(generation))
        generation.close()
        return generation, gone

    def quarantine(self, name: str, reason: str | None, context: Context | None) -> Generation:
        """Hand a generation to nobody, or with ``reason`` None to everybody again.

        Raises:
            CacheMiss: ``absent``: there is no such generation.
        """
        generation = self.registry.generations.get(name)
        if generation is None:
            raise CacheMiss("absent", f"no generation {name} is resident", found=list(self.registry.generations))
        generation.quarantined = reason
        facts = {"generation": name, "reason": reason}
        self.journal.append("quarantine", "set" if reason else "lifted", facts, context=context)
        return generation

    def open_lease(
        self, generation: Generation, pid: int, connection: int, context: Context
    ) -> tuple[Lease, "Future[bool]"]:
        """Lease a generation to the client at the other end of ``connection``.

        Returns:
            The lease, and whether the keeper stores it too, once that is known.
        """
        self._lease_number += 1
        name = f"lease-{generation.name}-{self.instance}.{self._lease_number}"
        lease = Lease(name, pid, context.slot, time.time_ns())
        generation.leases[name] = lease
        generation.last_used_ns = time.monotonic_ns()
        self.journal.append("lease_open", "", _lease_facts(generation, lease), context=context)
        return lease, self.deposit.store([(name, connection)], poll=True)

    def adopt_lease(self, name: str, pid: int, context: Context | None) -> tuple[Generation, Lease] | None:
        """Take over a stored lease; None if its generation is gone."""
        generation = self.registry.generations.get(name.split("-")[1])
        if generation is None:
            self.deposit.remove([name])
            return None
        lease = Lease(name, pid, context.slot if context else None, time.time_ns())
        generation.leases[name] = lease
        return generation, lease

    def close_lease(self, generation: Generation, lease: Lease, context: Context | None) -> None:
        """End a lease."""
        generation.leases.pop(lease.name, None)
        generation.last_used_ns = time.monotonic_ns()
        self.deposit.remove([lease.name])
        self.journal.append("lease_close", "", _lease_facts(generation, lease), context=context)


def _note_stored(generation: Generation, stored: "Future[bool]") -> None:
    if not stored.cancelled():
        generation.stored = stored.result()


def _lease_facts(generation: Generation, lease: Lease) -> dict[str, object]:
    return {"generation": generation.name, "lease": lease.name, "pid": lease.pid}


def _stored(generation: Generation) -> list[tuple[str, int]]:
    """The names and descriptors that a generation is stored as."""
    manifest, *chunks = generation.descriptors
    named = [(f"arena-{generation.name}-{index}", chunk) for index, chunk in enumerate(chunks)]
    return [(f"manifest-{generation.name}", manifest), *named]


def _check_arena(manifest: Manifest | Head, descriptors: list[int]) -> None:
    if len(descriptors) != len(manifest.chunks):
        raise ImportRejected(
            "manifest_invalid",
            "the arena has another number of chunks than its manifest",
            expected=len(manifest.chunks),
            found=len(descriptors),
        )
    if manifest.arena == "memfd":  # GPU allocations have neither seals nor a size that a process without CUDA can ask
        for descriptor, size in zip(descriptors, manifest.chunks, strict=True):
            require_sealed(descriptor, size, "arena")


def _stored_order(name: str) -> int:
    return int(name.rsplit("-", 1)[1]) if name.startswith("arena-") else -1
