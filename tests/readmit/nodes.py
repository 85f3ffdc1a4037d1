"""Real nodes for the tests of the command line."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import httpx
from tests.fixtures import http
from tests.readmit.forked import forks, interpreter
from tests.readmit.gate.harness import SCRIPTED, free_port, probe_file

from weightcache.episodes import Replay
from weightcache.errors import ConfigError
from weightcache.journal import Context, Journal
from weightcache.keeper.control import ask
from weightcache.keeper.state import read
from weightcache.process import Process

T = TypeVar("T")
P = TypeVar("P", bound="Place")
PATIENCE_S = 240.0
ROOT = Path(__file__).parents[2]
PYTHONPATH = os.pathsep.join(map(str, (ROOT, ROOT / "daemon", ROOT / "service")))
"""For engines that import the tests' own modules."""


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

    gate: str
    """The gate's address, where there is one."""

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
        self.residents: dict[str, str] = {}
        """What the engines of a keeper that `start` starts are forked from; see `forking`."""

    def readmit(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return forks().readmit(*words, cwd=self.folder, env={**self.environment, **environment})

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start a command that goes on."""
        command = [*self.prefix, sys.executable, "-m", "readmit.cli", *words]
        options: dict[str, Any] = {"cwd": self.folder, "env": self.environment}
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process: subprocess.Popen[str]
        if self.prefix:
            process = subprocess.Popen(command, text=True, **options)
        else:
            process = forks().popen_keeper(command, self.runtime_dir, self.residents, **options)
        self.processes.append(process)
        return process

    def forking(self, module: str, *slots: str) -> list[str]:
        """The beginning of a command for these slots, whose engines are forked from a process that runs for all tests.

        They need ``preload`` in the configuration, with the name of the module.
        """
        self.residents |= {f"{slot}-preload": module for slot in slots}
        return [interpreter(self.folder), "-m", module]

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

    @cached_property
    def journal(self) -> Journal:
        return Journal(self.state_dir / "journal.sqlite3", Context("n"))

    def replay(self) -> Replay:
        """The journal so far."""
        replay = Replay()
        replay.catch_up(self.journal)
        return replay

    def readiness(self) -> httpx.Response | None:
        """What the gate says; None while none answers."""
        try:
            return http.get(f"http://{self.gate}/readyz", timeout=60)
        except httpx.TransportError:
            return None

    def ready(self) -> bool:
        """Whether the gate lets traffic in."""
        answer = self.readiness()
        return answer is not None and answer.status_code == 200

    def left_behind(self) -> Sequence[Path]:
        """What is still in the runtime folder."""
        return sorted(self.runtime_dir.rglob("*")) if self.runtime_dir.exists() else []


class Node(Place):
    """A place with a configuration in it: one slot, with a scripted engine."""

    def configure(self, **changes: str) -> None:
        self.gate, self.metrics, self.engine = (f"127.0.0.1:{free_port()}" for _ in range(3))
        probe_file(self.folder / "probes.json")
        text = f"""
[node]
name = "n"
runtime_dir = "{self.runtime_dir}"
state_dir = "{self.state_dir}"
[cache]
metrics = "{self.metrics}"
[gate]
listen = "{self.gate}"
probes = "probes.json"
verify_interval_s = 0.2
drain_notice_s = 0
[[slot]]
name = "a"
url = "http://{self.engine}"
command = ["python3", "{SCRIPTED}", "{{port}}"]
"""
        for old, new in changes.items():
            text = text.replace(old.replace("__", " "), new)
        (self.folder / "readmit.toml").write_text(text)


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
                os.killpg(child.pid, signal.SIGKILL)  # each leads a session; an engine may be below a shell
                child.close()
        here.journal.close()
        shutil.rmtree(here.folder)
