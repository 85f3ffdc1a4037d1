"""Real keepers with real children, which the tests kill."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from weightcache.episodes import Replay
from weightcache.errors import ConfigError
from weightcache.journal import Context, Event, Journal
from weightcache.keeper.control import ask
from weightcache.keeper.spec import keeper_command
from weightcache.keeper.state import read

T = TypeVar("T")
PATIENCE_S = 60.0

CHILD = Path(__file__).with_name("child.py")


def wait_for(condition: Callable[[], T], what: str = "") -> T:
    """Poll until a condition is true; fails after a generous while."""
    deadline = time.monotonic() + PATIENCE_S
    while not (result := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(what or "the condition never came true")
        time.sleep(0.01)
    return result


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Node:
    """One runtime folder and the keepers that look after it in turn."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runtime_dir = folder / "r"
        self.state_dir = folder / "s"
        self.reports = folder / "reports"
        self.reports.mkdir()
        self.children: list[dict[str, Any]] = []
        self.options: dict[str, Any] = {}
        self.popen: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.keepers: list[subprocess.Popen[str]] = []
        self.journal = Journal(self.state_dir / "journal.sqlite3", Context("n"))

    def add(self, name: str, *words: str, role: str = "engine", **options: Any) -> None:
        """Add a child that runs the test's program with some words."""
        argv = [sys.executable, str(CHILD), str(self.reports), *words]
        self.children.append({"name": name, "role": role, "argv": argv, **options})

    def spec(self) -> Path:
        path = self.folder / "spec.json"
        data = {
            "node": "n",
            "runtime_dir": str(self.runtime_dir),
            "state_dir": str(self.state_dir),
            "journal": str(self.state_dir / "journal.sqlite3"),
            "children": self.children,
            **self.options,
        }
        path.write_text(json.dumps(data))
        return path

    def launch(self) -> subprocess.Popen[str]:
        """Start a keeper, without waiting for anything."""
        keeper = subprocess.Popen(keeper_command(self.spec()), text=True, **self.popen)
        self.keepers.append(keeper)
        return keeper

    def start(self) -> subprocess.Popen[str]:
        """Start a keeper and wait until it answers."""
        keeper = self.launch()
        wait_for(lambda: self.state() and self.state()["pid"] == keeper.pid, "the keeper answers")
        return keeper

    def state(self) -> dict[str, Any]:
        """The keeper's status, empty while none answers."""
        try:
            return ask(self.runtime_dir, {"status": True})
        except ConfigError:  # not there yet, or not any more
            return {}

    def child(self, name: str) -> dict[str, Any]:
        children = {child["name"]: child for child in self.state().get("children", ())}
        return children.get(name, {})

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        return ask(self.runtime_dir, request)

    def order(self, name: str, cause: str) -> dict[str, Any]:
        """Have a child restarted."""
        return self.ask({"restart": name, "cause": cause})

    def refusal(self, name: str, cause: str) -> str:
        """Why the keeper does not restart a child."""
        try:
            self.order(name, cause)
        except ConfigError as error:
            return str(error)
        raise AssertionError(f"{name} is restarted")

    def all_reports(self) -> list[dict[str, Any]]:
        """What all children have reported so far."""
        return [json.loads(path.read_text()) for path in sorted(self.reports.glob("[a-z]-*.json"))]

    def ready_pid(self, name: str, *, after: int = 0) -> int:
        """The pid of a child that is ready, once it is another process than ``after``."""

        def pid() -> int:
            child = self.child(name)
            return child["pid"] if child.get("ready") and child["pid"] != after else 0

        return wait_for(pid, f"{name} is ready")

    def report(self, word: str, count: int = 1) -> dict[str, Any]:
        """The ``count``-th report of children with this word, once it is there."""
        path = self.reports / f"{word}-{count}.json"
        return wait_for(lambda: path.exists() and json.loads(path.read_text() or "null"), f"report {path.name}")

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def stop(self, keeper: subprocess.Popen[str]) -> tuple[int, str]:
        """End a keeper by SIGTERM; returns its exit status and what it said."""
        keeper.terminate()
        _, said = keeper.communicate(timeout=PATIENCE_S)
        return keeper.returncode, said

    def events(self, clause: str = "ORDER BY id", *values: object) -> list[Event]:
        return self.journal.query(clause, *values)

    def processes(self, name: str) -> list[tuple[int, int]]:
        """The engines' processes that were ``spawned`` or ``exited`` by the journal's word."""
        events = self.events("WHERE kind = 'process' AND name = ? AND slot IS NOT NULL ORDER BY id", name)
        return [(event.attributes["pid"], event.attributes["start_ticks"]) for event in events]

    def replay(self) -> Replay:
        replay = Replay()
        for event in self.events():
            replay.feed(event)
        return replay

    def close(self) -> None:
        for keeper in self.keepers:
            if keeper.poll() is None:
                keeper.kill()
            keeper.communicate()
        for record in read(self.runtime_dir)[1] if self.runtime_dir.exists() else ():
            if record.pid is not None and alive(record.pid):
                self.kill(record.pid)
        self.journal.close()
        shutil.rmtree(self.folder)
