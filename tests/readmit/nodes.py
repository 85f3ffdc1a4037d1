"""Real nodes for the tests of the command line."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from weightcache.errors import ConfigError
from weightcache.keeper.control import ask
from weightcache.keeper.state import read
from weightcache.process import Process

T = TypeVar("T")
P = TypeVar("P", bound="Place")
PATIENCE_S = 240.0


def wait_for(condition: Callable[[], T], what: str) -> T:
    """Poll until a condition is true; fails after a generous while."""
    deadline = time.monotonic() + PATIENCE_S
    while not (result := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {PATIENCE_S:g} s until {what}")
        time.sleep(0.02)
    return result


class Place:
    """Runtime and state folders of their own, and the ``readmit`` commands run on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runtime_dir = folder / "r"
        self.state_dir = folder / "s"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("READMIT")},
            "READMIT_RUNTIME": str(self.runtime_dir),
            "READMIT_STATE": str(self.state_dir),
        }
        self.processes: list[subprocess.Popen[str]] = []
        self.prefix: list[str] = []
        """Words before the command of `start`."""

    def readmit(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            [sys.executable, "-m", "readmit.cli", *words],
            cwd=self.folder,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start a command that goes on."""
        process = subprocess.Popen(
            [*self.prefix, sys.executable, "-m", "readmit.cli", *words],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def end(self, process: subprocess.Popen[str], number: int = signal.SIGTERM) -> tuple[int, str, str]:
        """Send a signal; returns the exit status and both outputs."""
        process.send_signal(number)
        output, errors = process.communicate(timeout=PATIENCE_S)
        return process.returncode, output, errors

    def children(self) -> dict[str, dict[str, Any]]:
        """What the keeper says of its children; empty while none answers."""
        try:
            return {child["name"]: child for child in ask(self.runtime_dir, {"status": True})["children"]}
        except ConfigError:
            return {}

    def running(self, *names: str) -> dict[str, dict[str, Any]]:
        """The children, once these run."""
        return wait_for(
            lambda: (now := self.children()) and all(now.get(it, {}).get("state") == "running" for it in names) and now,
            f"{', '.join(names)} run",
        )

    def left_behind(self) -> Sequence[Path]:
        """What is still in the runtime folder."""
        return sorted(self.runtime_dir.rglob("*")) if self.runtime_dir.exists() else []


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def place(kind: type[P] = Place) -> Iterator[P]:  # type: ignore[assignment]
    """A place, and the end of whatever still runs there afterwards."""
    # Not tmp_path: a socket's path has 107 bytes.
    here = kind(Path(tempfile.mkdtemp(prefix="readmit-")))
    try:
        yield here
    finally:
        for process in here.processes:
            if process.poll() is None:
                process.kill()
            process.communicate()
        for record in read(here.runtime_dir)[1]:
            child = Process.open(record.pid, record.start_ticks) if record.pid else None
            if child is not None:
                child.send_signal(signal.SIGKILL)
                child.close()
        shutil.rmtree(here.folder)
