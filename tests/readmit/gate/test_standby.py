"""Two slots on the same resident weights: one serves, the other stands by, and no fault moves the traffic twice."""

import os
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from tests.readmit.gate.harness import sse, until
from tests.readmit.gate.nodes import ASK, Node

from readmit.probes import ProbeSet
from weightcache.availability import Availability, Outage
from weightcache.episodes import Episode, Replay

RIGHT = " Paris."


@contextmanager
def traffic(node: Node) -> Iterator[list[tuple[int, str]]]:
    """A client that asks on and on: what it was answered, status and text."""
    answers: list[tuple[int, str]] = []
    done = threading.Event()

    def ask() -> None:
        with httpx.Client(timeout=60) as client:
            while not done.wait(0.15):  # without a pause it would be the engines' starts that take long
                answer = client.post(f"{node.gate_url}/v1/completions", json=ASK)
                text = answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text
                answers.append((answer.status_code, text))

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield answers
    finally:
        done.set()
        asking.join(60)


def standbys(node: Node) -> list[Episode]:
    return [it for it in node.replay().episodes if it.path == "standby"]


def outages(node: Node) -> list[Outage]:
    replay, availability, found = Replay(), Availability(), []
    for event in node.history.journal.events():
        if outage := availability.feed(event, replay, replay.feed(event)):
            found.append(outage)
    return found


def lose(node: Node, number: signal.Signals) -> tuple[str, str]:
    """Send the serving engine a signal, wait until both slots are ready again; returns who served and who serves."""
    before = node.status()["serving"]
    (other,) = {"a", "b"} - {before}
    pid = node.child(before)["pid"]
    known = len(standbys(node))
    os.kill(pid, number)
    until(lambda: node.status()["serving"] == other, "the standby to take over")
    until(lambda: len(standbys(node)) == known + 1, "the journal to say so")
    until(lambda: node.child(before)["pid"] not in (None, pid), "a replacement to be started")
    node.until_state(before, "ready")
    until(lambda: not node.replay().open_episodes, "the engine's recovery to be over")
    return before, node.status()["serving"]


def test_a_standby_takes_over_and_the_engines_own_recovery_goes_on(pair: Node) -> None:
    with traffic(pair) as answers:
        until(lambda: len(answers) > 2, "traffic")
        before, after = lose(pair, signal.SIGKILL)
    assert {text for status, text in answers if status == 200} == {RIGHT}
    # What the dying engine had in its hands is told so; nothing is turned away for want of a ready slot.
    assert {status for status, _ in answers} <= {200, 502}
    assert before != after, "the replacement stands by behind its successor"
    recovery = next(it for it in reversed(pair.replay().episodes) if it.slot == before)
    standby = standbys(pair)[-1]
    assert (standby.slot, standby.cause, standby.outcome, standby.verified) == (after, "crash", "ready", True)
    assert (recovery.cause, recovery.outcome) == ("crash", "ready")
    assert (recovery.path, recovery.miss) == ("hit", None)
    assert standby.fault_ns == pytest.approx(recovery.fault_ns, abs=2_000_000_000)
    assert sum(standby.phases_s().values()) == pytest.approx(standby.total_s)
    assert standby.phases_s()["semantic_verify"] > 0, "until its first correct answer"
    assert standby.total_s < recovery.total_s, "two clocks"
    outage = outages(pair)[-1]
    assert outage.end_ns is not None
    assert (outage.end_ns - outage.begin_ns) / 1e9 == pytest.approx(standby.total_s, abs=1)
    opened = pair.history.events("episode_open", after)[-1]
    assert opened.attributes["instead_of"] == {"slot": before, "episode": recovery.id}


def test_a_hang_moves_the_traffic_once(pair: Node) -> None:
    known = len(standbys(pair))
    before, after = lose(pair, signal.SIGSTOP)
    assert before != after
    assert len(standbys(pair)) == known + 1, "ejected, killed and started again: that is one fault"
    standby = standbys(pair)[-1]
    assert (standby.cause, standby.fault_clock) == ("hang", "last_correct_answer")
    recovery = next(it for it in reversed(pair.replay().episodes) if it.slot == before and it.path != "standby")
    phases = recovery.phases_s()
    assert phases["detect"] > 2, "the gate's patience, and none for an engine that cannot hear"
    assert phases["semantic_verify"] < phases["detect"], "no question is put before there is an engine to answer it"


def test_what_a_standby_costs_is_its_own_memory_and_not_the_weights(pair: Node) -> None:
    costs = until(lambda: all(slot["cost"] for slot in pair.status()["slots"]) and pair.status()["slots"], "costs")
    weights = sum(path.stat().st_size for path in pair.model.glob("*.safetensors"))
    for slot in costs:
        assert slot["cost"]["private_bytes"] > 10 << 20
        assert slot["cost"]["shared_bytes"] > weights * 0.9, "both map the same weights"
        assert slot["cost"]["kv_tokens"] is None, "this engine keeps no room for tokens, and says nothing of it"
        shown = next(line for line in pair.readmit("status").stdout.splitlines() if line.startswith(f"{slot['slot']} "))
        assert ("serves" if slot["active"] else "stands by") in shown
        assert re.search(r"\d+ MiB of its own", shown)
        assert pair.metric(f'readmit_gate_engine_private_bytes{{slot="{slot["slot"]}"}}') > 10 << 20


def test_golden_answers_recorded_on_the_node_name_their_checkpoint(pair: Node, tmp_path: Path) -> None:
    out = tmp_path / "probes.json"
    asked = pair.history.events("lookup")[-1].attributes["config"]
    how = ["--out", str(out), "--prompt", "The capital of France is", "--repeat", "1"]
    done = pair.readmit("probe", "record", pair.slot("a")["url"], *how)
    assert done.returncode == 0, done.stderr
    recorded = ProbeSet.load(out)
    assert recorded.checkpoint_digest == asked["checkpoint_digest"] is not None
    assert recorded.quant_method == asked["quant_method"]


def test_a_drained_slot_gets_nothing_more_until_it_is_taken_back(pair: Node) -> None:
    serving, known = pair.status()["serving"], len(standbys(pair))
    (other,) = {"a", "b"} - {serving}
    with traffic(pair) as answers:
        until(lambda: len(answers) > 2, "traffic")
        drained = pair.readmit("drain", serving)
        assert (drained.returncode, drained.stdout) == (0, f"{serving} is drained\n")
        assert pair.status()["serving"] == other
        last = pair.readmit("drain", other)
        assert last.returncode == 2
        assert "No other slot is ready" in last.stderr
    assert {status for status, _ in answers} == {200}, "nobody noticed"
    assert not pair.replay().open_episodes, "nothing was lost, so nothing recovers"
    gate, engine = pair.child("gate")["pid"], pair.child(serving)["pid"]
    os.kill(gate, signal.SIGTERM)
    os.kill(engine, signal.SIGKILL)
    until(lambda: pair.child("gate")["pid"] not in (None, gate), "another gate")
    until(lambda: pair.child(serving)["pid"] not in (None, engine), "another engine")
    until(lambda: pair.ready and pair.slot(serving)["state"] == "draining", "the gate to know what was drained")
    until(lambda: pair.closed("crash")[-1:] and not pair.replay().open_episodes, "the engine's recovery to be over")
    assert pair.slot(serving)["state"] == "draining", "it has recovered, and is not asked for all that"
    undone = pair.readmit("drain", "--undo", serving)
    assert undone.returncode == 0, undone.stderr
    pair.until_state(serving, "ready")
    assert pair.status()["serving"] == other
    assert len(standbys(pair)) == known, "who stands by, or is drained, is not taken over from"
    assert ("draining", "operator_drain") in pair.history.states(serving)
    assert ("starting", "undrained") in pair.history.states(serving)


@pytest.mark.parametrize("cause", ["upgrade", "config_change"])
def test_a_planned_restart_costs_no_request(pair: Node, cause: str) -> None:
    for slot in ("a", "b"):
        pair.until_state(slot, "ready")
    before, known = pair.status()["serving"], len(standbys(pair))
    (other,) = {"a", "b"} - {before}
    pid, story = pair.child(before)["pid"], {**ASK, "prompt": "Once upon a time", "max_tokens": 40, "stream": True}
    where = f"{pair.gate_url}/v1/completions"
    with traffic(pair) as all_, httpx.stream("POST", where, json=story, timeout=60) as answer:
        pieces = answer.iter_text()
        first = next(pieces)
        restarted = pair.readmit("restart", before, "--cause", cause, "--wait")
        rest = "".join(pieces)
    assert restarted.returncode == 0, restarted.stderr
    assert sse(first + rest)[-1] == "[DONE]"
    assert set(all_) == {(200, RIGHT)}
    assert pair.child(before)["pid"] != pid
    assert pair.status()["serving"] == other
    pair.until_state(before, "ready")  # drained no more
    recovery = next(it for it in reversed(pair.replay().episodes) if it.slot == before)
    assert (recovery.cause, recovery.outcome, recovery.path) == (cause, "ready", "hit")
    assert len(standbys(pair)) == known, "nothing had failed"


def test_a_gate_that_is_killed_during_a_planned_restart_leaves_no_slot_drained(pair: Node) -> None:
    for slot in ("a", "b"):
        pair.until_state(slot, "ready")
    before = pair.status()["serving"]
    pid, story = pair.child(before)["pid"], {**ASK, "prompt": "Once upon a time", "max_tokens": 400, "stream": True}
    with ThreadPoolExecutor(1) as operators:
        with httpx.stream("POST", f"{pair.gate_url}/v1/completions", json=story, timeout=60) as answer:
            next(answer.iter_text())
            restart = operators.submit(pair.readmit, "restart", before, "--cause", "upgrade")
            pair.until_state(before, "draining")
            os.kill(pair.child("gate")["pid"], signal.SIGKILL)
        assert restart.result(90).returncode == 0, restart.result().stderr
    assert pair.child(before)["pid"] != pid
    pair.until_ready()
    pair.until_state(before, "ready")
    until(lambda: not pair.replay().open_episodes, "the recovery to be over")
