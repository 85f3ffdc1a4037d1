"""The keeper goes on as another program in the same process, with children, descriptors and state; nobody notices."""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.weightcache.keeper.harness import PATIENCE_S, Node, alive, wait_for
from tests.weightcache.keeper.test_keeper_descriptors import STORED, stored

import weightcache
from weightcache.errors import ConfigError

PACKAGE = Path(weightcache.__file__).parent
BREAKAGES: dict[str, Callable[[Path], object]] = {
    "RuntimeError: broken release": lambda package: (package / "keeper" / "keeper.py").write_text(
        "raise RuntimeError('broken release')"
    ),
    "SyntaxError": lambda package: (package / "process.py").write_text("def def"),
    "No module named weightcache.keeper": lambda package: shutil.rmtree(package / "keeper"),
    "reads format 99": lambda package: change(package / "keeper" / "handover.py", "FORMAT: Final = 1", "FORMAT = 99"),
}


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


@pytest.fixture
def release(node: Node) -> Path:
    """An installed release of the node's own, which can be replaced."""
    package = node.folder / "installed" / "weightcache"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    # Without bytecode: two releases of one second and one size would be taken for each other.
    node.popen["env"] = {**os.environ, "PYTHONPATH": str(package.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    return package


def reexec(node: Node) -> dict[str, Any]:
    return node.ask({"reexec": True})


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def inheritable(pid: int) -> list[str]:
    """A process's descriptors that its children would inherit, but for its standard streams."""
    close_on_exec = 0o2000000
    found = []
    for info in Path(f"/proc/{pid}/fdinfo").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile, such as whoever asked last
            flags = next(line.split()[1] for line in info.read_text().splitlines() if line.startswith("flags:"))
            if int(info.name) > 2 and not int(flags, 8) & close_on_exec:
                found.append(os.readlink(f"/proc/{pid}/fd/{info.name}"))
    return found


def test_another_release_takes_over_everything(node: Node, release: Path) -> None:
    node.add("daemon", "d", "stores", role="daemon")
    node.add("a", "a", "worker")
    node.add("gate", "g", role="gate")
    node.options["closes_episodes"] = True
    keeper = node.start()
    wait_for(lambda: stored(node) == 4 and all(child["ready"] for child in node.state()["children"]))
    before = node.state()
    held = descriptors(keeper.pid)
    change(release / "version.py", before["release"], "99.0")
    answer = reexec(node)
    assert answer == {"ok": True, "pid": keeper.pid, "release": "99.0", "previous": before["release"]}
    after = node.state()
    assert (after["pid"], after["release"]) == (keeper.pid, "99.0")
    moving = ("uptime_s",)
    for one, other in zip(before["children"], after["children"], strict=True):
        assert {**one, **dict.fromkeys(moving)} == {**other, **dict.fromkeys(moving)}
    wait_for(lambda: descriptors(keeper.pid) == held, "nothing leaks through")
    assert len(node.all_reports()) == 3, "nobody was started again"

    for turn in (2, 3):
        node.kill(node.child("daemon")["pid"])
        assert node.report("d", turn)["handed"] == STORED
        assert node.report("d", turn)["open"][:7] == [0, 1, 2, 3, 4, 5, 6]
        reexec(node)
    worker = node.report("a")["worker"]
    node.kill(node.child("a")["pid"])
    node.report("a", 2)
    assert not alive(worker)
    (died,) = node.events("WHERE kind = 'process' AND name = 'exited' AND slot = 'a'")
    assert died.attributes["signal"] == signal.SIGKILL, "its exit status is still this keeper's to know"
    wait_for(lambda: node.child("a").get("ready"))
    assert [(it.cause, it.outcome) for it in node.replay().episodes] == [("first_start", "ready"), ("crash", "ready")]
    told = node.events("WHERE kind = 'process' AND name = 'reexecuted' ORDER BY id")
    assert [event.attributes["release"] for event in told] == ["99.0"] * 3
    assert node.events("WHERE name = 'adopted'") == []
    assert node.stop(keeper)[0] == 0
    assert list(node.runtime_dir.iterdir()) == []


@pytest.mark.parametrize("message", BREAKAGES)
def test_a_broken_release_replaces_nobody(node: Node, release: Path, message: str) -> None:
    node.add("daemon", "d", "stores", role="daemon")
    keeper = node.start()
    wait_for(lambda: stored(node) == 4)
    pid = node.child("daemon")["pid"]
    BREAKAGES[message](release)
    with pytest.raises(ConfigError, match="goes on") as refused:
        reexec(node)
    assert message in str(refused.value)
    assert (node.state()["pid"], node.child("daemon")["pid"], stored(node)) == (keeper.pid, pid, 4)
    # The child imports the same broken release; the keeper is what is tested.
    shutil.rmtree(release)
    shutil.copytree(PACKAGE, release, ignore=shutil.ignore_patterns("__pycache__"))
    node.kill(pid)
    assert node.report("d", 2)["handed"] == STORED
    assert reexec(node)["ok"], "and a sound one is taken"


def test_the_next_release_may_have_an_interpreter_of_its_own(node: Node) -> None:
    node.add("a", "a")
    keeper = node.start()
    python = node.folder / "python"
    with pytest.raises(ConfigError, match=r"cannot be tried: .*No such file"):
        node.ask({"reexec": True, "python": str(python)})
    assert node.state()["pid"] == keeper.pid
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"')
    python.chmod(0o755)
    assert node.ask({"reexec": True, "python": str(python)})["pid"] == keeper.pid
    assert node.child("a")["starts"] == 1
    # One that is gone after its trial, before it is executed.
    python.write_text(f'#!/bin/sh\nrm "$0"; exec {sys.executable} "$@"')
    with pytest.raises(ConfigError, match=r"cannot be executed: .*No such file"):
        node.ask({"reexec": True, "python": str(python)})
    node.kill(node.child("a")["pid"])
    node.report("a", 2)
    assert all(event.attributes["signal"] for event in node.events("WHERE slot = 'a' AND name = 'exited'"))


def test_another_spec_counts_from_then_on(node: Node) -> None:
    for name in "ab":
        node.add(name, name)
    node.add("d", "d", "crash", backoff_s=[1000])
    node.add("e", "e", "bad-settings")
    keeper = node.start()
    wait_for(lambda: node.child("d").get("state") == "waiting" and node.child("e").get("state") == "failed")
    pids = {name: node.report(name)["pid"] for name in "ab"}
    node.children = []
    node.add("a", "a", "worker")
    node.add("c", "c")
    node.spec()
    reexec(node)
    node.report("c")
    wait_for(lambda: not alive(pids["b"]))
    assert node.child("a")["pid"] == pids["a"], "what runs goes on"
    node.order("a", "config_change")
    assert node.report("a", 2)["worker"]
    outcomes = {it.slot: it.outcome for it in node.replay().episodes}
    assert outcomes["b"] == outcomes["d"] == outcomes["e"] == "abandoned"
    assert [event.attributes["pid"] for event in node.events("WHERE slot = 'd' AND name = 'spawned'")] == [
        node.report("d")["pid"]
    ], "what waited is not started once more"
    reexec(node)
    assert [child["name"] for child in node.state()["children"]] == ["a", "c"]
    assert not any(inheritable(keeper.pid)), "no child could get what is none of its business"


def test_what_dies_meanwhile_is_found(node: Node) -> None:
    node.add("a", "a")
    node.options["closes_episodes"] = True
    node.start()
    wait_for(lambda: node.child("a").get("ready"))
    pid = node.child("a")["pid"]
    with socket.socket(socket.AF_UNIX) as asker:
        asker.settimeout(PATIENCE_S)
        asker.connect(str(node.runtime_dir / "keeper.sock"))
        asker.sendall(b'{"reexec": true}\n{"sta')
        node.kill(pid)
        with asker.makefile("rb") as lines:
            assert json.loads(lines.readline())["ok"]
            asker.sendall(b'tus": true}\n')
            assert json.loads(lines.readline())["children"], "a request cut in two by it is answered as well"
    node.report("a", 2)
    (died,) = node.events("WHERE kind = 'process' AND name = 'exited' AND slot = 'a'")
    assert (died.attributes["pid"], died.attributes["signal"]) == (pid, signal.SIGKILL)
    assert node.replay().episodes[-1].cause == "crash"


def test_a_pause_goes_on_and_a_given_up_slot_stays_so(node: Node) -> None:
    node.add("a", "a", "crash", backoff_s=[0, 1000], limit=5)
    node.add("b", "b", "bad-settings")
    node.start()
    wait_for(lambda: node.child("a").get("state") == "waiting" and node.child("b").get("state") == "failed")
    before = node.child("a")
    reexec(node)
    after = node.child("a")
    assert (after["state"], after["attempt"], after["starts"]) == ("waiting", 2, 2)
    assert 900 < after["next_start_s"] <= before["next_start_s"]
    assert node.child("b")["state"] == "failed"
    assert [it.outcome for it in node.replay().episodes if it.slot == "b"] == ["abandoned"]
    node.order("b", "config_change")
    node.report("b", 2)


def test_a_slot_that_was_given_up_and_then_taken_out_is_meant_no_more(node: Node) -> None:
    node.add("a", "a")
    node.add("b", "b", "bad-settings")
    node.start()
    wait_for(lambda: node.child("b").get("state") == "failed")
    del node.children[1]
    node.spec()
    reexec(node)
    assert node.child("b") == {}
    (stopped,) = node.events("WHERE kind = 'process' AND name = 'stopped'")
    assert stopped.slot == "b"


def test_who_is_ending_is_waited_for_and_an_end_in_between_wins(node: Node) -> None:
    node.add("a", "a", "stubborn", stop_s=1000)
    keeper = node.start()
    wait_for(lambda: node.child("a").get("ready"))
    pid = node.child("a")["pid"]
    node.ask({"stop": "a"})
    wait_for(lambda: node.child("a")["state"] == "ending")
    with socket.socket(socket.AF_UNIX) as asker:
        asker.settimeout(PATIENCE_S)
        asker.connect(str(node.runtime_dir / "keeper.sock"))
        asker.sendall(b'{"reexec": true}\n')
        with pytest.raises(ConfigError, match="already"):
            wait_for(lambda: reexec(node))
        keeper.terminate()
        node.kill(pid)
        with asker.makefile("rb") as lines:
            assert "stopping" in json.loads(lines.readline())["error"]
    keeper.communicate(timeout=PATIENCE_S)
    assert keeper.returncode == 0
    assert list(node.runtime_dir.iterdir()) == []


def test_an_order_to_end_that_comes_with_it_is_obeyed(node: Node) -> None:
    node.add("a", "a")
    keeper = node.start()
    wait_for(lambda: node.child("a").get("ready"))
    with socket.socket(socket.AF_UNIX) as asker:
        asker.connect(str(node.runtime_dir / "keeper.sock"))
        asker.sendall(b'{"reexec": true}\n')
        keeper.terminate()
        keeper.communicate(timeout=PATIENCE_S)
    assert keeper.returncode == 0
    assert list(node.runtime_dir.iterdir()) == []


def test_it_stays_under_16_mib(node: Node) -> None:
    node.add("daemon", "d", "stores-many", role="daemon")
    node.add("a", "a")
    keeper = node.start()
    wait_for(lambda: stored(node) == 300)
    for _ in range(3):
        reexec(node)
    assert stored(node) == 300
    lines = Path(f"/proc/{keeper.pid}/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    assert int(status["VmRSS"].split()[0]) <= 16 << 10


def test_done_at_any_moment_it_loses_no_child_and_no_exit_status(node: Node) -> None:
    node.add("daemon", "d", "stores", role="daemon")
    node.add("a", "a", "worker", limit=0, backoff_s=[0.01])
    node.add("b", "b", "crash", limit=0, backoff_s=[0.01])
    node.options["closes_episodes"] = True
    keeper = node.start()
    chance = random.Random(11)
    for _ in range(10):
        for child in node.state()["children"]:
            if child["pid"] and chance.random() < 0.5:
                with contextlib.suppress(ProcessLookupError):  # b has ended by itself
                    node.kill(child["pid"])
        time.sleep(chance.uniform(0, 0.02))
        assert reexec(node)["pid"] == keeper.pid

    def is_up(name: str) -> bool:
        child = node.child(name)
        return bool(child["state"] == "running" and child["ready"])

    wait_for(lambda: is_up("a") and is_up("daemon") and stored(node) == 4)
    assert node.stop(keeper)[0] == 0
    spawned, ended = node.processes("spawned"), node.processes("exited")
    assert sorted(spawned) == sorted(ended), "each ends once, and none is forgotten"
    events = node.events("WHERE kind = 'process' AND name = 'exited' AND slot IS NOT NULL")
    assert all("status" not in event.attributes for event in events), "every exit status was this keeper's to take"
    replay = node.replay()
    assert replay.started == replay.closed
    assert all(abs(sum(it.phases_s().values()) - it.total_s) < 1e-6 for it in replay.episodes)
