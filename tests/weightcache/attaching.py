"""Attaching a tiny model, as tests of the client do it."""

from typing import Any

from tests.weightcache.caches import Cache
from tests.weightcache.models import Tiny, config, fill, loader, skeleton

from weightcache.attachment import Outcome
from weightcache.client import attach
from weightcache.fingerprint import CacheConfig
from weightcache.journal import Context, Event, Journal


def load(cache: Cache, identity: CacheConfig | None = None, seed: int = 0, **options: Any) -> tuple[Tiny, Outcome]:
    """Attach with a loader behind it."""
    model = skeleton()
    settings = {"load": loader(model, seed), "load_bytes": 1, "socket": cache.socket, "journal": journal(cache)}
    return model, attach(model, identity or config(), **{**settings, **options})


def journal(cache: Cache) -> Journal:
    return Journal(cache.journal_path, Context("n", "a"))


def fresh(seed: int = 0) -> Tiny:
    model = Tiny()
    fill(model, seed)
    return model


def only_lookup(cache: Cache) -> Event:
    """The one row that an attach leaves, once."""
    (lookup,) = cache.lookups()
    return lookup
