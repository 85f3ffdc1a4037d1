"""What a keeper is told to run: a JSON file, written by ``readmit up`` and ``readmit run``. Standard library only."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

from weightcache.errors import ConfigError
from weightcache.journal import Context

ROLES: Final = ("daemon", "engine", "gate", "other")
BACKOFF_S: Final = (0.0, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
"""Pauses before an engine's restarts, the last one for all further ones. The first restart is at once."""
LIMIT: Final = 5
"""Ends of an engine within the window, without an answer in between, after which its episode is abandoned."""
WINDOW_S: Final = 600.0
STOP_S: Final = 15.0
"""How long a child may take to end after SIGTERM before its whole session is killed."""
_OWN_VARIABLES: Final = (
    *("NOTIFY_SOCKET", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "WATCHDOG_PID", "WATCHDOG_USEC", "FDSTORE"),
    *("READMIT_SLOT", "READMIT_EPISODE", "READMIT_ATTEMPT", "READMIT_RANK", "TRACEPARENT"),
)
"""What the keeper's own environment may say of the keeper; no child inherits it."""
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")


class ChildSpec(NamedTuple):
    """One process to keep running.

    ``limit`` 0 means never to give up. ``backoff_s``, ``limit`` and ``window_s`` are for engines; a daemon or gate is
    restarted for ever, at once.
    """

    name: str
    role: str
    argv: tuple[str, ...]
    env: dict[str, str] = {}  # noqa: RUF012 - a NamedTuple's default, never changed
    cwd: str | None = None
    backoff_s: tuple[float, ...] = BACKOFF_S
    limit: int = LIMIT
    window_s: float = WINDOW_S
    stop_s: float = STOP_S
    model: str | None = None
    """The folder of an engine's model, where it is known: what is cached of it is part of its starting state."""
    preload: str | None = None
    """Name of the child, of role ``other``, that an engine's restarts are forked from (see `weightcache.preload`)."""


class KeeperSpec(NamedTuple):
    """A node's processes.

    ``closes_episodes``: the engine's own READY=1 ends an episode, unverified, because no gate watches.
    ``foreground``: engine output is copied to the keeper's own, and the keeper ends with the engine it gave up.
    """

    node: str
    runtime_dir: Path
    state_dir: Path
    journal: Path
    children: tuple[ChildSpec, ...]
    closes_episodes: bool = False
    foreground: bool = False

    @classmethod
    def load(cls, path: Path) -> "KeeperSpec":
        """Read a spec.

        Raises:
            ConfigError: ``keeper_spec``.
        """
        try:
            return cls.from_dict(json.loads(path.read_text()))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                "keeper_spec",
                f"the keeper cannot use its spec {path}: {type(error).__name__}: {error}",
                remedy="Let readmit up or readmit run write it",
                path=str(path),
            ) from error

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "KeeperSpec":
        """Build a spec from JSON data; raises ValueError, TypeError or KeyError for what is not one."""
        children = tuple(_child(item) for item in data["children"])
        names = [child.name for child in children]
        if len(set(names)) != len(names):
            raise ValueError(f"two children share a name: {names}")
        paths = {key: Path(data[key]) for key in ("runtime_dir", "state_dir", "journal")}
        return cls(**{**data, **paths, "children": children})

    def environment(self, child: ChildSpec, context: Context, notify_path: Path) -> dict[str, str]:
        """The whole environment of a child that starts in a context."""
        inherited = {name: value for name, value in os.environ.items() if name not in _OWN_VARIABLES}
        return {
            "WEIGHTCACHE_SOCKET": str(self.runtime_dir / "cache.sock"),
            **inherited,
            "READMIT_RUNTIME": str(self.runtime_dir),
            "READMIT_STATE": str(self.state_dir),
            "READMIT_JOURNAL": str(self.journal),
            **child.env,
            **context.to_environment(),
            "NOTIFY_SOCKET": str(notify_path),
        }

    def save(self, path: Path) -> None:
        """Write the spec, readable by this user alone: environments carry secrets."""
        data = {**self._asdict(), "children": [child._asdict() for child in self.children]}
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(descriptor, "w") as file:
            json.dump(data, file, indent=1, default=str)


def keeper_command(spec: Path) -> list[str]:
    """The command that runs a keeper on a spec file. Without docstrings it is a quarter of a MiB smaller."""
    return [sys.executable, "-OO", "-m", "weightcache.keeper", str(spec)]


def checked_name(name: str) -> str:
    """A child's name, which becomes a file name and a label; raises ValueError."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"the name {name!r} is not 1 to 32 of a-z, 0-9, _ and -")
    return name


def _child(data: dict[str, Any]) -> ChildSpec:
    child = ChildSpec(**data)
    checked_name(child.name)
    if child.role not in ROLES:
        raise ValueError(f"the role {child.role!r} of {child.name} is not one of {ROLES}")
    if not child.argv:
        raise ValueError(f"{child.name} has no command")
    if not child.backoff_s:
        raise ValueError(f"{child.name} has an empty backoff_s")
    return child._replace(argv=tuple(child.argv), backoff_s=tuple(map(float, child.backoff_s)))
