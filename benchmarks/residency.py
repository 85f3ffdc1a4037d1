"""What keeping weights resident costs, and how soon a killed daemon serves again, under the real keeper.

- Memory: resident bytes of the daemon and of the keeper while they hold a generation and a lease.
- Restart: from SIGKILL of the daemon to the first attach that its successor answers. The keeper holds the listening
  socket, so a client that calls meanwhile waits in its backlog: what is timed is one attach, sent after the kill.
- Import: what ``import weightcache.client`` adds to ``import torch``, in fresh processes; also in processor time.
- Telemetry: an attach with the journal and without, in one process, in turn.

    python benchmarks/residency.py [--json OUT] [--kills 10] [--imports 7] [--attaches 40]
"""

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from weightcache import CacheConfig, attach, messages
from weightcache.attachment import Outcome, Progress
from weightcache.errors import CacheMiss
from weightcache.frames import close_all
from weightcache.journal import Context, Journal
from weightcache.keeper.child import QUICK_S
from weightcache.memory import resident_bytes
from weightcache.protocol import Connection
from weightcache.version import VERSION

LIMITS = {
    "daemon_mib": 45.0,
    "keeper_mib": 16.0,
    "restart_p50_s": 0.5,
    "import_added_ms": 20.0,
    "telemetry_added_ms": 2.0,
}
CONFIG = CacheConfig(
    model_path="/models/benchmark",
    model_arch="Benchmark",
    checkpoint_digest="benchmark",
    dtype="bfloat16",
    torch_version=torch.__version__,
    engine="benchmark",
    layout_id="benchmark",
)
PATIENCE_S = 60.0
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
"""Of every process here: an installed package has its bytecode, and nobody compiles it at each start."""


class Model(nn.Module):
    """A few small tensors."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(16):
            values = torch.empty(64, 64, dtype=torch.bfloat16)
            self.register_parameter(f"weight{number}", nn.Parameter(values, requires_grad=False))


class Node:
    """A keeper with a daemon, in folders of its own."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="residency-"))
        self.socket = self.folder / "r" / "cache.sock"
        self.journal = self.folder / "s" / "journal.sqlite3"
        command = [sys.executable, "-m", "weightcache.daemon", "--socket", str(self.socket)]
        command += ["--journal", str(self.journal), "--metrics", "127.0.0.1:0"]
        spec = {
            "node": "benchmark",
            "runtime_dir": str(self.folder / "r"),
            "state_dir": str(self.folder / "s"),
            "journal": str(self.journal),
            "children": [{"name": "daemon", "role": "daemon", "argv": command}],
        }
        (self.folder / "spec.json").write_text(json.dumps(spec))
        os.environ["READMIT_STATE"] = spec["state_dir"]
        started = [sys.executable, "-m", "weightcache.keeper", str(self.folder / "spec.json")]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.keeper = subprocess.Popen(started, env=ENVIRONMENT, **quiet)
        try:
            self._wait_until_it_answers()
        except BaseException:
            self.close()
            raise

    def _wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                self.status()
            except CacheMiss:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
            else:
                return

    def connect(self) -> Connection:
        return Connection(self.socket, messages.Hello(version=VERSION), timeout_s=PATIENCE_S)

    def status(self) -> dict[str, Any]:
        connection = self.connect()
        try:
            return connection.ask(messages.Status(), messages.Done, timeout_s=PATIENCE_S)[0].data
        finally:
            connection.close()

    def served_again_s(self) -> float:
        """Kill the daemon; seconds until an attach is answered."""
        os.kill(self.status()["pid"], signal.SIGKILL)
        began = time.perf_counter()
        while True:
            try:
                connection = self.connect()
                _, received = connection.ask(messages.Attach(CONFIG.to_dict()), messages.Attached)
            except CacheMiss as miss:
                # A connection that the dying daemon had taken: its client would ask again as well.
                if miss.reason not in ("protocol", "daemon_died", "refused"):
                    raise
            else:
                seconds = time.perf_counter() - began
                close_all(received)
                connection.close()
                return seconds

    def attach(self, journal: Journal) -> tuple[float, Outcome]:
        with torch.device("meta"):
            model = Model()

        def load(_: Progress) -> None:
            model.__dict__.update(Model().__dict__)

        began = time.perf_counter()
        outcome = attach(model, CONFIG, load=load, load_bytes=1, socket=self.socket, journal=journal)
        return time.perf_counter() - began, outcome

    def close(self) -> None:
        self.keeper.terminate()
        self.keeper.wait(PATIENCE_S)
        shutil.rmtree(self.folder)


def resident_mib(pid: int) -> float:
    return round(resident_bytes(pid) / 2**20, 1)


def import_s(clock: str, first: str = "pass") -> float:
    """Seconds that importing the client takes in a fresh process, after something else was imported.

    Args:
        clock: ``perf_counter``, or ``process_time``, which other work on the machine does not lengthen.
        first: what is imported before.
    """
    timed = f"import time; {first}; began = time.{clock}(); import weightcache.client; print(time.{clock}() - began)"
    command = [sys.executable, "-c", timed]
    said = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    return float(said.stdout)


def imports(runs: int) -> dict[str, Any]:
    """Milliseconds that the client adds to torch, by the clock and by the processor; the two in turn."""
    clocks: dict[str, list[float]] = {"perf_counter": [], "process_time": []}
    import_s("perf_counter", "import torch")  # writes the bytecode
    for _ in range(runs):
        for clock, seconds in clocks.items():
            seconds.append(import_s(clock, "import torch"))
    return {
        "import_added_ms": milliseconds(clocks["perf_counter"]),
        "import_added_min_ms": round(min(clocks["perf_counter"]) * 1000, 2),
        "import_added_cpu_ms": milliseconds(clocks["process_time"]),
        "import_runs": runs,
    }


def telemetry(node: Node, runs: int) -> dict[str, Any]:
    """Milliseconds of an attach with the journal and without."""
    journals = {"on": Journal(node.journal, Context("benchmark", "a")), "off": Journal(None)}
    seconds: dict[str, list[float]] = {name: [] for name in journals}
    for number in range(runs + 1):
        for name, journal in journals.items():
            took, outcome = node.attach(journal)
            if outcome.path != "hit":
                raise RuntimeError(f"the attach was no hit: {outcome}")
            if number:  # the first of each opens files
                seconds[name].append(took)
    on, off = milliseconds(seconds["on"]), milliseconds(seconds["off"])
    added = round(on - off, 2)
    return {"attach_telemetry_on_ms": on, "attach_telemetry_off_ms": off, "telemetry_added_ms": added, "attaches": runs}


def milliseconds(seconds: Sequence[float]) -> float:
    return round(statistics.median(seconds) * 1000, 2)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    node = Node()
    try:
        _, published = node.attach(Journal(None))
        if published.generation is None:
            raise RuntimeError(f"nothing was published: {published.private_because}")
        found = telemetry(node, options.attaches)
        found |= {"daemon_mib": resident_mib(node.status()["pid"]), "keeper_mib": resident_mib(node.keeper.pid)}
        restarts = []
        for _ in range(options.kills):
            time.sleep(QUICK_S + 1)  # the keeper makes a daemon that dies again and again wait: that is not measured
            restarts.append(node.served_again_s())
        found |= {
            "restart_p50_s": round(statistics.median(restarts), 3),
            "restart_max_s": round(max(restarts), 3),
            "restarts": options.kills,
            "daemon_after_restarts_mib": resident_mib(node.status()["pid"]),
            "keeper_after_restarts_mib": resident_mib(node.keeper.pid),
        }
    finally:
        node.close()
    return found | imports(options.imports)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--imports", type=int, default=7)
    parser.add_argument("--attaches", type=int, default=40)
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    found = measure(options)
    machine = {
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_average_before": round(load_before, 2),
    }
    table = Table("figure", "measured", "promised")
    for name, value in found.items():
        limit = LIMITS.get(name)
        table.add_row(name, str(value), f"at most {limit:g}" if limit is not None else "")
    console = Console()
    console.print(table)
    if load_before > (os.cpu_count() or 1):
        console.print(f"Other work was running (load {load_before:.1f}): times are longer than on an idle machine.")
    if options.json:
        options.json.write_text(json.dumps({**machine, **found, "promised": LIMITS}, indent=1) + "\n")


if __name__ == "__main__":
    main()
