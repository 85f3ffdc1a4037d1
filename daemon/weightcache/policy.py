"""Policies: what a client does about each reason for a miss."""

from collections.abc import Mapping
from typing import Final

from weightcache.errors import ConfigError
from weightcache.vocabulary import MISS_REASONS, POLICIES

_CLIENT: Final = dict.fromkeys(MISS_REASONS, "fallback") | {
    "daemon_loading": "wait",
    "fingerprint": "replace",
    "resource": "fail",
}
# A second copy on the same full device would run out of memory, so mode `daemon` raises where `client` falls back. The
# weights of a miss `device` are on another one.
_DAEMON: Final = dict.fromkeys(MISS_REASONS, "fail") | {
    "absent": "wait",
    "device": "wait",
    "residency_lost": "wait",
    "daemon_loading": "wait",
}

PUBLISHES_AFTER: Final = frozenset(
    {
        "absent",
        "device",
        "fingerprint",
        "residency_lost",
        "integrity",
        "manifest_invalid",
        "import_mismatch",
        "quarantined",
    }
)
"""Misses after which a copy fresh from disk is published: the daemon answered, and its answer was about the weights."""

USELESS: Final = frozenset({"integrity", "manifest_invalid", "import_mismatch", "quarantined"})
"""Misses after which the resident copy of these very weights helps nobody: it may go where memory is short."""

QUARANTINES: Final = frozenset({"integrity", "manifest_invalid", "import_mismatch"})
"""Misses that are the generation's own fault: nobody else should meet them again."""


def policy_for(reason: str, mode: str, overrides: Mapping[str, str] | None = None) -> str:
    """What to do about a miss: ``fallback``, ``fail``, ``wait`` or ``replace``.

    Args:
        reason: of the miss.
        mode: ``client`` or ``daemon``.
        overrides: policies by reason that replace the defaults.
    """
    defaults = _DAEMON if mode == "daemon" else _CLIENT
    return (overrides or {}).get(reason, defaults[reason])


def check_overrides(overrides: Mapping[str, str] | None) -> None:
    """Check that overrides name known reasons and policies.

    Raises:
        ConfigError: reason ``policy``.
    """
    for reason, policy in (overrides or {}).items():
        if reason not in MISS_REASONS:
            raise ConfigError("policy", f"{reason!r} is no miss reason", expected=", ".join(MISS_REASONS), found=reason)
        if policy not in POLICIES:
            raise ConfigError(
                "policy", f"{policy!r} is no policy for {reason!r}", expected=", ".join(POLICIES), found=policy
            )
