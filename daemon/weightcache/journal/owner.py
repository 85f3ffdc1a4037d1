"""Whose journal a file is: that of the node whose daemon runs on it, so that two nodes never share one by mistake.

A state folder on a network file system, or one mounted into two containers, would let each node count the other's
recoveries, and its slots of the same name, as its own.
"""

import os
from pathlib import Path
from typing import NoReturn

from weightcache.errors import ConfigError
from weightcache.lock_file import Held, hold


def own(path: Path, node: str) -> int | None:
    """Own a journal for as long as the returned descriptor is open.

    None where another daemon of the same node does (one that an engine started for itself), or where the file system
    takes no lock: weights are served all the same.

    Raises:
        ConfigError: ``journal_owned``: it is another node's.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        return hold(_lock_path(path), f"{os.getpid()} {node}")
    except Held as held:
        pid, _, owner = held.holder.partition(" ")
        if owner not in ("", node):  # empty: it has not said yet whose it is
            _refuse(path, node, pid, owner)
    except OSError:
        pass
    return None


def check_owner(path: Path, node: str) -> None:
    """Raises ConfigError ``journal_owned`` when a daemon of another node runs on a journal."""
    if _lock_path(path).exists() and (lock := own(path, node)) is not None:
        os.close(lock)


def _lock_path(path: Path) -> Path:
    return path.with_name(path.name + ".owner")


def _refuse(path: Path, node: str, pid: str, owner: str) -> NoReturn:
    raise ConfigError(
        "journal_owned",
        f"the journal {path} is that of node {owner}, whose daemon runs on it",
        expected=f"a journal of node {node} alone, on a local file system",
        found=f"pid {pid} of {owner}",
        remedy="Give each node a state folder of its own (state_dir of [node], --journal or READMIT_JOURNAL)",
    )
