"""A node with vLLM in its slots, run by ``readmit up``, for tests that kill parts of it."""

import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from weightcache.episodes import Episode, Replay
from weightcache.errors import ConfigError
from weightcache.journal import Journal
from weightcache.keeper.control import ask
from weightcache.process import Stat

T = TypeVar("T")
Answer = tuple[str, tuple[float, ...]]
"""A text, and the log-probabilities of its tokens."""
PATIENCE_S: Final = 600.0
MODULE: Final = "vllm.entrypoints.openai.api_server"
NAME: Final = "model"
PROMPTS: Final = ("The capital of France is", "Water freezes at zero degrees and boils at")
_SEGMENT: Final = re.compile(r" (\d+) +/dev/shm/")
ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # the first request for a log-probability would compile for longer than all the rest
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}


def wait_for(condition: Callable[[], T], what: str) -> T:
    """Poll until a condition is true."""
    deadline = time.monotonic() + PATIENCE_S
    while not (result := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.1)
    return result


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Node:
    """One node.

    Args:
        model: a checkpoint.
        slots: their names.
        mode: how engines use the cache.
        forked: the slots whose restarts are forked; the others import everything anew.
        arguments: further ones of vLLM.
    """

    def __init__(
        self,
        model: Path,
        *,
        slots: str = "a",
        mode: str = "client",
        forked: str = "",
        arguments: tuple[str, ...] = (),
    ) -> None:
        # Not below a test's own folder: a socket's path has 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="engines-"))
        self.ports = {slot: free_port() for slot in slots}
        self.forked = forked
        self._replay = Replay()
        extra = json.dumps({"mode": mode})
        command = [sys.executable, "-m", MODULE, "--model", "{model}", "--served-model-name", NAME, "--host", "{host}"]
        command += ["--port", "{port}", "--max-model-len", "512", "--enforce-eager", "--load-format", "weightcache"]
        command += ["--model-loader-extra-config", extra, *arguments]
        text = [
            f'[node]\nname = "engines"\nruntime_dir = "{self.folder}/r"\nstate_dir = "{self.folder}/s"',
            f'[cache]\nmetrics = "127.0.0.1:{free_port()}"',
            f'[gate]\nlisten = "127.0.0.1:{free_port()}"\nprobes = "probes.json"',
            "hang_limit_s = 300\nprobe_limit_s = 300",
        ]
        for slot, port in self.ports.items():
            text.append(f'[[slot]]\nname = "{slot}"\nmodel = "{model}"\nurl = "http://127.0.0.1:{port}"\nlimit = 0')
            text.append(f"command = {json.dumps(command)}\nbackoff_s = [0]\nstop_s = 60")
            text.append("env = {" + ", ".join(f'{name} = "{value}"' for name, value in ENVIRONMENT.items()) + "}")
            text.append(f'preload = "{MODULE}"' if slot in forked else "")
        (self.folder / "readmit.toml").write_text("\n".join(text))

    def start(self, probes: dict[str, Any]) -> None:
        """Run it until every slot has given the right answers once."""
        (self.folder / "probes.json").write_text(json.dumps(probes))
        command = [sys.executable, "-m", "readmit.cli", "up", str(self.folder / "readmit.toml")]
        with (self.folder / "up.log").open("w") as log:
            self._up = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=_environment())
        wait_for(lambda: len(self.closed()) >= len(self.ports), "first starts")

    def closed(self, slots: str | None = None) -> list[Episode]:
        """Episodes of engines that have ended, in the order of their beginning; takeovers are none."""
        assert self._up.poll() is None, (self.folder / "up.log").read_text()
        wanted = slots or "".join(self.ports)
        return [episode for episode in self._ended() if episode.path != "standby" and episode.slot in wanted]

    def takeovers(self) -> list[Episode]:
        """What a standby took over: from each death of the slot that served to the other's first right answer."""
        return [episode for episode in self._ended() if episode.path == "standby"]

    def _ended(self) -> list[Episode]:
        self._replay.catch_up(Journal(self.folder / "s" / "journal.sqlite3"))
        return [episode for episode in self._replay.episodes if not episode.is_open]

    def started(self, slot: str) -> tuple[str | None, str | None]:
        """How its engine process was started: ``forked``, ``refused`` (so plainly) or None; and why it was refused."""
        journal = Journal(self.folder / "s" / "journal.sqlite3")
        [spawned] = journal.query(
            "WHERE kind = 'process' AND name = 'spawned' AND slot = ? ORDER BY id DESC LIMIT 1", slot
        )
        return spawned.attributes.get("preload"), spawned.attributes.get("preload_reason")

    def pid(self, slot: str = "a") -> int:
        return int(self.children()[slot]["pid"] or 0)

    def children(self) -> dict[str, dict[str, Any]]:
        try:
            return {child["name"]: child for child in ask(self.folder / "r", {"status": True})["children"]}
        except ConfigError:
            return {}

    def wait_for_resident(self, slot: str = "a") -> str:
        """Wait until restarts can be forked; what the resident process says of itself."""

        def status() -> str:
            child = self.children().get(f"{slot}-preload", {})
            return str(child["status"]) if child.get("ready") and child["pid"] else ""

        return wait_for(status, "a resident process")

    def processes(self, slot: str = "a") -> dict[str, list[int]]:
        """The pids of a slot's session by what they are: ``api``, ``core``, ``worker``, ``other``."""
        leader = self.pid(slot)
        [core] = [pid for pid in _children(leader) if _children(pid)] or [0]
        workers = [pid for pid in _children(core) if not _is_tracker(pid)] if core else []
        known = {leader, core, *workers}
        session = [int(pid) for pid in os.listdir("/proc") if pid.isdecimal() and _session(int(pid)) == leader]
        others = [pid for pid in session if pid not in known]
        return {"api": [leader], "core": [core], "worker": workers, "other": others}

    def kill(self, part: str, slot: str = "a") -> tuple[Episode, int, int]:
        """SIGKILL a part of an engine; the episode that follows, and what is left of what was killed then.

        Args:
            part: ``api``, ``core`` or ``worker`` (the last of them).
            slot: whose.

        Returns:
            The episode, once it has ended; how many of the old processes live; how many of their segments are there.
        """
        before, pids = len(self.closed(slot)), self.processes(slot)
        old = {
            pid: stat.start_ticks for group in pids.values() for pid in group if (stat := Stat.read(pid)) is not None
        }
        inodes = {int(inode) for pid in old for inode in _SEGMENT.findall(Path(f"/proc/{pid}/maps").read_text())}
        with os.scandir("/dev/shm") as entries:
            segments = {entry.name for entry in entries if entry.inode() in inodes}
        os.kill(pids[part][-1], signal.SIGKILL)
        wait_for(lambda: len(self.closed(slot)) > before, f"recovery from the death of {part}")
        left = [stat for pid, ticks in old.items() if (stat := Stat.read(pid)) and stat.start_ticks == ticks]
        lives = sum(stat.state not in "ZX" for stat in left)  # what is dead the keeper buries every five seconds
        return self.closed(slot)[before], lives, sum((Path("/dev/shm") / name).exists() for name in segments)

    def release(self, generation: str | None = None) -> None:
        """Have the daemon forget a generation, or all, also ones that are in use."""
        command = [sys.executable, "-m", "readmit.cli", "cache", "release", "--force"]
        command += [generation] if generation else ["--all"]
        command += ["--socket", str(self.folder / "r" / "cache.sock")]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    def answers(self, slot: str) -> list[Answer]:
        """What the engine says to the prompts, and its log-probabilities."""
        return [ask_engine(self.ports[slot], prompt) for prompt in PROMPTS]

    def tokens_per_s(self, slot: str) -> float:
        """How fast it generates."""
        began = time.perf_counter()
        ask_engine(self.ports[slot], PROMPTS[0], 32)
        return 32 / (time.perf_counter() - began)

    def stop(self) -> None:
        self._up.send_signal(signal.SIGTERM)
        self._up.wait(PATIENCE_S)
        shutil.rmtree(self.folder)


def forget_pages(model: Path) -> None:
    """Have the kernel forget a model's weights, as far as nobody maps the files."""
    for shard in model.glob("*.safetensors"):
        with shard.open("rb") as file:
            os.fsync(file.fileno())  # what is not written yet cannot be forgotten
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def observed_start(model: Path, probes: dict[str, Any]) -> Episode:
    """A start of vLLM as it is, without our plug-in, watched by ``readmit run --observe``; its episode."""
    with tempfile.TemporaryDirectory(prefix="observed-") as name:
        folder = Path(name)
        (folder / "probes.json").write_text(json.dumps(probes))
        command = [sys.executable, "-m", "readmit.cli", "run", "--observe", "--gate", f"127.0.0.1:{free_port()}"]
        command += ["--probes", str(folder / "probes.json"), "--", sys.executable, "-m", MODULE, "--model", str(model)]
        command += ["--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(free_port())]
        command += ["--max-model-len", "512", "--enforce-eager"]
        places = {"READMIT_RUNTIME": f"{folder}/r", "READMIT_STATE": f"{folder}/s", "VLLM_PLUGINS": ""}
        with (folder / "run.log").open("w") as log:
            env = {**_environment(), **ENVIRONMENT, **places}
            run = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env)

        def closed() -> list[Episode]:
            assert run.poll() is None, (folder / "run.log").read_text()
            replay = Replay()
            replay.catch_up(Journal(folder / "s" / "journal.sqlite3"))
            return [episode for episode in replay.episodes if not episode.is_open]

        try:
            return wait_for(closed, "an observed start")[0]
        finally:
            run.send_signal(signal.SIGTERM)
            run.wait(PATIENCE_S)


def _environment() -> dict[str, str]:
    # Without it every start would compile this project's modules again, and preparing a restart takes longer.
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def ask_engine(port: int, prompt: str, tokens: int = 8) -> Answer:
    """A greedy answer from an engine, past any gate, and the log-probabilities of its tokens."""
    choice = ask_address(f"127.0.0.1:{port}", prompt, tokens, logprobs=1)
    return choice["text"], tuple(choice["logprobs"]["token_logprobs"])


def ask_address(address: str, prompt: str, tokens: int, **options: Any) -> dict[str, Any]:
    """The first choice of a greedy completion from whoever listens there."""
    body = {"model": NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **options}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"http://{address}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        choice: dict[str, Any] = json.load(response)["choices"][0]
    return choice


def p50(values: list[float]) -> float:
    return round(statistics.median(values), 3)


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _is_tracker(pid: int) -> bool:
    return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()


def _session(pid: int) -> int | None:
    stat = Stat.read(pid)
    return None if stat is None or stat.state in "ZX" else stat.session
