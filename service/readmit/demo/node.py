"""A node under the demo's control: ``readmit up`` in a process group of its own, and questions to it."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from readmit.daemon import ask_daemon
from weightcache import messages
from weightcache.errors import CacheMiss
from weightcache.journal import Journal
from weightcache.keeper.control import ask

READY_LIMIT_S: Final = 600.0
"""Also a machine that is busy with ten other things gets there."""
MAX_IN_FLIGHT: Final = 8
"""Where the steady client asks more than this machine answers, it is told so at once instead of queueing."""


class Node:
    """One node: folders, ports, configuration and the keeper's process.

    Args:
        folder: everything it keeps goes below it.
        name: of its folders.
        model: the checkpoint that its engine serves.
        probes: the golden answers.
        cache_socket: use a weight cache that already runs, instead of one of its own.
        slots: their names; the engine of the first serves, the others stand by.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        model: Path,
        probes: Path,
        cache_socket: Path | None = None,
        slots: Sequence[str] = ("a",),
    ) -> None:
        self.runtime, self.state = folder / f"{name}-run", folder / f"{name}-state"
        for each in (self.runtime, self.state):
            each.mkdir(mode=0o700, exist_ok=True)
        self.model = model
        self.probes = probes
        self.socket = cache_socket or self.runtime / "cache.sock"
        self._own_cache = cache_socket is None
        self._config = folder / f"{name}.toml"
        self.gate_port, self.metrics_port, *ports = _free_ports(2 + len(slots))
        self._engine_ports = dict(zip(slots, ports, strict=True))
        self._keeper: subprocess.Popen[bytes] | None = None
        self.log = folder / f"{name}.log"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.gate_port}"

    @property
    def metrics_url(self) -> str:
        return f"http://127.0.0.1:{self.metrics_port}/metrics"

    @property
    def spans(self) -> Path:
        return self.state / "spans.jsonl"

    @property
    def keeper_pid(self) -> int:
        assert self._keeper is not None
        return self._keeper.pid

    def journal(self) -> Journal:
        """The node's journal, for reading."""
        return Journal(self.state / "journal.sqlite3")

    def up(self, mode: str) -> None:
        """Start it, its engine in this mode."""
        engine = [sys.executable, "-m", "readmit.cli", "engine", "{model}", "--host", "{host}", "--port", "{port}"]
        engine += ["--weight-cache", mode, "--socket", str(self.socket)]
        lines = [
            "[node]",
            'name = "demo"',
            f"runtime_dir = {json.dumps(str(self.runtime))}",
            f"state_dir = {json.dumps(str(self.state))}",
            "[cache]",
            f"enabled = {json.dumps(self._own_cache)}",
            f'metrics = "127.0.0.1:{self.metrics_port}"',
            "[gate]",
            f'listen = "127.0.0.1:{self.gate_port}"',
            f"probes = {json.dumps(str(self.probes))}",
            f"max_in_flight = {MAX_IN_FLIGHT}",
            "probe_limit_s = 60",
            "hang_limit_s = 60",
        ]
        for slot, port in self._engine_ports.items():
            lines += [
                "[[slot]]",
                f"name = {json.dumps(slot)}",
                f"model = {json.dumps(str(self.model))}",
                f'url = "http://127.0.0.1:{port}"',
                f"command = {json.dumps(engine)}",
            ]
        self._config.write_text("\n".join(lines) + "\n")
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "readmit.cli", "up", str(self._config)]
            self._keeper = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def down(self) -> None:
        """End it in good order."""
        if self._keeper is not None and self._keeper.poll() is None:
            self._keeper.terminate()
            self._keeper.wait(60)

    def detach(self) -> str:
        """Leave it running; returns the command that ends it."""
        return f"kill {self.keeper_pid}"

    def pid(self, child: str) -> int:
        """The process of a child: ``daemon``, ``gate`` or a slot's name."""
        for each in ask(self.runtime, {"status": True})["children"]:
            if each["name"] == child and each["pid"]:
                return int(each["pid"])
        raise RuntimeError(f"{child} does not run; see {self.log}")

    def kill(self, *children: str) -> None:
        """SIGKILL, all at once."""
        pids = [self.pid(child) for child in children]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def get(self, path: str) -> tuple[int, dict[str, Any]]:
        """A GET on the gate: status and JSON body; (0, {}) where nobody listens."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=5) as reply:
                return reply.status, _json(reply.read())
        except urllib.error.HTTPError as error:
            return error.code, _json(error.read())
        except OSError:
            return 0, {}

    def complete(self, prompt: str, max_tokens: int) -> str:
        """An answer through the gate."""
        body = {"model": self.model.name, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        deadline = time.monotonic() + READY_LIMIT_S
        while True:
            try:
                with urllib.request.urlopen(request, timeout=60) as reply:
                    return str(json.load(reply)["choices"][0]["text"])
            except urllib.error.HTTPError as error:
                if error.code != HTTPStatus.TOO_MANY_REQUESTS or time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def wait_ready(self, after: str | None) -> Iterator[dict[str, Any]]:
        """Yield what the gate says until an episode other than ``after`` has ended ready.

        Raises:
            TimeoutError: it does not get there.
        """
        deadline = time.monotonic() + READY_LIMIT_S
        while time.monotonic() < deadline:
            status, body = self.get("/readyz")
            last = self.last_episode()
            if status == 200 and last not in (None, after):
                return
            yield body
            time.sleep(0.1)
        raise TimeoutError(f"the engine was not ready within {READY_LIMIT_S} s; see {self.log}")

    def last_episode(self) -> str | None:
        """The id of the newest episode that has ended, None before the first."""
        with contextlib.closing(self.journal()) as journal:
            closed = journal.query("WHERE kind = 'episode_close' ORDER BY id DESC LIMIT 1")
        return closed[0].episode if closed else None

    def wait_all_ready(self) -> dict[str, Any]:
        """Wait until every slot is ready and measured, and no recovery is open; returns what the gate says then.

        Raises:
            TimeoutError: they do not get there.
        """
        deadline = time.monotonic() + READY_LIMIT_S
        while time.monotonic() < deadline:
            status, report = self.get("/api/status")
            if (
                status == 200
                and not report["open"]
                and all(slot["state"] == "ready" and slot["cost"] for slot in report["slots"])
            ):
                return report
            time.sleep(0.1)
        raise TimeoutError(f"not every slot was ready within {READY_LIMIT_S} s; see {self.log}")

    def cache_status(self) -> dict[str, Any]:
        """What the weight cache daemon says of itself."""
        return ask_daemon(self.socket, messages.Status())

    def wait_served(self, not_by: int) -> None:
        """Wait until another daemon process than ``not_by`` answers with the weights in hand."""
        deadline = time.monotonic() + READY_LIMIT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(CacheMiss):  # the connection fell into the old daemon's death
                facts = self.cache_status()
                if facts["pid"] != not_by and facts["generations"]:
                    return
            time.sleep(0.005)
        raise TimeoutError(f"no daemon came back within {READY_LIMIT_S} s; see {self.log}")


def _free_ports(count: int) -> list[int]:
    # Kept open together, so that no two are the same.
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _json(content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
