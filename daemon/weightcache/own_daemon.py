"""The daemon that an engine in mode ``daemon`` starts where none answers."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from weightcache import messages
from weightcache.errors import CacheMiss
from weightcache.journal import Journal
from weightcache.protocol import Connection
from weightcache.version import VERSION

_START_LIMIT_S: Final = 15.0
_LOSER_LIMIT_S: Final = 5.0
"""How long another daemon, which won the name, may take to answer after ours has ended."""
_PAUSE_S: Final = 0.02
VISIBLE_GPUS: Final = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
"""What an ordinal of a GPU means in a process: it goes with a command that has one."""
_NOT_THE_DAEMONS: Final = (
    *VISIBLE_GPUS,
    *("NOTIFY_SOCKET", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "WATCHDOG_PID", "WATCHDOG_USEC"),
    *("READMIT_SLOT", "READMIT_EPISODE", "READMIT_ATTEMPT", "READMIT_RANK", "TRACEPARENT"),
)
"""What the engine's environment says of the engine: its keeper is not the daemon's."""

_started: Final[list["subprocess.Popen[bytes]"]] = []


def ensure_daemon(socket: Path, journal: Journal, *, detach: bool) -> None:
    """Start a daemon at a socket unless one answers there; it ends with this process unless detached.

    Raises:
        CacheMiss: it does not come up, or whoever listens there is not to be trusted.
    """
    if _answers(socket):
        return
    command = [sys.executable, "-m", "weightcache.daemon", "--socket", str(socket), "--metrics", "127.0.0.1:0"]
    if journal.path is not None:
        command += ["--journal", str(journal.path)]
    if not detach:
        command += ["--until-pid", str(os.getpid())]
    environment = {name: value for name, value in os.environ.items() if name not in _NOT_THE_DAEMONS}
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
    _started.append(process)  # it outlives this call, and perhaps this process
    deadline = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < deadline:
        if _answers(socket):
            return
        if process.poll() is not None:
            deadline = min(deadline, time.monotonic() + _LOSER_LIMIT_S)
        time.sleep(_PAUSE_S)
    if process.returncode is None:
        raise CacheMiss("timeout", f"the daemon started for {socket} does not answer", pid=process.pid)
    raise CacheMiss(
        "no_daemon",
        f"the weight cache daemon started for {socket} ended with status {process.returncode}",
        remedy="Start it by hand to see why: " + " ".join(command),
    )


def _answers(socket: Path) -> bool:
    try:
        Connection(socket, messages.Hello(version=VERSION)).close()
    except CacheMiss as miss:
        if miss.reason in ("no_daemon", "refused"):
            return False
        raise
    return True
