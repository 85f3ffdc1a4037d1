"""A real node that records: keeper, daemon, gate, and `ranked_engine` in its slots."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.readmit.gate.harness import probe_file
from tests.readmit.nodes import Place, free_port, wait_for

from weightcache.episodes import Episode

ENGINE = Path(__file__).with_name("ranked_engine.py")
ROOT = Path(__file__).parents[2]


class Lab(Place):
    """One node; `configure` it, then `up`."""

    def configure(
        self, *slots: str, node: str = "lab", limit: int = 5, engine: Sequence[str] = (), model: str = "tiny"
    ) -> None:
        """Write the node's file.

        Args:
            slots: their names.
            node: its name.
            limit: of attempts.
            engine: a command other than that of `ENGINE`, as in ``readmit.toml``,
            model: and its model.
        """
        self.slots = slots
        self.gate_port, self.metrics_port = free_port(), free_port()
        self.ports = {slot: free_port() for slot in slots}
        for slot in slots:
            self.tell(slot, ranks=1, mode="client", answer=" Paris")
        probe_file(self.folder / "probes.json", model="tiny")
        lines = [
            "[node]",
            f'name = "{node}"',
            f'runtime_dir = "{self.runtime_dir}"',
            f'state_dir = "{self.state_dir}"',
            "[cache]",
            f'metrics = "127.0.0.1:{self.metrics_port}"',
            "[gate]",
            f'listen = "127.0.0.1:{self.gate_port}"',
            'probes = "probes.json"',
            "verify_interval_s = 3.0",
            "hang_limit_s = 5.0",
            "probe_limit_s = 3.0",
            "drain_notice_s = 0.1",
        ]
        for slot, port in self.ports.items():
            ours = [sys.executable, str(ENGINE), str(port), str(self._script(slot))]
            command = list(engine) or ours
            environment = f'{{PYTHONPATH = "{ROOT}", OMP_NUM_THREADS = "1"}}'
            lines += ["[[slot]]", f'name = "{slot}"', f'url = "http://127.0.0.1:{port}"', f'model = "{model}"']
            lines += [f"command = {json.dumps(command)}", f"env = {environment}", f"limit = {limit}"]
            lines += ["backoff_s = [0, 0.2, 0.5]"]
        (self.folder / "readmit.toml").write_text("\n".join(lines) + "\n")

    def tell(self, slot: str, **orders: Any) -> None:
        """Change a slot's script."""
        path = self._script(slot)
        script = json.loads(path.read_text()) if path.exists() else {}
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps({**script, **orders}))
        fresh.replace(path)

    def up(self) -> subprocess.Popen[str]:
        process = self.start("up", "readmit.toml")
        self.running("daemon", "gate", *self.slots)
        return process

    def episodes(self, slot: str | None = None) -> list[Episode]:
        return [episode for episode in self.replay().episodes if slot in (None, episode.slot)]

    def until_closed(self, slot: str, count: int) -> Episode:
        """Wait until a slot's so-manieth episode is closed."""

        def closed() -> Episode | None:
            episodes = [episode for episode in self.episodes(slot) if not episode.is_open]
            return episodes[count - 1] if len(episodes) >= count else None

        found = wait_for(closed, f"episode {count} of slot {slot} is closed")
        assert found is not None
        return found

    def kill(self, *names: str, number: int = signal.SIGKILL) -> None:
        children = self.children()
        for name in names:
            os.kill(children[name]["pid"], number)

    def signal(self, pid: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to a process that may be gone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def fault(self, slot: str, *also: str) -> Episode:
        """Kill a slot's engine, and wait until its recovery has ended."""
        count = len(self.episodes(slot))
        self.kill(slot, *also)
        return self.until_closed(slot, count + 1)

    def ask(self, prompt: str = "The capital of France is") -> int:
        """A request through the gate; returns its status."""
        body = json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": 1}).encode()
        url = f"http://127.0.0.1:{self.gate_port}/v1/completions"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                answer.read()  # whoever goes before the end has gone, for the gate
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return int(error.code)
        except OSError:
            return 0

    def rest(self, seconds: float) -> None:
        """Let time pass in which nothing happens but verifications."""
        time.sleep(seconds)

    def _script(self, slot: str) -> Path:
        return self.folder / f"{slot}.json"
