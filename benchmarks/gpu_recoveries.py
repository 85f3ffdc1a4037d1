"""A whole node on a GPU, `readmit up` with the reference engine, killed and recovered for real; its journal is kept.

The journal is what the node's processes wrote, copied once it is down: real recoveries of a GPU engine for whatever
reads journals.

With ``--slots 2`` a second engine stands by, on another GPU where there is one, with a copy of its own there.

    python benchmarks/gpu_recoveries.py --journal OUT.sqlite3 [--json OUT] [--kills 3] [--slots 2] [--device cpu]
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
"""
SLOT = """
[[slot]]
name = "{name}"
url = "http://127.0.0.1:{port}"
model = "{folder}/model"
command = {command}
"""


def measure(device: str, kills: int, slots: int, journal: Path) -> dict[str, Any]:
    """Start a node, kill its engine ``kills`` times, then once more with nothing resident; what the drills said.

    With more than one slot, kill the one that serves as often: another takes over.
    """
    with tempfile.TemporaryDirectory(prefix="readmit-") as name:
        folder = Path(name)
        found = call(serving.make_checkpoint, folder / "model", 2, False, torch.device(device))
        gate, gpus = free_port(), max(torch.cuda.device_count(), 1)
        text = NODE.format(folder=folder, metrics=free_port(), gate=gate)
        for number in range(slots):
            where = f"{device}:{number % gpus}" if device == "cuda" else device
            words = [sys.executable, "-m", "readmit.engine", "{model}", "--port", "{port}", "--weight-cache", "client"]
            slot = {"name": "abcdefgh"[number], "port": free_port(), "command": json.dumps([*words, "--device", where])}
            text += SLOT.format(folder=folder, **slot)
        (folder / "readmit.toml").write_text(text)
        keeper = subprocess.Popen([sys.executable, "-m", "readmit.cli", "up"], cwd=folder, stdin=subprocess.DEVNULL)
        try:
            wait_until_ready(gate, slots)
            if slots > 1:
                found["takeovers"] = drill(folder, "--path", "standby", "--kills", str(kills))
                wait_until_ready(gate, slots)
            found["hits"] = drill(folder, "--slot", "a", "--kills", str(kills))
            found["misses"] = drill(folder, "--slot", "a", "--path", "miss")
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


def wait_until_ready(gate: int, slots: int, limit_s: float = 180.0) -> None:
    """Return once every slot is ready."""
    deadline, ready = time.monotonic() + limit_s, 0
    while ready < slots:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{gate}/api/status") as answer:
            ready = sum(slot["state"] == "ready" for slot in json.load(answer)["slots"])
        if time.monotonic() > deadline:
            raise TimeoutError(f"{ready} of {slots} slots were ready within {limit_s:g} s")
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
    parser.add_argument("--slots", type=int, default=1)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    recoveries = measure(options.device, options.kills, options.slots, options.journal)
    found = {"machine": describe_machine(options.device), "recoveries": recoveries}
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
