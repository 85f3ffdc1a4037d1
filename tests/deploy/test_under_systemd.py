"""The units, as they are, under a real systemd: it restarts what dies and hands back what it kept."""

import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.deploy.machine import Machine, machine, wait_for, why_not
from tests.deploy.test_systemd import UNITS
from tests.fixtures import http
from tests.readmit.forked import ATTACHING
from tests.readmit.gate.harness import probe_file
from tests.readmit.nodes import PYTHONPATH, free_port

from weightcache.episodes import Replay
from weightcache.journal import Context, Event, Journal
from weightcache.keeper.control import ask

OBSTACLE = why_not()
# What containers may not do, where to look when a test fails, and a watchdog that need not be waited for.
DROP_IN = """
[Service]
OOMScoreAdjust=0
StandardOutput=append:{folder}/services.log
StandardError=inherit
WatchdogSec={watchdog}
"""

pytestmark = pytest.mark.timeout(900)


class Node:
    """The three units on a machine."""

    def __init__(self, folder: Path, machine: Machine, gate: str) -> None:
        self.machine = machine
        self.gate = gate
        self._state = folder / "state" / "readmit"

    def ready(self) -> bool:
        try:
            return http.get(f"http://{self.gate}/readyz", timeout=60).status_code == 200
        except httpx.TransportError:
            return False

    def engine(self) -> dict[str, Any]:
        (child,) = ask(self.machine.root / "run" / "readmit", {"status": True})["children"]
        return dict(child)

    def events(self, clause: str) -> list[Event]:
        return Journal(self._state / "journal.sqlite3", Context("n")).query(clause)

    def paths(self) -> list[str]:
        """The paths of all recoveries, once none is open."""
        replay = Replay()
        replay.catch_up(Journal(self._state / "journal.sqlite3", Context("n")))
        return [] if replay.open_episodes else [it.path for it in replay.episodes]

    def stored(self, unit: str) -> int:
        """How many of a unit's descriptors systemd keeps."""
        return int(self.machine.unit(unit)["NFileDescriptorStore"])

    def readopted(self) -> int:
        """How many daemons have found the weights where their predecessors had left them."""
        events = self.events("WHERE kind = 'process' AND name = 'readopted'")
        return sum(len(event.attributes["generations"]) == 1 == event.attributes["leases"] for event in events)


def prepare(folder: Path) -> str:
    """Lay out a machine's folder; returns the gate's address."""
    (folder / "units").mkdir()
    (folder / "etc").mkdir()
    (folder / "state").mkdir()
    (folder / "systemd.log").touch()
    for unit in UNITS:
        (folder / "units" / unit.name).write_text(unit.read_text())
        more = folder / "units" / f"{unit.name}.d"
        more.mkdir()
        watchdog = 5 if unit.stem == "readmit-cache" else 300
        (more / "test.conf").write_text(DROP_IN.format(folder=folder, watchdog=watchdog))
    gate, engine, metrics = (f"127.0.0.1:{free_port()}" for _ in range(3))
    probe_file(folder / "etc" / "probes.json")
    (folder / "etc" / "cache.env").write_text(f"CACHE_OPTIONS=--metrics {metrics}\n")
    (folder / "etc" / "readmit.toml").write_text(
        f"""
[node]
name = "n"
runtime_dir = "/run/readmit"
state_dir = "/var/lib/readmit"
[cache]
metrics = "{metrics}"
[gate]
listen = "{gate}"
probes = "probes.json"
verify_interval_s = 0.2
drain_notice_s = 0
[[slot]]
name = "a"
url = "http://{engine}"
command = ["{sys.executable}", "-m", "{ATTACHING}", "{{port}}", "client"]
env = {{PYTHONPATH = "{PYTHONPATH}"}}
"""
    )
    return gate


@pytest.fixture
def node() -> Iterator[Node]:
    folder = Path(tempfile.mkdtemp(prefix="systemd-"))
    gate = prepare(folder)
    with machine(folder) as running:
        yield Node(folder, running, gate)


def test_the_units_keep_their_promises(node: Node) -> None:
    machine = node.machine
    machine.systemctl("start", "readmit-cache", "readmit-engines", "readmit-gate")
    wait_for(node.ready, "the gate lets traffic in")
    wait_for(lambda: node.paths() == ["miss"], "the start is closed")
    wait_for(lambda: node.stored("readmit-cache") == 4, "listener, manifest, arena and lease are stored")
    engine = node.engine()["pid"]

    # Whoever logs in knows the configuration, and nothing of what is in the units.
    for question in (("status",), ("report",), ("logs", "a"), ("cache", "status")):
        words = ("/opt/readmit/bin/readmit", *question, "--config", "/etc/readmit/readmit.toml")
        answer = machine.run("env", "--ignore-environment", *words)
        assert answer.returncode == 0, answer.stderr
    assert b"\0HOME=/var/lib/readmit\0" in Path(f"/proc/{host_pid(machine, engine)}/environ").read_bytes()

    # The daemon is killed, is stopped by nobody knows whom, is restarted: always with what systemd kept.
    for number, unfortunate in enumerate(("kill", "hang", "restart"), 1):
        if unfortunate == "restart":
            machine.systemctl("restart", "readmit-cache")
        else:
            machine.systemctl("kill", "--signal", "KILL" if unfortunate == "kill" else "STOP", "readmit-cache")
        wait_for(lambda number=number: node.readopted() == number, f"re-adoption after {unfortunate}")
        wait_for(lambda: machine.unit("readmit-cache")["ActiveState"] == "active", "it is up")
    assert node.engine()["pid"] == engine
    assert node.ready()

    # The engine alone, then engine and daemon at once.
    os.kill(host_pid(machine, node.engine()["pid"]), signal.SIGKILL)
    wait_for(lambda: node.paths() == ["miss", "hit"], "the recovery is closed")
    machine.systemctl("kill", "--signal", "KILL", "readmit-cache")
    os.kill(host_pid(machine, node.engine()["pid"]), signal.SIGKILL)
    wait_for(lambda: node.paths() == ["miss", "hit", "hit"], "the second one too")

    # The gate: whoever calls meanwhile waits in the socket that systemd kept.
    assert node.stored("readmit-gate") == 1
    machine.systemctl("kill", "--signal", "KILL", "readmit-gate")
    assert http.get(f"http://{node.gate}/livez", timeout=240).status_code == 200
    wait_for(node.ready, "the gate lets traffic in again")

    # The engines' keeper: replaced in its process, then killed. The engine runs on.
    engine, keeper = node.engine()["pid"], machine.unit("readmit-engines")["MainPID"]
    machine.systemctl("reload", "readmit-engines")
    assert (node.engine()["pid"], machine.unit("readmit-engines")["MainPID"]) == (engine, keeper)
    machine.systemctl("kill", "--kill-whom=main", "--signal", "KILL", "readmit-engines")
    wait_for(lambda: machine.unit("readmit-engines")["MainPID"] not in ("0", keeper), "another keeper")
    wait_for(lambda: machine.unit("readmit-engines")["ActiveState"] == "active", "it is up")
    assert node.engine()["pid"] == engine
    assert [event.attributes["pid"] for event in node.events("WHERE name = 'adopted'")] == [engine]
    assert node.paths() == ["miss", "hit", "hit"]

    machine.systemctl("stop", "readmit-gate", "readmit-engines", "readmit-cache")
    assert node.stored("readmit-cache") == 0, "and so the weights are released"


def host_pid(machine: Machine, pid: int) -> int:
    """The number here of a process of the machine."""
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            numbers = next(line.split()[1:] for line in status.read_text().splitlines() if line.startswith("NSpid:"))
        except (FileNotFoundError, ProcessLookupError):
            continue
        if len(numbers) > 1 and numbers[-1] == str(pid):
            same = Path(f"/proc/{status.parent.name}/ns/pid").samefile(f"/proc/{machine.pid}/ns/pid")
            if same:
                return int(numbers[0])
    raise LookupError(f"there is no process {pid} in the machine")


if OBSTACLE is not None:  # a container, as a rule
    warnings.warn(f"the units are not run under a real systemd: {OBSTACLE}", stacklevel=1)
    del test_the_units_keep_their_promises
