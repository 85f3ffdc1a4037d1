"""Residency: generations that stay when processes go, and the leases on them.

Whatever becomes resident here is stored with the keeper (or systemd) before it counts, and what a keeper hands over is
checked before it counts again: seals, sizes, and a manifest that is the one its name promises.
"""

import asyncio
import logging
import os
import time
from collections.abc import Iterable
from typing import Final

import msgspec

from weightcache.arena.seals import require_sealed
from weightcache.errors import CacheMiss, ImportRejected, ProtocolError, WeightCacheError
from weightcache.fingerprint import CacheConfig
from weightcache.journal import Context, Journal
from weightcache.manifest import Manifest, read
from weightcache.registry import Generation, Lease, Registry
from weightcache.sdnotify import Notifier

_log: Final = logging.getLogger("weightcache.residency")


class Residency:
    """The registry's generations together with what keeps them alive.

    Args:
        registry: what is resident.
        journal: publications, releases and leases go there.
        notifier: the keeper that stores descriptors.
        instance: a token of this daemon process, part of the names of its leases.
    """

    def __init__(self, registry: Registry, journal: Journal, notifier: Notifier, instance: str) -> None:
        self.registry = registry
        self.journal = journal
        self.notifier = notifier
        self._instance = instance
        self._lease_number = 0

    def adopt(self, handed: list[tuple[str, int]]) -> None:
        """Take over stored generations; one that does not prove itself is dropped and journaled as lost."""
        stored: dict[str, dict[str, int]] = {}
        for name, descriptor in handed:
            kind, _, rest = name.partition("-")
            generation = rest.partition("-")[0]
            if kind in ("manifest", "arena"):
                stored.setdefault(generation, {})[name] = descriptor
        for generation, descriptors in stored.items():
            ordered = [descriptors[key] for key in sorted(descriptors, key=_stored_order)]
            try:
                _, manifest = read(ordered[0], generation)
                _check_arena(manifest, ordered[1:])
            except WeightCacheError as error:
                _log.error("stored generation %s is not adopted: %s", generation, error)
                self._forget(descriptors)
                self.journal.append("release", "lost", {"generation": generation, "reason": error.to_dict()})
                for descriptor in ordered:
                    os.close(descriptor)
                continue
            adopted = Generation.of(generation, manifest, ordered)
            adopted.stored = self.notifier.active
            adopted.quarantined = self._quarantine_of(generation)
            self.registry.add(adopted)

    def store_everything(self) -> None:
        """Leave every generation's descriptors with the keeper."""
        for generation in self.registry.generations.values():
            self._store(generation)

    def _store(self, generation: Generation) -> None:
        for name, descriptor in zip(_stored_names(generation), generation.descriptors, strict=True):
            self.notifier.store(name, descriptor)
        generation.stored = self.notifier.active

    def _forget(self, names: Iterable[str]) -> None:
        for name in names:
            self.notifier.remove(name)

    def _quarantine_of(self, generation: str) -> str | None:
        events = self.journal.query(
            "WHERE kind = 'quarantine' AND attributes LIKE ? ORDER BY id DESC LIMIT 1", f"%{generation}%"
        )
        return str(events[0].attributes["reason"]) if events and events[0].name == "set" else None

    async def publish(self, claimed: CacheConfig, descriptors: list[int], context: Context) -> Generation:
        """Make a generation resident.

        Args:
            claimed: the identity that was claimed.
            descriptors: the manifest, then the arena's chunks; the caller keeps and closes them.
            context: of the publisher.

        Raises:
            ImportRejected: the manifest or arena is not what it must be.
            ResourceError: it does not fit the capacity.
        """
        if not descriptors:
            raise ProtocolError("protocol", "publishing takes a manifest and an arena", found="no descriptors")
        name, manifest = read(descriptors[0])
        _check_arena(manifest, descriptors[1:])
        differences = claimed.differences(manifest.config)
        if differences:
            raise ImportRejected(
                "import_mismatch",
                f"the manifest is for another identity than was claimed: {differences[0]}",
                differences=[msgspec.to_builtins(difference) for difference in differences],
            )
        for evicted in self.registry.make_room(manifest.size):
            self.release(evicted.name, "evicted")
        generation = Generation.of(name, manifest, [os.dup(descriptor) for descriptor in descriptors])
        self._store(generation)
        if self.notifier.active:
            # Until the keeper has them all, our death would end them: nothing counts as published before.
            stored = await asyncio.get_running_loop().run_in_executor(None, self.notifier.barrier)
            generation.stored = stored
            if not stored:
                _log.warning("no keeper took generation %s: it lives only as long as this daemon or an engine", name)
        facts = {
            "generation": name,
            "config": manifest.config.to_dict(),
            "bytes": manifest.size,
            "tensors": len(manifest),
            "publisher": generation.publisher,
            "stored": generation.stored,
        }
        self.journal.append("publish", "published", facts, context=context)
        self.registry.add(generation)
        return generation

    def release(self, name: str, how: str) -> None:
        """Drop a generation: ``released``, ``evicted`` or ``replaced``. Its memory returns when its last lease ends."""
        generation = self.registry.remove(name)
        self.journal.append("release", how, {"generation": name, "bytes": generation.bytes})
        self._forget(_stored_names(generation))
        generation.close()

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

    def open_lease(self, generation: Generation, pid: int, connection: int, context: Context) -> Lease:
        """Lease a generation to the client at the other end of ``connection``, stored with the keeper too."""
        self._lease_number += 1
        lease = Lease(
            f"lease-{generation.name}-{self._instance}.{self._lease_number}", pid, context.slot, time.time_ns()
        )
        generation.leases[lease.name] = lease
        generation.last_used_ns = time.monotonic_ns()
        facts = {"generation": generation.name, "lease": lease.name, "pid": pid}
        self.journal.append("lease_open", "", facts, context=context)
        self.notifier.store(lease.name, connection, poll=True)
        return lease

    def adopt_lease(self, name: str, pid: int) -> tuple[Generation, Lease, Context | None] | None:
        """Take over a stored lease, with the context of its client as journaled; None if its generation is gone."""
        generation = self.registry.generations.get(name.split("-", 2)[1])
        if generation is None:
            self.notifier.remove(name)
            return None
        clause = "WHERE kind = 'lease_open' AND attributes LIKE ? ORDER BY id DESC LIMIT 1"
        opened = self.journal.query(clause, f'%"{name}"%')
        context = None
        if opened:
            event = opened[0]
            context = Context(event.node, event.slot, event.episode, event.attempt, event.rank)
        lease = Lease(name, pid, context.slot if context else None, time.time_ns())
        generation.leases[name] = lease
        return generation, lease, context

    def close_lease(self, generation: Generation, lease: Lease, context: Context | None) -> None:
        """End a lease."""
        generation.leases.pop(lease.name, None)
        generation.last_used_ns = time.monotonic_ns()
        self.notifier.remove(lease.name)
        facts = {"generation": generation.name, "lease": lease.name, "pid": lease.pid}
        self.journal.append("lease_close", "", facts, context=context)


def _stored_names(generation: Generation) -> list[str]:
    chunks = range(len(generation.descriptors) - 1)
    return [f"manifest-{generation.name}", *(f"arena-{generation.name}-{index}" for index in chunks)]


def _check_arena(manifest: Manifest, descriptors: list[int]) -> None:
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
