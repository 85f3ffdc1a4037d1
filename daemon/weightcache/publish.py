"""Publishing: a loaded model's tensors into a new arena, described by a manifest, made resident by the daemon."""

import errno
import os
import time
from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

from weightcache import layout
from weightcache.arena import WritableArena, kinds
from weightcache.arena.seals import sealed_file
from weightcache.errors import ResourceError
from weightcache.fingerprint import CacheConfig
from weightcache.manifest import KINDS, Manifest, Publisher
from weightcache.messages import Publish, Published
from weightcache.protocol import Connection


class Resident(NamedTuple):
    """What was published: its name, manifest, and descriptors that the caller must close."""

    generation: str
    manifest: Manifest
    descriptors: list[int]


def publish(
    connection: Connection,
    model: nn.Module,
    config: CacheConfig,
    *,
    origin: str,
    slot: str | None = None,
    extras: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
) -> Resident:
    """Publish a loaded model under the claim that the connection holds; afterwards it holds a lease.

    Args:
        connection: holds a claim on ``config``.
        model: fully loaded, nothing on meta.
        config: the identity of its weights.
        origin: where the bytes came from, for operators.
        slot: the engine's slot.
        extras: text to keep with the weights.
        timeout_s: for the daemon to make it resident.

    Raises:
        ResourceError: no room for the arena, or in the daemon's capacity.
        CacheMiss: the daemon refused it.
    """
    plan = layout.of(model)
    arena = kinds.writer(plan.size, plan.device)
    try:
        for number in range(len(plan.regions)):
            _write(plan, number, arena)
        descriptors = arena.seal()
        manifest = _manifest(plan, arena, config, origin, slot, extras or {})
    finally:
        arena.close()
    try:
        descriptors.insert(0, sealed_file("weightcache-manifest", manifest.encode()))
        request = Publish(descriptors=len(descriptors))
        reply, _ = connection.ask(request, Published, descriptors, timeout_s=timeout_s)
    except BaseException as error:
        for descriptor in descriptors:
            os.close(descriptor)
        if isinstance(error, OSError) and error.errno == errno.ETOOMANYREFS:
            raise ResourceError("too many descriptors are in flight", detail="descriptors", found=str(error)) from error
        raise
    return Resident(reply.generation, manifest, descriptors)


def _write(plan: layout.Layout, number: int, arena: WritableArena) -> None:
    """Copy a region's bytes to the arena. On a GPU its parameters move there, and their source is freed."""
    region = plan.regions[number]
    assert region.source is not None
    arena.write(region.offset, region.source)
    for row in region.rows:
        _, tensor, kind, offset = plan.rows[row]
        # Buffers stay where they are: engines write into them, and the arena will be read-only.
        replacement = arena.view(offset, tensor) if kind == KINDS.index("parameter") else None
        if replacement is not None:
            tensor.data = replacement
            plan.regions[number] = region._replace(source=None)


def _manifest(
    plan: layout.Layout,
    arena: WritableArena,
    config: CacheConfig,
    origin: str,
    slot: str | None,
    extras: Mapping[str, str],
) -> Manifest:
    dtypes: dict[str, int] = {}
    codes = [dtypes.setdefault(str(row.tensor.dtype).removeprefix("torch."), len(dtypes)) for row in plan.rows]
    return Manifest(
        config=config,
        publisher=Publisher(os.getpid(), os.readlink("/proc/self/exe"), origin, slot, time.time_ns()),
        arena=arena.kind,
        device=arena.device,
        chunks=arena.chunks(),
        names=[row.name for row in plan.rows],
        dtypes=list(dtypes),
        dtype=codes,
        shapes=[tuple(row.tensor.shape) for row in plan.rows],
        strides=[None if row.tensor.is_contiguous() else row.tensor.stride() for row in plan.rows],
        offsets=[row.offset for row in plan.rows],
        kinds=bytes(row.kind for row in plan.rows),
        aliases=plan.aliases,
        shared=plan.shared,
        digest_algorithm=arena.digest_algorithm,
        digest_size=arena.digest_size,
        digests=arena.digests([(row.offset, row.tensor) for row in plan.rows]),
        extras=dict(extras),
    )
