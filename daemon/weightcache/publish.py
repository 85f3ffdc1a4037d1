"""Publishing: a loaded model's tensors into a new arena, described by a manifest, made resident by the daemon."""

import os
import time
from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

from weightcache import layout
from weightcache.arena import FilledArena, WritableArena, kinds
from weightcache.arena.seals import sealed_file
from weightcache.fingerprint import CacheConfig
from weightcache.frames import close_all
from weightcache.manifest import KINDS, Manifest, Publisher
from weightcache.messages import Publish, Published
from weightcache.protocol import Connection


class Packed(NamedTuple):
    """A model in an arena, before or after it was published: the manifest, and descriptors (the manifest's first)."""

    manifest: Manifest
    descriptors: list[int]

    def close(self) -> None:
        """Let go of the descriptors."""
        close_all(self.descriptors)
        self.descriptors.clear()


def pack(
    model: nn.Module,
    config: CacheConfig,
    *,
    origin: str,
    slot: str | None = None,
    extras: Mapping[str, str] | None = None,
    filled: FilledArena | None = None,
) -> Packed:
    """Copy a loaded model's tensors into an arena.

    Args:
        model: fully loaded, nothing on meta.
        config: the identity of its weights.
        origin: where the bytes came from, for operators.
        slot: the engine's slot.
        extras: text to keep with the weights.
        filled: the arena that the model's weights were read into, which takes the rest too; a new one if None.

    Raises:
        ResourceError: no room for the arena.
        CacheMiss: it cannot be made on this device.
    """
    plan = layout.of(model, filled)
    arena: WritableArena = kinds.writer(plan.size, plan.device) if filled is None else filled
    descriptors: list[int] = []
    try:
        if filled is not None:
            filled.grow(plan.size)
        for number in range(len(plan.regions)):
            _write(plan, number, arena)
        descriptors += arena.seal()
        manifest = _manifest(plan, arena, config, origin, slot, extras or {})
        descriptors.insert(0, sealed_file("weightcache-manifest", manifest.encode()))
    except BaseException:
        close_all(descriptors)
        raise
    finally:
        arena.close()
    return Packed(manifest, descriptors)


def offer(connection: Connection, packed: Packed, *, timeout_s: float = 60.0) -> str:
    """Publish a packed model under the claim that the connection holds; afterwards it holds a lease.

    Returns:
        The generation.

    Raises:
        CacheMiss: the daemon refused it, has no room for it, or is gone.
    """
    request = Publish(descriptors=len(packed.descriptors))
    reply, _ = connection.ask(request, Published, packed.descriptors, timeout_s=timeout_s)
    return reply.generation


def _write(plan: layout.Layout, number: int, arena: WritableArena) -> None:
    """Copy a region's bytes to the arena. On a GPU its parameters move there, and their source is freed."""
    region = plan.regions[number]
    if region.source is None:
        return
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
