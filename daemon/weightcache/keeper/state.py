"""What a keeper leaves on disk for its successor: who owns the runtime folder, and which children live.

Standard library only.
"""

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

from weightcache.errors import ConfigError
from weightcache.journal import boot_id
from weightcache.lock_file import Held, hold
from weightcache.paths import checked_socket_path, private_dir

STATE_FILE: Final = "keeper.json"


class ChildRecord(NamedTuple):
    """One child as its keeper knew it last.

    ``pid`` is None while it had no process; ``episode`` and ``attempt`` are None for all but engines.
    """

    name: str
    role: str
    state: str
    pid: int | None
    start_ticks: int | None
    ready: bool
    since_ns: int
    episode: str | None = None
    attempt: int | None = None


class KeeperState:
    """The keeper's part of a runtime folder, owned by a lock that the kernel releases when its holder dies.

    Args:
        runtime_dir: the folder.
        children: their names.
        lock: the lock, where this process holds it already; acquired if None.

    Raises:
        ConfigError: ``already_running``, when another keeper holds the lock; ``not_private``, ``path_too_long``.
    """

    def __init__(self, runtime_dir: Path, children: Iterable[str], lock: int | None = None) -> None:
        check_paths(runtime_dir, children)
        self.folder = private_dir(private_dir(runtime_dir) / "keeper")
        self.control_path = runtime_dir / "keeper.sock"
        self._runtime_dir = runtime_dir
        self._file = runtime_dir / STATE_FILE
        self._lock_path = _lock_path(runtime_dir)
        self.lock = _acquire(runtime_dir) if lock is None else lock

    def notify_path(self, child: str) -> Path:
        """Where a child's notify socket is bound."""
        return self.folder / f"{child}.sock"

    def load(self) -> tuple[int | None, list[ChildRecord]]:
        """The predecessor's pid and children; (None, []) after an orderly end or a reboot."""
        return read(self._runtime_dir)

    def save(self, node: str, children: list[ChildRecord]) -> None:
        """Write down the children, whole or not at all."""
        data = {"pid": os.getpid(), "boot_id": boot_id(), "node": node, "children": [it._asdict() for it in children]}
        fresh = self._file.with_suffix(".json.new")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(descriptor, "w") as file:
            json.dump(data, file)
        fresh.replace(self._file)

    def remove(self) -> None:
        """Leave nothing behind: the children have ended."""
        for path in (self._file, spec_path(self._runtime_dir), self.control_path, self._lock_path):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # somebody else's file in it, or a child's output
            self.folder.rmdir()
        self.close()

    def close(self) -> None:
        """Give up the folder."""
        os.close(self.lock)


def read(runtime_dir: Path) -> tuple[int | None, list[ChildRecord]]:
    """The pid and the children of the keeper that looks after a runtime folder, or did last in this boot."""
    try:
        data: dict[str, Any] = json.loads((runtime_dir / STATE_FILE).read_text())
        if data["boot_id"] != boot_id():
            return None, []
        return data["pid"], [ChildRecord(**item) for item in data["children"]]
    except FileNotFoundError:
        return None, []
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            "keeper_state",
            f"the state of an earlier keeper in {runtime_dir / STATE_FILE} cannot be read: {error}",
            remedy="End the processes it started, then remove the file",
            path=str(runtime_dir / STATE_FILE),
        ) from error


def spec_path(runtime_dir: Path) -> Path:
    """Where `readmit up` and `readmit run` put the spec of the keeper they become."""
    return runtime_dir / "keeper-spec.json"


def check_paths(runtime_dir: Path, children: Iterable[str]) -> None:
    """Raises ConfigError ``path_too_long`` when a keeper's sockets cannot be bound below a runtime folder."""
    for path in (runtime_dir / "keeper.sock", *(runtime_dir / "keeper" / f"{child}.sock" for child in children)):
        checked_socket_path(path)


def check_unowned(runtime_dir: Path) -> None:
    """Raises ConfigError ``already_running`` when a keeper looks after a runtime folder."""
    if _lock_path(runtime_dir).exists():
        os.close(_acquire(runtime_dir))


def _lock_path(runtime_dir: Path) -> Path:
    return runtime_dir / "keeper" / "lock"


def _acquire(runtime_dir: Path) -> int:
    try:
        return hold(_lock_path(runtime_dir), str(os.getpid()))
    except Held as held:
        raise ConfigError(
            "already_running",
            f"a keeper with pid {held.holder or 'unknown'} already looks after {runtime_dir}",
            remedy="Stop that one first (SIGTERM), or give this node a runtime folder of its own",
            path=str(runtime_dir),
            pid=int(held.holder) if held.holder.isdecimal() else None,
        ) from held
