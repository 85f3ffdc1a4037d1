"""Engines forked from a resident process: whose children they are, what they inherit, and when nobody forks."""

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.weightcache.keeper.harness import Node, alive, wait_for

MODULE = "slow_engine"


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node(Path(tempfile.mkdtemp(prefix="preload-")))
    node.options["closes_episodes"] = True
    (node.folder / "packages").mkdir()
    shutil.copy(Path(__file__).with_name("slow_engine.py"), node.folder / "packages")
    yield node
    node.close()


def add(node: Node, deed: str = "wait", **options: Any) -> None:
    """An engine, and the resident that it is forked from."""
    env = {"PYTHONPATH": str(node.folder / "packages"), **options.pop("env", {})}
    place = {"env": env, "cwd": str(node.folder)}
    argv = [sys.executable, "-m", MODULE, str(node.reports), deed]
    node.children.append({"name": "a", "role": "engine", "argv": argv, "preload": "a-preload", **place, **options})
    path = node.runtime_dir / "keeper" / "a-preload.fork"
    argv = [sys.executable, "-m", "weightcache.preload", "--socket", str(path), MODULE]
    node.children.append({"name": "a-preload", "role": "other", "argv": argv, **place})


def told(node: Node, pid: int) -> dict[str, Any]:
    path = node.reports / f"{pid}.json"
    wait_for(path.exists, f"engine {pid} has told")
    told: dict[str, Any] = json.loads(path.read_text())
    return told


def restart(node: Node, pid: int) -> dict[str, Any]:
    """Kill the engine; what the next one tells."""
    node.kill(pid)
    return told(node, node.ready_pid("a", after=pid))


def how(node: Node) -> list[tuple[str | None, str | None]]:
    """How each engine process was started."""
    events = node.events("WHERE kind = 'process' AND name = 'spawned' AND slot = 'a' ORDER BY id")
    return [(it.attributes.get("preload"), it.attributes.get("preload_reason")) for it in events]


def exits(node: Node) -> list[dict[str, Any]]:
    events = node.events("WHERE kind = 'process' AND name = 'exited' AND slot = 'a' ORDER BY id")
    return [event.attributes for event in events]


def test_a_restart_is_forked_and_is_the_keepers_own_child(node: Node) -> None:
    add(node)
    keeper = node.start()
    first = told(node, node.ready_pid("a"))
    assert first["imported_by"] == first["pid"], "the first start does not wait for a resident"
    resident = node.ready_pid("a-preload")
    assert len(os.listdir(f"/proc/{resident}/task")) == 1
    second = restart(node, first["pid"])
    assert second["imported_by"] == resident
    assert second["parent"] == keeper.pid
    assert second["session"] == second["pid"]
    assert (second["argv"][1:], second["cwd"]) == ([str(node.reports), "wait"], str(node.folder))
    assert (second["tasks"], second["blocked"]) == (1, [])
    assert how(node) == [("refused", "it has not finished importing"), ("forked", None)]
    third = restart(node, second["pid"])
    assert third["imported_by"] == resident
    assert exits(node)[-1]["signal"] == signal.SIGKILL, "the keeper has the wait status of what it did not fork"
    assert node.stop(keeper)[0] == 0
    assert not alive(third["pid"])
    assert not alive(resident)
    assert list(node.runtime_dir.iterdir()) == []


def test_a_forked_engine_has_the_environment_of_its_attempt_and_its_own_output(node: Node) -> None:
    add(node)
    node.start()
    first = told(node, node.ready_pid("a"))
    node.ready_pid("a-preload")
    second = restart(node, first["pid"])
    episode = node.replay().episodes[-1]
    plain, forked = first["environment"], second["environment"]
    assert forked.pop("READMIT_PRELOADED") == "1"
    assert forked["READMIT_EPISODE"] == episode.id
    assert {name for name in plain.keys() | forked.keys() if plain.get(name) != forked.get(name)} == {
        "READMIT_EPISODE",
        "TRACEPARENT",
    }
    output = node.state_dir / "output" / f"a-{episode.id[:8]}-1.log"
    assert output.read_text() == "engine speaks\n"


def test_an_exit_code_reaches_the_keeper(node: Node) -> None:
    add(node, "exit", limit=0, backoff_s=[0.2])
    node.start()
    first = node.ready_pid("a")
    node.ready_pid("a-preload")  # which waits for a quiet moment: there is none while an engine ends again and again
    node.kill(first)
    wait_for(lambda: len(exits(node)) > 1, "a forked engine has ended")
    assert how(node)[1] == ("forked", None)
    assert (exits(node)[1]["exit_code"], exits(node)[1]["signal"]) == (7, None)


def test_a_changed_package_ends_the_resident_and_the_engine_starts_plainly(node: Node) -> None:
    add(node)
    node.start()
    first = node.ready_pid("a")
    resident = node.ready_pid("a-preload")
    source = node.folder / "packages" / "slow_engine.py"
    with source.open("a") as file:
        file.write("# upgraded\n")
    second = restart(node, first)
    assert second["imported_by"] == second["pid"]
    assert how(node)[-1] == ("refused", f"{source} has changed")
    successor = node.ready_pid("a-preload", after=resident)
    assert restart(node, second["pid"])["imported_by"] == successor


def test_a_resident_with_threads_forks_nobody(node: Node) -> None:
    add(node, env={"IMPORT_STARTS": "thread"})
    node.start()
    first = node.ready_pid("a")
    node.ready_pid("a-preload")
    second = restart(node, first)
    assert second["imported_by"] == second["pid"]
    assert how(node)[-1] == ("refused", "it has 2 threads")


def test_a_resident_with_a_cuda_context_forks_nobody(node: Node) -> None:
    add(node, env={"IMPORT_STARTS": "cuda"})
    node.start()
    first = node.ready_pid("a")
    node.ready_pid("a-preload")
    second = restart(node, first)
    assert second["imported_by"] == second["pid"]
    assert how(node)[-1] == ("refused", "it has a CUDA context")


def test_imports_that_fail_are_the_reason_of_a_plain_start_and_are_tried_again_after_it(node: Node) -> None:
    add(node, env={"IMPORT_STARTS": "nothing"})
    node.start()
    first = node.ready_pid("a")
    resident = node.ready_pid("a-preload")
    reason = "importing slow_engine failed: ModuleNotFoundError: No module named 'there_is_no_such_module'"
    assert node.child("a-preload")["status"] == reason
    second = restart(node, first)
    assert second["imported_by"] == second["pid"]
    assert how(node)[-1] == ("refused", reason)
    node.ready_pid("a-preload", after=resident)


def test_a_resident_made_in_another_environment_forks_nobody(node: Node) -> None:
    add(node)
    node.children[1]["env"] = {**node.children[1]["env"], "OMP_NUM_THREADS": "17"}
    node.start()
    first = node.ready_pid("a")
    node.ready_pid("a-preload")
    second = restart(node, first)
    assert second["imported_by"] == second["pid"]
    assert how(node)[-1] == ("refused", "its environment has another OMP_NUM_THREADS")


def test_a_dead_resident_is_replaced_and_missed_by_nobody(node: Node) -> None:
    add(node)
    node.start()
    first = node.ready_pid("a")
    resident = node.ready_pid("a-preload")
    os.kill(resident, signal.SIGSTOP)
    second = restart(node, first)
    assert second["imported_by"] == second["pid"]
    assert how(node)[-1] == ("refused", "it does not answer: timed out")
    node.kill(resident)
    successor = node.ready_pid("a-preload", after=resident)
    assert restart(node, second["pid"])["imported_by"] == successor


def test_a_resident_does_not_outlive_its_keeper_whose_successor_has_its_own(node: Node) -> None:
    add(node)
    keeper = node.start()
    first = node.ready_pid("a")
    resident = node.ready_pid("a-preload")
    keeper.kill()
    keeper.wait()
    wait_for(lambda: not alive(resident), "the resident has ended, and waits for nobody")
    node.start()
    assert node.ready_pid("a") == first
    successor = node.ready_pid("a-preload", after=resident)
    assert restart(node, first)["imported_by"] == successor
