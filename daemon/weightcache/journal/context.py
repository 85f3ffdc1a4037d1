"""Where in the world an event happens, and the trace it belongs to."""

import os
from collections.abc import Mapping
from typing import NamedTuple

from weightcache.errors import ConfigError


class Context(NamedTuple):
    """Node, slot, episode, attempt and rank of what a process has to say; passed to children by environment."""

    node: str
    slot: str | None = None
    episode: str | None = None
    attempt: int | None = None
    rank: int | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> "Context":
        """Read ``READMIT_NODE`` (by default the host's name), ``_SLOT``, ``_EPISODE``, ``_ATTEMPT`` and ``_RANK``.

        Raises:
            ConfigError: ``context``: attempt or rank is no number.
        """
        return cls(
            node=environ.get("READMIT_NODE") or os.uname().nodename,
            slot=environ.get("READMIT_SLOT") or None,
            episode=environ.get("READMIT_EPISODE") or None,
            attempt=_number(environ, "READMIT_ATTEMPT"),
            rank=_number(environ, "READMIT_RANK"),
        )

    def to_environment(self) -> dict[str, str]:
        """The variables that make `from_environment` give this context, W3C trace context included."""
        pairs = {
            "READMIT_NODE": self.node,
            "READMIT_SLOT": self.slot,
            "READMIT_EPISODE": self.episode,
            "READMIT_ATTEMPT": self.attempt,
            "READMIT_RANK": self.rank,
            "TRACEPARENT": self.traceparent(),
        }
        return {name: str(value) for name, value in pairs.items() if value is not None}

    def traceparent(self) -> str | None:
        """The W3C ``traceparent`` of the current attempt, or None outside an episode."""
        if self.episode is None:
            return None
        return f"00-{self.episode}-{span_id(self.episode, 'attempt', self.attempt or 0)}-01"


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if text and not text.isdecimal():
        raise ConfigError(
            "context",
            f"{name} is no number",
            expected="0, 1, 2, ...",
            found=text,
            remedy=f"Unset {name}: the keeper sets it",
        )
    return int(text) if text else None


def span_id(*parts: object) -> str:
    """A span id, 16 hexadecimal digits, that is the same whenever the same span is derived again."""
    # Not through hashlib, which maps OpenSSL: 3.5 MiB in the keeper, for eight bytes.
    from _blake2 import blake2b

    return blake2b("/".join(map(str, parts)).encode(), digest_size=8).hexdigest()


def new_episode_id() -> str:
    """A fresh episode (and trace) id: 32 hexadecimal digits."""
    return os.urandom(16).hex()
