"""The weight cache: weights that outlive the processes that use them.

The public names load on first use, because the keeper and the daemon import this package without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightcache.client import Attachment, Outcome, attach, publish
    from weightcache.errors import CacheMiss, CheckpointError, ConfigError, WeightCacheError
    from weightcache.fingerprint import CacheConfig

_HOMES = {
    "Attachment": "weightcache.client",
    "Outcome": "weightcache.client",
    "attach": "weightcache.client",
    "publish": "weightcache.client",
    "CacheConfig": "weightcache.fingerprint",
    "CacheMiss": "weightcache.errors",
    "CheckpointError": "weightcache.errors",
    "ConfigError": "weightcache.errors",
    "WeightCacheError": "weightcache.errors",
}

__all__ = [
    "Attachment",
    "CacheConfig",
    "CacheMiss",
    "CheckpointError",
    "ConfigError",
    "Outcome",
    "WeightCacheError",
    "attach",
    "publish",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'weightcache' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
