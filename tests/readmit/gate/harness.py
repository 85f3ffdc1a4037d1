"""Real gates and engines for the gate's tests."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
from tests.fixtures import http
from tests.readmit.forked import forks

from readmit.gate import huge_pages
from readmit.gate.process import Engine
from readmit.probes import Expectation, Probe, ProbeSet
from weightcache.episodes import Replay
from weightcache.journal import Context, Event, Journal, boottime_ns, new_episode_id

T = TypeVar("T")
Start = Callable[..., "subprocess.Popen[str]"]
PATIENCE_S = 90.0
SCRIPTED = Path(__file__).with_name("scripted_engine.py")
SCRIPTED_MODULE = "tests.readmit.gate.scripted_engine"


def until(condition: Callable[[], T], what: str, patience_s: float = PATIENCE_S) -> T:
    """Wait until a condition gives something true, and return that."""
    deadline, pause_s = time.monotonic() + patience_s, 0.01
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {patience_s:g} s for {what}"
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.2, 0.1)  # what is waited for needs the processor more than who asks
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def probe_file(path: Path, text: str = " Paris", *, model: str = "scripted", max_tokens: int = 1) -> Path:
    """A probe file with one question."""
    probe = Probe("capital", "The capital of France is", max_tokens, Expectation(text=text))
    ProbeSet(model=model, probes=(probe,)).save(path)
    return path


def plainly(*words: Any, **options: Any) -> "subprocess.Popen[str]":
    """Start a process without sparing it its imports."""
    return subprocess.Popen(*words, text=True, **options)


class Child:
    """A process whose output is kept, killed at the end of its test.

    Args:
        argv: its command.
        env: variables besides our own.
        start: how it is started.
    """

    def __init__(self, argv: list[str], env: Mapping[str, str] | None = None, start: Start = plainly) -> None:
        self.process = start(argv, env={**os.environ, **(env or {})}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.lines: list[str] = []
        assert self.process.stdout is not None
        threading.Thread(target=self.lines.extend, args=[self.process.stdout], daemon=True).start()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def says(self, pattern: str) -> re.Match[str]:
        def found() -> re.Match[str] | None:
            match = re.search(pattern, self.output)
            assert match or self.process.poll() is None, f"it ended with {self.process.returncode}: {self.output}"
            return match

        return until(found, f"{pattern!r} in: {self.output}")

    def end(self, number: int = 9) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)


def forked_gate(argv: list[str], env: Mapping[str, str], **options: Any) -> "subprocess.Popen[str]":
    """Start ``python -m readmit.gate``, forked with its imports done. It is told that it has huge pages already."""
    return forks().popen(argv, env={**env, **huge_pages.ENVIRONMENT}, **options)


def run_gate(*options: str) -> tuple[int, str]:
    """Run a gate that does not start: its exit status, and all that it said."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = forked_gate([sys.executable, "-m", "readmit.gate", *options], os.environ, **streams)
    said, _ = process.communicate(timeout=PATIENCE_S)
    return process.returncode, said


class Gate(Child):
    """``python -m readmit.gate`` on a free port."""

    def __init__(self, *options: str, env: Mapping[str, str] | None = None, start: Start = forked_gate) -> None:
        super().__init__([sys.executable, "-m", "readmit.gate", "--listen", "127.0.0.1:0", *options], env, start)
        self.url = f"http://{self.says(r'listening on (127.0.0.1:[0-9]+)')[1]}"
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE_S, verify=False)

    @property
    def ready(self) -> bool:
        return self.client.get("/readyz").status_code == 200

    def until_ready(self) -> None:
        until(lambda: self.ready, f"the gate to open; it says: {self.output}")

    def slot(self, name: str = "a") -> dict[str, Any]:
        slots = self.client.get("/api/status").json()["slots"]
        return next(slot for slot in slots if slot["slot"] == name)

    def until_state(self, state: str, reason: str | None = None, name: str = "a") -> dict[str, Any]:
        def reached() -> dict[str, Any] | None:
            slot = self.slot(name)
            return slot if slot["state"] == state and reason in (None, slot["reason"]) else None

        return until(reached, f"slot {name} to be {state} {reason}; the gate says: {self.output}")

    def metric(self, sample: str) -> float:
        text = self.client.get("/metrics").text
        values = [line.rpartition(" ")[2] for line in text.splitlines() if line.startswith(f"{sample} ")]
        assert len(values) == 1, f"{sample} is there {len(values)} times"
        return float(values[0])

    def end(self, number: int = 9) -> int:
        self.client.close()
        return super().end(number)


class ScriptedEngine(Child):
    """`scripted_engine` on a port."""

    def __init__(self, port: int | None = None) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        super().__init__([sys.executable, "-m", SCRIPTED_MODULE, str(self.port)], start=forks().popen)
        self.says("scripted engine listens")

    def tell(self, **orders: Any) -> dict[str, Any]:
        """Change what it does; returns what it has seen so far."""
        content = json.dumps(orders)  # httpx itself would refuse NaN
        seen: dict[str, Any] = http.post(f"{self.url}/script", content=content, timeout=PATIENCE_S).json()
        return seen


class History:
    """A journal as the gate's tests write and read it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.journal = Journal(path)

    def events(self, kind: str, slot: str = "a") -> list[Event]:
        return self.journal.query("WHERE kind = ? AND slot = ? ORDER BY id", kind, slot)

    def names(self, kind: str, slot: str = "a") -> list[str]:
        return [event.name for event in self.events(kind, slot)]

    def replayed(self) -> Replay:
        replay = Replay()
        replay.catch_up(self.journal)
        return replay

    def states(self, slot: str = "a") -> list[tuple[str, str]]:
        return [(event.name, event.attributes["reason"]) for event in self.events("slot_state", slot)]

    def spawned(self, pid: int, fault_s: float = 0, slot: str = "a") -> str:
        """Write what a keeper writes when it starts an engine; returns the episode."""
        engine = Engine.of(pid)
        assert engine is not None
        where = Context("node", slot, new_episode_id())
        fault = {"fault_boottime_ns": boottime_ns() - round(fault_s * 1e9), "fault_clock": "exit"}
        self.journal.append("episode_open", "crash", fault, context=where)
        where = where._replace(attempt=1)
        self.journal.append("attempt_start", "", {}, context=where)
        facts = {"process": "engine", "pid": engine.pid, "start_ticks": engine.start_ticks}
        self.journal.append("process", "spawned", facts, context=where)
        assert where.episode is not None
        return where.episode


@contextmanager
def ending(*children: Child) -> Iterator[None]:
    """Kill what is left of these; a failure tells what they said."""
    try:
        yield
    except BaseException as error:
        for child in children:
            error.add_note(f"{type(child).__name__} {child.pid}, exit {child.process.poll()}, said:\n{child.output}")
        raise
    finally:
        for child in children:
            child.end()


def sse(text: str) -> list[Any]:
    """The data of an event stream's events."""
    blocks = [block for block in text.split("\n\n") if block]
    datas = ["\n".join(line[6:] for line in block.split("\n") if line.startswith("data: ")) for block in blocks]
    return [data if data == "[DONE]" else json.loads(data) for data in datas]


class ReferenceEngine(Child):
    """``python -m readmit.engine`` on a real model, forked from a process that has done its imports."""

    def __init__(self, model: Path, port: int | None = None) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        argv = [sys.executable, "-m", "readmit.engine", str(model), "--port", str(self.port)]
        super().__init__(argv, start=forks().popen)

    def until_serving(self) -> "ReferenceEngine":
        self.says(r"serving on")
        return self
