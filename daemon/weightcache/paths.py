"""Where sockets, state and the journal live, and that nobody else can put theirs in their place.

Standard library only: the keeper and the client loader import this module.
"""

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from weightcache.errors import ConfigError

SOCKET_PATH_MAX: Final = 107
"""Bytes of a socket's path: ``sun_path`` has 108, the last of them the closing zero (unix(7))."""


def runtime_dir(environ: Mapping[str, str] = os.environ, *, create: bool = True) -> Path:
    """The private folder of sockets and keeper state, made if absent (or only named, without ``create``).

    It is ``READMIT_RUNTIME``, else ``readmit`` below ``XDG_RUNTIME_DIR``, else ``/tmp/readmit-UID``.

    Raises:
        ConfigError: ``not_private``, when others own it or can enter it; ``path`` when it cannot be made.
    """
    return private_dir(_runtime_dir(environ)) if create else _runtime_dir(environ)


def state_dir(environ: Mapping[str, str] = os.environ, *, create: bool = True) -> Path:
    """The private folder of journal, spans and engine output, made if absent (or only named, without ``create``).

    It is ``READMIT_STATE``, else ``readmit`` below ``XDG_STATE_HOME``, else ``~/.local/state/readmit``.

    Raises:
        ConfigError: ``not_private``, when others own it or can enter it; ``path`` when it cannot be made.
    """
    return private_dir(_state_dir(environ)) if create else _state_dir(environ)


def socket_path(environ: Mapping[str, str] = os.environ) -> Path:
    """The weight cache's socket: ``WEIGHTCACHE_SOCKET``, else ``cache.sock`` in the runtime folder. Touches no disk.

    Raises:
        ConfigError: ``path_too_long``.
    """
    named = environ.get("WEIGHTCACHE_SOCKET")
    return checked_socket_path(Path(named) if named else _runtime_dir(environ) / "cache.sock")


def journal_path(environ: Mapping[str, str] = os.environ) -> Path:
    """The node's journal: ``READMIT_JOURNAL``, else ``journal.sqlite3`` in the state folder. Touches no disk."""
    named = environ.get("READMIT_JOURNAL")
    return Path(named) if named else _state_dir(environ) / "journal.sqlite3"


def checked_socket_path(path: Path) -> Path:
    """The path, if a Unix socket can be bound to it.

    Raises:
        ConfigError: ``path_too_long``, with the length and the limit in bytes.
    """
    length = len(os.fsencode(path))
    if length > SOCKET_PATH_MAX:
        raise ConfigError(
            "path_too_long",
            f"the path of the socket {path} is too long for the kernel",
            expected=f"at most {SOCKET_PATH_MAX} bytes",
            found=f"{length} bytes",
            remedy="Choose a shorter runtime folder (READMIT_RUNTIME) or socket path (WEIGHTCACHE_SOCKET)",
            path=str(path),
            length=length,
            limit=SOCKET_PATH_MAX,
        )
    return path


def private_dir(path: Path) -> Path:
    """The folder, made with mode 0700 if absent.

    Raises:
        ConfigError: ``not_private``, when others own it or can enter it; ``path`` when it cannot be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        link, folder = path.lstat(), path.stat()
    except OSError as error:
        raise ConfigError(
            "path",
            f"the folder {path} cannot be made: {error.strerror}",
            remedy="Name another one (READMIT_RUNTIME, READMIT_STATE) or let this user write there",
            path=str(path),
        ) from error
    # In a shared place such as /tmp somebody else can make the folder, or a link in its place, before we do.
    owners = {link.st_uid, folder.st_uid}
    if owners != {os.geteuid()}:
        raise ConfigError(
            "not_private",
            f"the folder {path} belongs to another user",
            expected=f"owner uid {os.geteuid()}",
            found=f"uid {min(owners - {os.geteuid()})}",
            remedy="Name another folder (READMIT_RUNTIME, READMIT_STATE); do not trust what lies in this one",
            path=str(path),
        )
    mode = stat.S_IMODE(folder.st_mode)
    if mode & 0o077:
        raise ConfigError(
            "not_private",
            f"other users can enter the folder {path}",
            expected="mode 0700",
            found=f"mode {mode:04o}",
            remedy=f"Run chmod 700 {path}, or name another folder (READMIT_RUNTIME, READMIT_STATE)",
            path=str(path),
        )
    return path


def _runtime_dir(environ: Mapping[str, str]) -> Path:
    if named := environ.get("READMIT_RUNTIME"):
        return Path(named)
    if session := environ.get("XDG_RUNTIME_DIR"):
        return Path(session) / "readmit"
    return Path(f"/tmp/readmit-{os.geteuid()}")


def _state_dir(environ: Mapping[str, str]) -> Path:
    if named := environ.get("READMIT_STATE"):
        return Path(named)
    home = environ.get("XDG_STATE_HOME")
    return (Path(home) if home else Path.home() / ".local" / "state") / "readmit"
