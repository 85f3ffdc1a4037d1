"""A real node: keeper, weight cache daemon, gate, and two engines on the demo model whose restarts are forked."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from gate_parts.processes import FOLDER, Children, free_ports, until
from gate_parts.wire import Wire
from readmit import demo_model
from readmit.probes import Expectation, Probe, ProbeSet
from weightcache import messages
from weightcache.errors import CacheMiss, ConfigError
from weightcache.journal import Event, Journal
from weightcache.keeper.control import ask
from weightcache.protocol import Connection
from weightcache.version import VERSION

PROMPT = "The capital of France is"
RIGHT = " Paris"
VERIFY_S = 2.0
HANG_S = 5.0


class Node:
    """One node in a folder of its own.

    Args:
        folder: short enough for sockets below it.
        children: who its keeper belongs to.
        hang_s: how long an engine may be silent. Short ones take a busy machine for a hanging engine.
        heals: have engines that hang or answer wrongly restarted; otherwise whoever broke them ends them.
    """

    def __init__(self, folder: Path, children: Children, hang_s: float = HANG_S, *, heals: bool = False) -> None:
        self._hang_s, self._heals = hang_s, heals
        self.runtime, self.state = folder / "run", folder / "state"
        self.model = demo_model.prepare()
        gate, metrics, *engines = free_ports(4)
        self.url = f"http://127.0.0.1:{gate}"
        self.engines = dict(zip("ab", (f"http://127.0.0.1:{port}" for port in engines), strict=True))
        probes = folder / "probes.json"
        ProbeSet(self.model.name, (Probe("capital", PROMPT, 1, Expectation(text=RIGHT)),)).save(probes)
        self.config = folder / "readmit.toml"
        self.config.write_text(self._config(gate, metrics, probes))
        self._journal_path = self.state / "journal.sqlite3"
        self.keeper = children.python("-m", "readmit.cli", "up", str(self.config))

    def _config(self, gate: int, metrics: int, probes: Path) -> str:
        lines = [
            "[node]",
            'name = "bench"',
            f"runtime_dir = {json.dumps(str(self.runtime))}",
            f"state_dir = {json.dumps(str(self.state))}",
            "[cache]",
            f'metrics = "127.0.0.1:{metrics}"',
            "[gate]",
            f'listen = "127.0.0.1:{gate}"',
            f"probes = {json.dumps(str(probes))}",
            f"verify_interval_s = {VERIFY_S}",
            f"hang_limit_s = {self._hang_s}",
            f"busy_hang_limit_s = {self._hang_s}",
            "drain_notice_s = 0",
            f"restart_hung = {json.dumps(self._heals)}",
            f"cure_wrong = {json.dumps(self._heals)}",
        ]
        for name, url in self.engines.items():
            module = "gate_parts.engine"
            command = [sys.executable, "-m", module, "{model}", "--host", "{host}", "--port", "{port}"]
            command += ["--weight-cache", "client"]
            env = {"PYTHONPATH": str(FOLDER), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
            lines += [
                "[[slot]]",
                f'name = "{name}"',
                f"model = {json.dumps(str(self.model))}",
                f'url = "{url}"',
                f"command = {json.dumps(command)}",
                f"env = {{ {', '.join(f'{key} = {json.dumps(value)}' for key, value in env.items())} }}",
                f'preload = "{module}"',
                "backoff_s = [0]",
                "limit = 0",
                "stop_s = 2",
            ]
        return "\n".join(lines) + "\n"

    def question(self, max_tokens: int = 1, **more: Any) -> bytes:
        """A request's body."""
        asked = {"model": self.model.name, "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, **more}
        return json.dumps(asked).encode()

    def children(self) -> dict[str, dict[str, Any]]:
        """What the keeper says of its children; empty while it does not answer."""
        try:
            return {child["name"]: child for child in ask(self.runtime, {"status": True})["children"]}
        except ConfigError:
            return {}

    def pid(self, child: str) -> int:
        """A child's process; 0 while it has none."""
        return int(self.children().get(child, {}).get("pid") or 0)

    async def status(self) -> dict[str, Any]:
        """What the gate says of itself; empty while it does not answer."""
        wire = Wire(self.url)
        try:
            found: dict[str, Any] = json.loads((await wire.ask("GET", "/api/status")).body)
        except (OSError, asyncio.IncompleteReadError):
            return {}
        finally:
            wire.close()
        return found

    async def whole(self) -> bool:
        """Whether both slots are ready."""
        slots = (await self.status()).get("slots", [])
        return bool(slots) and all(slot["state"] == "ready" for slot in slots)

    async def until_whole(self) -> None:
        """Wait until both slots are ready."""
        await until(self.whole, "both slots to be ready", 0.02)

    async def until_forked(self) -> None:
        """Wait until restarts can be forked."""

        async def resident() -> bool:
            # What it says of itself once it has imported everything.
            said = [self.children().get(f"{name}-preload", {}).get("status") or "" for name in self.engines]
            return all("modules" in text for text in said)

        await until(resident, "the imports to be done", 0.2)

    async def serving(self) -> tuple[str, int]:
        """The slot that requests go to, and its engine's process."""
        found = await self.status()
        slot = next(slot for slot in found["slots"] if slot["slot"] == found["serving"])
        return slot["slot"], slot["pid"]

    def events(self, where: str, *values: object) -> list[Event]:
        """Events of the journal."""
        journal = Journal(self._journal_path)
        try:
            return journal.query(where, *values)
        finally:
            journal.close()

    def release(self) -> None:
        """Give up the resident weights, so that the next start reads the disk."""
        connection = Connection(self.runtime / "cache.sock", messages.Hello(version=VERSION, node="bench"))
        try:
            reply, _ = connection.ask(messages.Status(), messages.Done)
            for each in reply.data["generations"]:
                connection.ask(messages.Release(generation=each["generation"], force=True), messages.Done)
        except CacheMiss:
            pass
        finally:
            connection.close()
