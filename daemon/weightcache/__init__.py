"""The weight cache: weights that outlive the processes that use them.

The public names load on first use, because the keeper and the daemon import this package without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightcache.attachment import Outcome
    from weightcache.client import attach
    from weightcache.errors import CacheMiss, CheckpointError, ConfigError, WeightCacheError
    from weightcache.fingerprint import CacheConfig

_HOMES = {
    "Outcome": "weightcache.attachment",
    "attach": "weightcache.client",
    "CacheConfig": "weightcache.fingerprint",
    "CacheMiss": "weightcache.errors",
    "CheckpointError": "weightcache.errors",
    "ConfigError": "weightcache.errors",
    "WeightCacheError": "weightcache.errors",
}

__all__ = [
    "CacheConfig",
    "CacheMiss",
    "CheckpointError",
    "ConfigError",
    "Outcome",
    "WeightCacheError",
    "attach",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'weightcache' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
