"""From what state an attempt starts: found out before the fork, at no price for the keeper."""

import os
from pathlib import Path
from typing import Any

import pytest
from tests.weightcache.keeper.harness import Node, alive, wait_for

from weightcache.keeper import survey as survey_module
from weightcache.keeper.survey import LIMIT_S, survey

MIB = 1 << 20


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(os.urandom(MIB))
    return folder


def states(node: Node) -> list[dict[str, Any]]:
    starts = node.events("WHERE kind = 'attempt_start' ORDER BY id")
    return [event.attributes["starting_state"] for event in starts]


def test_each_attempt_says_from_what_state_it_starts(node: Node, model: Path) -> None:
    node.add("d", "d", "stores", role="daemon")
    node.add("a", "a", model=str(model))
    node.options["closes_episodes"] = True
    node.start()
    first = node.ready_pid("a")
    wait_for(lambda: node.child("d")["stored"] == 4, "the daemon has stored its arena")
    node.kill(first)
    node.ready_pid("a", after=first)
    assert [state["page_cache"] for state in states(node)] == ["warm", "warm"]
    assert states(node)[1]["resident"] is True
    assert states(node)[1]["compile_cache"] in ("cold", "warm")


def test_a_weight_cache_that_has_stored_nothing_holds_nothing(node: Node) -> None:
    node.add("d", "d", role="daemon")
    node.add("a", "a")
    node.start()
    node.ready_pid("a")
    assert [state["resident"] for state in states(node)] == [False]


def test_where_the_keeper_keeps_no_weights_it_does_not_say_whether_there_are_any(node: Node) -> None:
    node.add("a", "a")
    node.start()
    node.ready_pid("a")
    (state,) = states(node)
    assert (state["resident"], state["page_cache"]) == (None, None)


def test_files_that_never_open_hold_up_no_start(model: Path) -> None:
    os.mkfifo(model / "another.safetensors")  # its open waits for a writer, like one on a server that is gone
    assert survey(model, {}, resident=None) is None
    (pid,) = survey_module._killed
    wait_for(lambda: not alive(pid), "who was stuck has ended")
    (model / "another.safetensors").unlink()
    found = survey(model, {}, resident=False)
    assert found is not None
    assert (found["page_cache"], found["resident"]) == ("warm", False)
    assert survey_module._killed == [], "and is reaped"
    assert 0 < LIMIT_S < 1


def test_it_leaves_no_descriptor_and_no_process(model: Path) -> None:
    # Other tests of this process may have left children of their own.
    before = set(os.listdir("/proc/self/fd")), children()
    survey(model, {}, resident=None)
    assert (set(os.listdir("/proc/self/fd")), children()) == before


def children() -> set[str]:
    """The pids of this process's children, ended ones that nobody has waited for included."""
    return {pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}
