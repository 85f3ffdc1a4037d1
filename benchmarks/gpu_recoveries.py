"""A whole node on a GPU, `readmit up` with the reference engine, killed and recovered for real; its journal is kept.

The journal is what the node's processes wrote, copied once it is down: real recoveries of a GPU engine for whatever
reads journals.

    python benchmarks/gpu_recoveries.py --journal OUT.sqlite3 [--json OUT] [--kills 3] [--device cpu]
"""

import argparse
import contextlib
import json
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import torch
from gpu_parts import serving
from gpu_parts.machine import describe_machine
from gpu_parts.processes import call

NODE = """
[node]
name = "gpu"
runtime_dir = "{folder}/run"
state_dir = "{folder}/state"
[cache]
metrics = "127.0.0.1:{metrics}"
[gate]
listen = "127.0.0.1:{gate}"
unverified_ok = true
[[slot]]
name = "a"
url = "http://127.0.0.1:{engine}"
model = "{folder}/model"
command = [{command}]
"""


def measure(device: str, kills: int, journal: Path) -> dict[str, Any]:
    """Start a node, kill its engine ``kills`` times, then once more with nothing resident; what the drills said."""
    with tempfile.TemporaryDirectory(prefix="readmit-") as name:
        folder = Path(name)
        found = call(serving.make_checkpoint, folder / "model", 2, False, torch.device(device))
        gate = free_port()
        words = [sys.executable, "-m", "readmit.engine", "{model}", "--port", "{port}", "--weight-cache", "client"]
        command = ", ".join(json.dumps(word) for word in [*words, "--device", device])
        ports = {"gate": gate, "metrics": free_port(), "engine": free_port()}
        (folder / "readmit.toml").write_text(NODE.format(folder=folder, command=command, **ports))
        keeper = subprocess.Popen([sys.executable, "-m", "readmit.cli", "up"], cwd=folder, stdin=subprocess.DEVNULL)
        try:
            wait_until_ready(gate)
            found["hits"] = drill(folder, "--kills", str(kills))
            found["misses"] = drill(folder, "--path", "miss")
        finally:
            keeper.terminate()
            keeper.wait(60)
            with contextlib.closing(sqlite3.connect(folder / "state" / "journal.sqlite3")) as source:
                source.execute("VACUUM INTO ?", (str(journal),))
    return found


def drill(folder: Path, *options: str) -> dict[str, Any]:
    """One drill's report."""
    command = [sys.executable, "-m", "readmit.cli", "drill", "--json", *options]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=False)
    report: dict[str, Any] = json.loads(done.stdout)
    if done.returncode:
        raise RuntimeError(f"a recovery failed or took another path: {report}")
    return report


def wait_until_ready(gate: int, limit_s: float = 180.0) -> None:
    """Return once the gate lets traffic in."""
    deadline = time.monotonic() + limit_s
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{gate}/readyz", timeout=5):
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"no traffic was let in within {limit_s:g} s")
        time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--device", choices=("cuda:0", "cpu"), default="cuda:0")
    options = parser.parse_args()
    machine = describe_machine(options.device.partition(":")[0])
    found = {"machine": machine, "recoveries": measure(options.device, options.kills, options.journal)}
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
