"""Publishing by hand: what an honest engine publishes, and what a rogue one would."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from tests.weightcache.caches import Cache
from tests.weightcache.models import Tiny, config, fill

from weightcache import messages
from weightcache.arena.seals import sealed_file
from weightcache.fingerprint import CacheConfig
from weightcache.protocol import Connection
from weightcache.publish import Packed, offer, pack


def packed(identity: CacheConfig | None = None, seed: int = 0) -> Packed:
    """A filled tiny model in an arena."""
    model = Tiny()
    fill(model, seed)
    return pack(model, identity or config(), origin="by hand")


def spoil(good: Packed, content: bytes | None = None, **changes: Any) -> Packed:
    """The same arena (or one of other content) under a manifest that differs."""
    manifest = msgspec.structs.replace(good.manifest, **changes)
    arena = os.dup(good.descriptors[1]) if content is None else sealed_file("weightcache-arena", content)
    spoilt = Packed(manifest, [sealed_file("weightcache-manifest", manifest.encode()), arena])
    good.close()
    return spoilt


def flipped(good: Packed) -> Packed:
    """What a rogue publishes: under true digests, bytes of which one is another."""
    content = bytearray(os.pread(good.descriptors[1], good.manifest.size, 0))
    content[0] ^= 0x40
    return spoil(good, bytes(content))


def publish(cache: Cache, what: Packed, *, replace: bool = False, claimed: CacheConfig | None = None) -> str:
    """Claim and publish on a connection that ends then; returns the generation."""
    with publishing(cache, what, replace=replace, claimed=claimed) as (_, generation):
        return generation


@contextmanager
def publishing(
    cache: Cache, what: Packed, *, replace: bool = False, claimed: CacheConfig | None = None
) -> Iterator[tuple[Connection, str]]:
    """Claim, publish, and hold the lease for the block."""
    connection = cache.connect(slot="publisher")
    try:
        identity = claimed or what.manifest.config
        request = messages.Claim(config=identity.to_dict(), replace=replace, device=what.manifest.device)
        connection.ask(request, messages.Claimed)
        yield connection, offer(connection, what)
    finally:
        what.close()
        connection.close()


def attach(
    cache: Cache, identity: CacheConfig | None = None, wait_s: float = 0, device: str | None = None
) -> tuple[Connection, str, list[int]]:
    """Attach without a model: the lease's connection, the generation, its descriptors."""
    connection = cache.connect(slot="a")
    try:
        request = messages.Attach(config=(identity or config()).to_dict(), wait_s=wait_s, device=device)
        for reply, descriptors in connection.ask_for_all(request, timeout_s=wait_s + 60):
            if isinstance(reply, messages.Attached):
                return connection, reply.generation, descriptors
    except BaseException:
        connection.close()
        raise
    raise AssertionError("the answer ended without weights")
