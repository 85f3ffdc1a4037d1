"""The starting state of an attempt, found out by a process of its own. Standard library only.

A network file system that has gone away would otherwise stop the keeper, and with it every recovery; and what this
takes to import would stay in the keeper's memory.
"""

import json
import os
import select
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

from weightcache.starting_state import starting_state

LIMIT_S: Final = 0.5
"""A recovery waits no longer than this to know where it starts from; as a rule it takes a twentieth."""
_ANSWER_BYTES: Final = 64 << 10
_killed: Final[list[int]] = []
"""Processes that gave no answer, to be reaped when they have ended."""


def survey(model: Path | None, environ: Mapping[str, str], *, resident: bool | None) -> dict[str, Any] | None:
    """`starting_state`, or None where it cannot be found out in time.

    Raises:
        OSError: there is no room for another process or descriptor.
    """
    _killed[:] = [pid for pid in _killed if os.waitpid(pid, os.WNOHANG)[0] != pid]
    ours, theirs = os.pipe()
    # A signal that arrives in the child must not run the keeper's handlers there.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            _answer(theirs, model, environ, resident)
    except OSError:
        os.close(ours)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(theirs)
    poller = select.poll()
    poller.register(ours, select.POLLIN)
    answer = os.read(ours, _ANSWER_BYTES) if poller.poll(LIMIT_S * 1000) else b""
    os.close(ours)
    os.kill(pid, signal.SIGKILL)
    if not answer:
        _killed.append(pid)  # it may be stuck in the kernel
        return None
    os.waitpid(pid, 0)
    found: dict[str, Any] = json.loads(answer)
    return found


def _answer(channel: int, model: Path | None, environ: Mapping[str, str], resident: bool | None) -> NoReturn:
    try:
        # Whoever is stuck must hold neither the keeper's lock nor anybody's weights.
        os.closerange(3, channel)
        os.closerange(channel + 1, os.sysconf("SC_OPEN_MAX"))
        os.write(channel, json.dumps(starting_state(model, environ, resident=resident)).encode())
    except Exception:  # noqa: BLE001 - whatever it is, it ends here: above are the frames of the keeper
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(0)
