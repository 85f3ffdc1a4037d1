"""A whole node for the gate's tests: the real keeper, with the gate and engines below it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from tests.fixtures import http
from tests.readmit.forked import forks
from tests.readmit.gate.harness import Child, History, Start, free_port, plainly, until

from readmit.gate import huge_pages
from weightcache.episodes import Episode, Replay
from weightcache.keeper.control import ask

ASK = {"prompt": "The capital of France is", "max_tokens": 2, "temperature": 0}


class Node(Child):
    """A keeper with a gate and engines, and a weight cache where they are to use one.

    Args:
        model: what the engines load.
        golden: the gate's probe file.
        folder: for all of it.
        options: of the gate.
        cached: whether weights outlive their engine.
        slots: their names.
        engine: the module that is the engine; it is forked from a process that has done the imports. Or a script.
    """

    def __init__(
        self,
        model: Path,
        golden: Path,
        folder: Path,
        *options: str,
        cached: bool = False,
        slots: Sequence[str] = ("a",),
        engine: str | Path = "readmit.engine",
    ) -> None:
        self.model = model
        self.runtime_dir = folder / "run"
        self.gate_url = f"http://127.0.0.1:{free_port()}"
        urls = {slot: f"http://127.0.0.1:{free_port()}" for slot in slots}
        journal = folder / "journal.sqlite3"
        gate = [
            *(sys.executable, "-m", "readmit.gate", "--listen", self.gate_url.removeprefix("http://")),
            *(word for slot, url in urls.items() for word in ("--slot", f"{slot}={url}")),
            *("--probes", str(golden), "--runtime-dir", str(self.runtime_dir)),
            *("--verify-interval", "0.5", "--drain-notice", "0", *options),
        ]
        more = {"stop_s": 2.0, **({"preload": "imported"} if isinstance(engine, str) else {})}
        command = [sys.executable, *(["-m", engine] if isinstance(engine, str) else [str(engine)]), str(model)]
        daemon = [sys.executable, "-m", "weightcache.daemon", "--metrics", f"127.0.0.1:{free_port()}"]
        if cached:
            gate += ["--cache-socket", str(self.runtime_dir / "cache.sock")]
            command += ["--weight-cache", "client"]
        spec = folder / "keeper.json"
        children: list[dict[str, Any]] = [
            *([{"name": "daemon", "role": "daemon", "argv": daemon}] if cached else []),
            {"name": "gate", "role": "gate", "argv": gate},
            *(
                {"name": slot, "role": "engine", "argv": [*command, "--port", url.rpartition(":")[2]], **more}
                for slot, url in urls.items()
            ),
        ]
        content = {
            "node": "node",
            "runtime_dir": str(self.runtime_dir),
            "state_dir": str(folder / "state"),
            "journal": str(journal),
            "children": children,
        }
        spec.write_text(json.dumps(content))
        for name in ("run", "state"):
            (folder / name).mkdir(mode=0o700)
        start: Start = plainly
        if isinstance(engine, str):
            start = partial(forks().popen_keeper, runtime_dir=self.runtime_dir, residents={"imported": engine})
        super().__init__([sys.executable, "-m", "weightcache.keeper", str(spec)], start=start)
        self.history = History(journal)

    def child(self, name: str) -> dict[str, Any]:
        children = ask(self.runtime_dir, {"status": True})["children"]
        return next(child for child in children if child["name"] == name)

    @property
    def ready(self) -> bool:
        try:
            return http.get(f"{self.gate_url}/readyz", timeout=60).status_code == 200
        except httpx.ConnectError:
            return False

    def until_ready(self) -> None:
        until(lambda: self.ready, f"the gate to open; the keeper says: {self.output}")

    def status(self) -> dict[str, Any]:
        facts: dict[str, Any] = http.get(f"{self.gate_url}/api/status", timeout=60).json()
        return facts

    def slot(self, name: str) -> dict[str, Any]:
        return next(slot for slot in self.status()["slots"] if slot["slot"] == name)

    def until_state(self, name: str, state: str) -> dict[str, Any]:
        def reached() -> dict[str, Any] | None:
            slot = self.slot(name)
            return slot if slot["state"] == state else None

        return until(reached, f"slot {name} to be {state}; the keeper says: {self.output}")

    def metric(self, sample: str) -> float:
        text = http.get(f"{self.gate_url}/metrics", timeout=60).text
        (value,) = (line.rpartition(" ")[2] for line in text.splitlines() if line.startswith(f"{sample} "))
        return float(value)

    def readmit(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command on this node."""
        where = {"READMIT_RUNTIME": str(self.runtime_dir), "READMIT_JOURNAL": str(self.history.path)}
        return forks().readmit(*words, env={**os.environ, **huge_pages.ENVIRONMENT, **where})

    def replay(self) -> Replay:
        replay = Replay()
        replay.catch_up(self.history.journal)
        return replay

    def closed(self, cause: str) -> list[Episode]:
        return [it for it in self.replay().episodes if it.cause == cause and not it.is_open]

    def end(self, number: int = signal.SIGTERM) -> int:
        self.history.journal.close()
        return super().end(signal.SIGTERM)
