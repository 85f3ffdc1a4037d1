"""A start by fork from a resident process that has done the imports (`weightcache.preload`), instead of fork and exec.

The resident forks twice, so that the engine becomes a child of the keeper, its nearest living subreaper: exit status,
session and pidfd are the keeper's as after any other start. Whatever is in doubt ends in a refusal, and the keeper
starts the engine plainly. Standard library only.
"""

import array
import json
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from weightcache.keeper.launch import Launch

ANSWER_S: Final = 2.0
"""How long the resident may take to check itself and fork; what takes longer is slower than it is worth."""
REQUEST_BYTES: Final = 1 << 20
PRELOADED: Final = "READMIT_PRELOADED"
"""Set in the environment of engines that were forked."""
_PR_SET_CHILD_SUBREAPER: Final = 36


class Refused(Exception):
    """The resident does not fork, and why."""


def socket_of(runtime_dir: Path, name: str) -> Path:
    """Where the resident of this name listens."""
    return runtime_dir / "keeper" / f"{name}.fork"


def become_subreaper() -> None:
    """Have orphaned descendants become this process's children.

    Raises:
        OSError: the kernel does not know how.
    """
    import ctypes  # not at the top: a MiB that only nodes with a resident process pay

    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def launch_preloaded(
    path: Path, argv: Sequence[str], env: Mapping[str, str], *, cwd: str | None, output: int, open_files: int
) -> Launch:
    """Have the resident fork an engine that waits for `Launch.go`. The arguments are those of `launch.launch`.

    Raises:
        Refused: it is not there, not ready, or not sure of itself.
    """
    ours, theirs = socket.socketpair()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(ANSWER_S)
            connection.connect(str(path))
            request = {"argv": list(argv), "env": dict(env), "cwd": cwd, "open_files": open_files}
            fds = array.array("i", [theirs.fileno(), output])
            connection.sendmsg([json.dumps(request).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
            answer: dict[str, Any] = json.loads(connection.recv(REQUEST_BYTES) or b'{"refused": "it died"}')
    except (FileNotFoundError, ConnectionRefusedError):
        ours.close()
        raise Refused("it has not finished importing") from None
    except (OSError, ValueError) as error:
        ours.close()  # which an engine that was forked all the same takes for our death
        raise Refused(f"it does not answer: {error}") from error
    finally:
        theirs.close()
    if "refused" in answer:
        ours.close()
        raise Refused(answer["refused"])
    return Launch(answer["pid"], ours)
