"""A whole node: the real keeper, with the gate and an engine below it."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from benchmarks.gate_parts.damage import Damage
from tests.fixtures import http
from tests.readmit.forked import PLAINLY
from tests.readmit.gate.harness import ending, until
from tests.readmit.gate.nodes import ASK, Node

FRAGILE = "tests.readmit.gate.fragile_engine"
STUCK = "tests.readmit.gate.stuck_engine"


@pytest.fixture(scope="module")
def node(model: Path, golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    node = Node(model, golden, tmp_path_factory.mktemp("node"), "--hang-limit", "3")
    with ending(node):
        node.until_ready()
        until(lambda: node.replay().slots["a"].episode is None, "the first start's episode to be closed")
        yield node


def test_a_crash_is_one_episode_from_the_fault_to_the_correct_answer(node: Node) -> None:
    known = node.replay().episodes
    (node.runtime_dir / PLAINLY).touch()  # for once with its imports
    os.kill(node.child("a")["pid"], signal.SIGKILL)
    until(lambda: len(node.replay().episodes) == len(known) + 1, "an episode to be opened")
    until(lambda: node.replay().slots["a"].episode is None, "it to be closed")
    node.until_ready()
    (node.runtime_dir / PLAINLY).unlink()
    crash = node.replay().episodes[-1]
    assert (known[0].cause, crash.cause) == ("first_start", "crash")
    assert (crash.outcome, crash.verified, crash.path) == ("ready", True, "off")
    assert len(crash.attempts) == 1
    phases = crash.phases_s()
    assert {"spawn", "import", "load_weights", "server_ready", "semantic_verify"} <= set(phases)
    assert sum(phases.values()) == pytest.approx(crash.total_s)


def test_a_hang_is_ended_by_the_keeper_within_the_same_episode(node: Node) -> None:
    pid = node.child("a")["pid"]
    os.kill(pid, signal.SIGSTOP)
    until(lambda: node.child("a")["pid"] not in (None, pid), "the keeper to replace the engine")
    node.until_ready()
    until(lambda: node.replay().slots["a"].episode is None, "the episode to be closed")
    hang = node.replay().episodes[-1]
    assert (hang.cause, hang.fault_clock, hang.outcome, hang.verified) == ("hang", "last_correct_answer", "ready", True)
    assert hang.attempt is not None
    assert hang.attempt.pid == node.child("a")["pid"]


def test_a_hang_is_one_for_the_next_gate_too(node: Node) -> None:
    pid, gate = node.child("a")["pid"], node.child("gate")["pid"]
    os.kill(pid, signal.SIGSTOP)
    os.kill(gate, signal.SIGKILL)
    until(lambda: node.child("a")["pid"] not in (None, pid), "the keeper to replace the engine")
    node.until_ready()
    until(lambda: node.replay().slots["a"].episode is None, "the episode to be closed")
    hang = node.replay().episodes[-1]
    assert (hang.cause, hang.fault_clock, hang.outcome) == ("hang", "first_unanswered", "ready")


@pytest.mark.parametrize("gate_dies", [False, True], ids=["", "after the gate"])
def test_an_engine_whose_own_weights_have_gone_bad_is_restarted(node: Node, tensor: bytes, gate_dies: bool) -> None:
    """They came from the disk, and it was right before: another start reads them right."""
    pid = node.child("a")["pid"]
    Damage(pid, tensor).set()
    if gate_dies:
        os.kill(node.child("gate")["pid"], signal.SIGKILL)
    else:  # the last slot is not ejected: its engine is asked anew where something else ends its readiness
        node.readmit("drain", "a", "--force")
        node.readmit("drain", "a", "--undo")
    until(lambda: node.child("a")["pid"] not in (None, pid), "the keeper to replace the engine")
    node.until_ready()
    until(lambda: node.replay().slots["a"].episode is None, "the episode to be closed")
    bad = node.replay().episodes[-1]
    assert (bad.cause, bad.outcome, bad.path, bad.verified) == ("wrong_answer", "ready", "off", True)


def test_nobody_is_refused_while_a_killed_gate_comes_back(node: Node) -> None:
    known = len(node.replay().episodes), node.history.names("slot_state").count("ready")
    refused: list[Exception] = []
    statuses: list[int] = []
    done = threading.Event()

    def ask_on_and_on() -> None:
        while not done.is_set():
            try:
                statuses.append(http.get(f"{node.gate_url}/livez", timeout=60).status_code)
            except httpx.ReadError:
                pass  # a request that the killed gate had begun to read
            except httpx.RemoteProtocolError:
                pass
            except httpx.HTTPError as error:
                refused.append(error)

    asking = threading.Thread(target=ask_on_and_on)
    asking.start()
    try:
        pid = node.child("gate")["pid"]
        os.kill(pid, signal.SIGKILL)
        until(lambda: node.child("gate")["pid"] not in (None, pid), "the keeper to start it again")
        node.until_ready()
    finally:
        done.set()
        asking.join(60)
    assert refused == []
    assert statuses
    until(lambda: node.history.names("slot_state").count("ready") > known[1], "the engine to be verified again")
    assert len(node.replay().episodes) == known[0], "the engine lost nothing"
    assert http.post(f"{node.gate_url}/v1/completions", json=ASK, timeout=60).status_code == 200


def test_resident_weights_that_answer_wrongly_are_quarantined_and_loaded_anew(
    model: Path, golden: Path, tensor: bytes, tmp_path: Path
) -> None:
    node = Node(model, golden, tmp_path, "--eject-last", cached=True)
    with ending(node):
        node.until_ready()
        until(lambda: "published" in node.history.names("publish"), "the first start to publish")
        os.kill(node.child("a")["pid"], signal.SIGKILL)
        until(lambda: node.closed("crash"), "the crash to be recovered from")
        assert node.closed("crash")[0].path == "hit"
        (generation,) = {
            event.attributes["generation"] for event in node.history.events("lookup") if event.name == "hit"
        }
        Damage(node.child("a")["pid"], tensor).set()
        until(lambda: node.closed("wrong_answer"), "the wrong answers to be recovered from")
        node.until_ready()
        (quarantine,) = node.history.events("quarantine")
        assert (quarantine.name, quarantine.attributes["generation"]) == ("set", generation)
        (recovery,) = node.closed("wrong_answer")
        assert (recovery.fault_clock, recovery.path, recovery.reason) == ("last_correct_answer", "miss", "quarantined")
        answer = http.post(f"{node.gate_url}/v1/completions", json=ASK, timeout=60).json()
        assert answer["choices"][0]["text"] == " Paris."


def test_weights_on_which_engines_die_twice_in_a_row_are_quarantined(model: Path, golden: Path, tmp_path: Path) -> None:
    node = Node(model, golden, tmp_path, cached=True, engine=FRAGILE)
    with ending(node):
        node.until_ready()
        until(lambda: "published" in node.history.names("publish"), "the first start to publish")
        until(lambda: node.replay().slots["a"].episode is None, "the first start to be over")
        os.kill(node.child("a")["pid"], signal.SIGKILL)
        until(lambda: node.closed("crash"), "the crash to be recovered from")
        (recovery,) = node.closed("crash")
        paths = [(attempt.path, attempt.exit_code) for attempt in recovery.attempts]
        assert paths == [("hit", 70), ("hit", 70), ("miss", None)]
        assert (recovery.outcome, recovery.path, recovery.reason) == ("ready", "partial", "quarantined")
        (quarantine,) = node.history.events("quarantine")
        why = "2 failed attempts in a row on it: with exit code 70, with exit code 70"
        assert (quarantine.name, quarantine.attributes["reason"]) == ("set", why)


def test_an_engine_that_never_answers_is_started_anew_at_last(model: Path, golden: Path, tmp_path: Path) -> None:
    node = Node(model, golden, tmp_path, "--start-limit", "12", "--probe-limit", "1", engine=STUCK)
    with ending(node):
        node.until_ready()
        until(lambda: node.replay().slots["a"].episode is None, "the first start to be over")
        (start,) = node.replay().episodes
        assert (start.cause, start.outcome, start.verified) == ("first_start", "ready", True)
        assert [attempt.outcome for attempt in start.attempts] == ["abandoned", "ready"]
        (stuck, _) = start.attempts
        assert stuck.started_ns is not None
        assert stuck.ended_ns is not None
        assert stuck.ended_ns - stuck.started_ns >= 11_000_000_000
