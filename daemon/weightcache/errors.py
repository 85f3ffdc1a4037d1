"""The exception tree.

::

    WeightCacheError
    ├── CheckpointError               the files are bad; reading them again from disk cannot help
    ├── ConfigError                   settings or host cannot work; raised before any weight byte is read
    └── CacheMiss                     resident weights cannot be used; disk may be
        ├── ImportRejected            the daemon offered something the client must not accept
        ├── ResourceError             out of memory, descriptors or capacity
        ├── ProtocolError             bad bytes or bad timing on the socket
        └── UnsupportedQuantForIPCError   the quantisation does not travel as plain tensors

Every error names the thing, what was expected, what was found and what to do, and carries them as data.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from weightcache.vocabulary import MISS_REASONS


class WeightCacheError(Exception):
    """Base of everything this package raises on purpose.

    Args:
        reason: a word from a closed list (`MISS_REASONS` for a `CacheMiss`).
        message: one sentence that names the thing.
        detail: a word from the closed list that belongs to the reason, or None.
        expected: what should have been there.
        found: what was there.
        remedy: what the reader can do.
        data: further facts, JSON-compatible (``file``, ``tensor``, ``path``, byte counts).
    """

    kind: ClassVar[str] = "error"

    def __init__(
        self,
        reason: str,
        message: str,
        *,
        detail: str | None = None,
        expected: object = None,
        found: object = None,
        remedy: str | None = None,
        **data: Any,
    ) -> None:
        self.reason = reason
        self.message = message
        self.detail = detail
        self.expected = expected
        self.found = found
        self.remedy = remedy
        self.data = data
        super().__init__(reason, message)

    def __str__(self) -> str:
        both = (("expected", self.expected), ("found", self.found))
        values = ", ".join(f"{which} {value}" for which, value in both if value is not None)
        parts = [f"{self.message.rstrip('.')}: {values}" if values else self.message.rstrip(".")]
        if self.remedy:
            parts.append(self.remedy.rstrip("."))
        return ". ".join(parts) + "."

    def to_dict(self) -> dict[str, Any]:
        """The error as JSON-compatible data, for ``--json`` and the journal."""
        facts: Mapping[str, Any] = {
            "kind": self.kind,
            "reason": self.reason,
            "detail": self.detail,
            "message": str(self),
            "expected": _plain(self.expected),
            "found": _plain(self.found),
            "remedy": self.remedy,
        }
        return {**facts, **{key: _plain(value) for key, value in self.data.items()}}


class CheckpointError(WeightCacheError):
    """The checkpoint's files are bad or unsupported. Permanent: the same disk will not do better."""

    kind = "checkpoint"


class ConfigError(WeightCacheError):
    """Settings or host cannot work. Raised before any weight byte is read."""

    kind = "config"


class CacheMiss(WeightCacheError):
    """Resident weights cannot be used, and why. The base itself is raised too: most reasons need no class."""

    kind = "cache_miss"

    def __init__(self, reason: str, message: str, **facts: Any) -> None:
        if reason not in MISS_REASONS:
            raise ValueError(f"miss reason {reason!r} is not one of the closed list {MISS_REASONS}")
        super().__init__(reason, message, **facts)


class ImportRejected(CacheMiss):
    """The daemon offered an arena or manifest that must not be bound."""

    kind = "import"


class ResourceError(CacheMiss):
    """Out of memory, descriptors or capacity. ``data`` carries ``needed`` and ``available``."""

    kind = "resource"

    def __init__(self, message: str, *, detail: str = "memory", **facts: Any) -> None:
        super().__init__("resource", message, detail=detail, **facts)


class ProtocolError(CacheMiss):
    """Bad bytes or bad timing on the socket."""

    kind = "protocol"


class UnsupportedQuantForIPCError(CacheMiss):
    """The model's quantisation cannot travel as plain tensors. Use mode ``off``."""

    kind = "quantization"

    def __init__(self, message: str, *, detail: str, **facts: Any) -> None:
        facts.setdefault("remedy", "Start the engine with the weight cache off (mode off) for this model")
        super().__init__("quant_not_allowed", message, detail=detail, **facts)


def _plain(value: object) -> Any:
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return str(value)
