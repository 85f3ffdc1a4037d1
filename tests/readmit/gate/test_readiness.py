"""Who is let in, and when: real gates before real engines with a real model."""

import math
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.gate_parts.damage import Damage
from tests.readmit.gate.harness import (
    Gate,
    History,
    ReferenceEngine,
    ScriptedEngine,
    ending,
    free_port,
    probe_file,
    until,
)

from readmit import demo_model
from weightcache.journal import Context, boottime_ns, new_episode_id

ASK = {"prompt": "The capital of France is", "max_tokens": 2, "temperature": 0}
Pair = tuple[ReferenceEngine, ReferenceEngine]


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(tmp_path / "journal.sqlite3")


@pytest.fixture
def options(golden: Path, history: History) -> list[str]:
    return [
        *("--journal", str(history.path), "--unsupervised", "--probes", str(golden)),
        *("--verify-interval", "0.2", "--drain-notice", "0"),
    ]


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "1000"])
    yield process
    process.kill()
    process.wait()


def test_traffic_waits_for_the_correct_answer(model: Path, options: list[str], history: History) -> None:
    port = free_port()
    gate = Gate("--slot", f"a=http://127.0.0.1:{port}", *options)
    with ending(gate):
        refused = gate.client.post("/v1/completions", json=ASK)
        assert refused.status_code == 503
        assert gate.client.get("/startupz").status_code == 503
        assert gate.client.get("/livez").status_code == 200
        engine = ReferenceEngine(model, port)
        with ending(engine):
            gate.until_ready()
            assert gate.client.get("/startupz").status_code == 200
            answer = gate.client.post("/v1/completions", json=ASK)
            assert answer.json()["choices"][0]["text"] == " Paris."
            assert history.names("probe")[0] == "correct"
            assert [state for state, _ in history.states()] == ["starting", "loading", "verifying", "ready"]
            ready = history.events("slot_state")[-1]
            assert ready.attributes["pid"] == engine.pid
            assert gate.metric('readmit_gate_openings_total{slot="a"}') == 1


def test_a_killed_engine_is_out_at_once_and_its_successor_in_after_a_correct_answer(
    model: Path, options: list[str], history: History
) -> None:
    engine = ReferenceEngine(model)
    # An interval that never comes: only the death itself can end readiness.
    gate = Gate("--slot", f"a={engine.url}", *options, "--verify-interval", "3600")
    with ending(gate, engine):
        gate.until_ready()
        engine.end()
        gate.until_state("suspect", "engine_exited")
        assert gate.client.get("/readyz").status_code == 503
        assert gate.metric('readmit_gate_revocations_total{reason="engine_exited",slot="a"}') == 1
        successor = ReferenceEngine(model, engine.port)
        with ending(successor):
            gate.until_ready()
            assert gate.slot()["pid"] == successor.pid
    assert [state for state, _ in history.states()][3:7] == ["ready", "suspect", "loading", "verifying"]


def test_an_engine_may_die_at_any_moment(golden: Path, options: list[str], tmp_path: Path) -> None:
    port, probes = free_port(), probe_file(tmp_path / "scripted.json")
    gate = Gate("--slot", f"a=http://127.0.0.1:{port}", *options, "--probes", str(probes))
    with ending(gate):
        for number in range(15):
            engine = ScriptedEngine(port)
            with ending(engine):
                until(lambda: gate.slot()["state"] in ("verifying", "ready"), "the gate to see it")
                time.sleep(0.004 * number)
            gone = engine.pid
            until(lambda: gate.slot()["pid"] != gone, "the gate to let go of it")  # noqa: B023 - called at once
            assert not gate.ready
        engine = ScriptedEngine(port)
        with ending(engine):
            gate.until_ready()


def test_a_wrong_answer_keeps_the_gate_shut(
    engines: Pair, model: Path, options: list[str], history: History, tmp_path: Path
) -> None:
    wrong = probe_file(tmp_path / "wrong.json", " London.", model=model.name, max_tokens=2)
    gate = Gate("--slot", f"a={engines[0].url}", *options, "--probes", str(wrong))
    with ending(gate):
        until(lambda: history.names("probe") == ["wrong"] * 2, "two wrong answers")
        assert gate.client.get("/readyz").status_code == 503
        assert "expected ' London.', found ' Paris.'" in gate.client.get("/readyz?verbose").text
        facts = history.events("probe")[0].attributes
        assert (facts["expected"], facts["found"]) == ("' London.'", "' Paris.'")
        assert ("suspect", "wrong_answer") in history.states()
        assert "ready" not in {state for state, _ in history.states()}


def test_a_model_that_only_its_answers_betray_is_kept_out(
    model: Path, options: list[str], history: History, tmp_path_factory: pytest.TempPathFactory
) -> None:
    twin = demo_model.second_checkpoint(model, tmp_path_factory.mktemp("twin") / model.name)
    engine = ReferenceEngine(twin)
    gate = Gate("--slot", f"a={engine.url}", *options)
    with ending(gate, engine):
        until(lambda: "wrong" in history.names("probe"), "an answer")
        assert history.events("probe")[0].attributes["found"] == "' London.'"
        assert not gate.ready


def test_without_golden_answers_it_stays_shut_until_there_are_some(
    engines: Pair, golden: Path, options: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "later.json"
    gate = Gate("--slot", f"a={engines[0].url}", *options, "--probes", str(path))
    with ending(gate):
        slot = gate.until_state("verifying", "no_probes")
        assert f"readmit probe record URL --out {path}" in slot["message"]
        path.write_bytes(golden.read_bytes())
        gate.until_ready()
        assert gate.slot()["verified"] is True


def test_opened_unverified_it_says_so_everywhere(engines: Pair, history: History) -> None:
    gate = Gate("--slot", f"a={engines[0].url}", "--journal", str(history.path), "--unsupervised", "--unverified-ok")
    with ending(gate):
        gate.until_ready()
        assert gate.metric("readmit_gate_open_unverified") == 1
        assert "unverified" in gate.client.get("/readyz?verbose").text
        assert "without golden answers" in gate.client.get("/").text
        assert history.states()[-1] == ("ready", "unverified")


def test_a_stopped_engine_hangs_and_one_that_goes_on_comes_back(
    engines: Pair, options: list[str], history: History
) -> None:
    engine = engines[0]
    gate = Gate("--slot", f"a={engine.url}", *options, "--hang-limit", "3")
    with ending(gate):
        gate.until_ready()
        os.kill(engine.pid, signal.SIGSTOP)
        try:
            until(lambda: ("suspect", "hang") in history.states(), "the hang to be noticed")
            assert gate.client.get("/readyz").status_code == 503
            assert gate.client.post("/v1/completions", json=ASK).status_code == 503
        finally:
            os.kill(engine.pid, signal.SIGCONT)
        gate.until_ready()
        (opened,) = history.events("episode_open")
        (closed,) = until(lambda: history.events("episode_close"), "the episode to be closed")
        assert (opened.name, opened.attributes["fault_clock"]) == ("hang", "last_correct_answer")
        assert (closed.name, closed.episode, closed.attributes["verified"]) == ("ready", opened.episode, True)
        assert opened.attributes["fault_boottime_ns"] < opened.boottime_ns
        # One incident, two transitions: it comes back after two good verifications, not after the first.
        assert [name for name, _ in history.states()].count("ready") == 2
        after = [event.name for event in history.events("probe") if event.id > opened.id]
        assert after[-2:].count("correct") == 2 or after.count("correct") >= 2


def test_a_busy_engine_is_late_and_stays(engines: Pair, options: list[str], history: History) -> None:
    gate = Gate("--slot", f"a={engines[0].url}", *options, "--hang-limit", "4")
    long = {**ASK, "max_tokens": 8000, "ignore_eos": True, "stream": True}
    with ending(gate):
        gate.until_ready()
        with gate.client.stream("POST", "/v1/completions", json=long) as answer:
            assert answer.status_code == 200
            until(lambda: history.names("probe").count("late") >= 2, "late answers")
            assert gate.ready
            assert next(answer.iter_lines()).startswith("data: ")
        known = history.events("probe")[-1].id
        until(
            lambda: [it for it in history.events("probe") if it.id > known and it.name == "correct"], "it in time again"
        )
        assert [state for state, _ in history.states()].count("suspect") == 0


def test_damaged_weights_are_noticed_but_the_last_slot_stays(
    engines: Pair, options: list[str], history: History, damages: list[Damage]
) -> None:
    gate = Gate("--slot", f"a={engines[0].url}", *options)
    with ending(gate):
        gate.until_ready()
        damages[0].set()
        until(lambda: history.names("probe").count("wrong") >= 3, "three wrong answers")
        assert gate.ready
        assert gate.metric('readmit_gate_slot_wrong_verifications{slot="a"}') >= 2
        assert "wrong" in gate.client.get("/readyz?verbose").text


def test_damaged_weights_take_the_last_slot_out_where_the_operator_chose_so(
    engines: Pair, options: list[str], history: History, damages: list[Damage]
) -> None:
    gate = Gate("--slot", f"a={engines[0].url}", *options, "--eject-last")
    with ending(gate):
        gate.until_ready()
        damages[0].set()
        until(lambda: ("suspect", "wrong_answer") in history.states(), "the slot to be taken out")
        assert history.names("probe").count("wrong") == 2, "it takes two of three"
        assert gate.client.post("/v1/completions", json=ASK).status_code == 503
        assert history.names("episode_open") == ["wrong_answer"]
        damages[0].lift()
        gate.until_ready()
        assert [event.name for event in until(lambda: history.events("episode_close"), "the end")] == ["ready"]
        assert history.names("probe")[-2:] == ["correct", "correct"]


def test_damaged_weights_take_one_of_two_slots_out(
    engines: Pair, options: list[str], history: History, damages: list[Damage]
) -> None:
    slots = [
        option for name, engine in zip("ab", engines, strict=True) for option in ("--slot", f"{name}={engine.url}")
    ]
    gate = Gate(*slots, *options)
    with ending(gate):
        gate.until_state("ready", name="a")
        gate.until_state("ready", name="b")
        damages[0].set()
        until(lambda: ("suspect", "wrong_answer") in history.states("a"), "slot a to be taken out")
        assert gate.client.post("/v1/completions", json=ASK).json()["choices"][0]["text"] == " Paris."
        assert gate.client.get("/api/status").json()["serving"] == "b"


def test_when_all_answer_wrongly_the_golden_answers_are_doubted(
    engines: Pair, options: list[str], history: History, damages: list[Damage]
) -> None:
    slots = [
        option for name, engine in zip("ab", engines, strict=True) for option in ("--slot", f"{name}={engine.url}")
    ]
    gate = Gate(*slots, *options)
    with ending(gate):
        gate.until_state("ready", name="a")
        gate.until_state("ready", name="b")
        for engine in engines:
            os.kill(engine.pid, signal.SIGSTOP)
        for damage in damages:
            damage.set()
        for engine in engines:
            os.kill(engine.pid, signal.SIGCONT)
        until(lambda: all(history.names("probe", name).count("wrong") >= 4 for name in "ab"), "wrong answers of both")
        assert gate.ready
        assert gate.metric("readmit_gate_probe_set_suspect") == 1
        assert "golden answers are doubted" in gate.client.get("/readyz?verbose").text
        assert "ready" in gate.slot("a")["state"], gate.slot("b")["state"]


def test_answers_of_another_process_than_the_engine_do_not_count(
    engines: Pair, golden: Path, history: History, bystander: subprocess.Popen[bytes]
) -> None:
    history.spawned(bystander.pid)
    gate = Gate("--slot", f"a={engines[0].url}", "--journal", str(history.path), "--probes", str(golden))
    with ending(gate):
        slot = gate.until_state("verifying", "foreign_listener")
        assert slot["pid"] == bystander.pid
        assert not gate.ready
        assert history.names("probe") == []
        history.spawned(engines[0].pid)
        bystander.kill()
        bystander.wait()
        gate.until_ready()
        assert gate.slot()["pid"] == engines[0].pid


def test_a_supervised_slot_waits_for_its_keepers_word(engines: Pair, golden: Path, history: History) -> None:
    gate = Gate("--slot", f"a={engines[0].url}", "--journal", str(history.path), "--probes", str(golden))
    with ending(gate):
        time.sleep(0.5)
        assert gate.slot()["state"] == "starting"
        episode = history.spawned(engines[0].pid)
        gate.until_ready()
        (closed,) = until(lambda: history.events("episode_close"), "the episode to be closed")
        (ended,) = history.events("attempt_end")
        assert (closed.name, closed.episode, closed.attributes["verified"]) == ("ready", episode, True)
        assert (ended.name, ended.episode, ended.attempt) == ("ready", episode, 1)
        marks = [
            (event.kind, event.name, event.attempt)
            for event in history.journal.query("WHERE episode = ? AND kind LIKE 'phase%'", episode)
        ]
        assert marks == [("phase_begin", "semantic_verify", 1), ("phase_end", "semantic_verify", 1)]


def test_a_gate_that_starts_again_verifies_and_opens_no_episode(engines: Pair, golden: Path, history: History) -> None:
    options = ["--slot", f"a={engines[0].url}", "--journal", str(history.path), "--probes", str(golden)]
    history.spawned(engines[0].pid)
    first = Gate(*options)
    with ending(first):
        first.until_ready()
        until(lambda: history.events("episode_close"), "the episode to be closed")
    second = Gate(*options)
    with ending(second):
        second.until_ready()
        until(lambda: history.names("slot_state").count("ready") == 2, "the journal to say so")
        assert len(history.events("episode_open")) == len(history.events("episode_close")) == 1
        assert len(history.events("attempt_end")) == 1


def test_what_a_refused_client_is_told_comes_from_the_journal(
    golden: Path, history: History, bystander: subprocess.Popen[bytes]
) -> None:
    for number, seconds in enumerate((30, 50, 40)):
        _recovered(history, seconds, ended_ago_s=300 - 100 * number)
    episode = history.spawned(bystander.pid, fault_s=12)
    where = Context("node", "a", episode, 1)
    history.journal.append("lookup", "miss", {"reason": "absent"}, context=where._replace(rank=0))
    history.journal.append("phase_begin", "load_weights", context=where)
    gate = Gate("--slot", f"a=http://127.0.0.1:{free_port()}", "--journal", str(history.path), "--probes", str(golden))
    with ending(gate):
        gate.until_state("loading", "engine_started")
        for path in ("/readyz", "/v1/completions"):
            answer = gate.client.get(path)
            assert answer.status_code == 503
            assert answer.headers["content-type"] == "application/problem+json"
            assert answer.headers["cache-control"] == "no-store"
            problem = answer.json()
            assert problem["type"] == "urn:readmit:problem:not-ready"
            assert (problem["status"], problem["instance"]) == (503, path)
            assert (problem["phase"], problem["path"], problem["miss_reason"]) == ("load_weights", "miss", "absent")
            assert problem["episode_id"] == problem["trace_id"] == episode
            assert 12 <= problem["elapsed_s"] < 12 + 90
            assert problem["expected_s"] == pytest.approx(52, abs=0.5), "12 s until it was started, then the usual 40"
            assert int(answer.headers["retry-after"]) == max(1, math.ceil(problem["expected_s"] - problem["elapsed_s"]))
            assert problem["error"]["code"] == "not_ready"
            assert set(problem["error"]) == {"message", "type", "param", "code"}


def test_a_refused_client_is_told_when_the_first_of_all_slots_may_be_ready(
    golden: Path, history: History, bystander: subprocess.Popen[bytes]
) -> None:
    _recovered(history, 400, ended_ago_s=30)
    _recovered(history, 50, ended_ago_s=20, slot="b")
    for name in "ab":
        history.spawned(bystander.pid, slot=name)
    slots = [word for name in "ab" for word in ("--slot", f"{name}=http://127.0.0.1:{free_port()}")]
    gate = Gate(*slots, "--journal", str(history.path), "--probes", str(golden))
    with ending(gate):
        for name in "ab":
            gate.until_state("loading", "engine_started", name=name)
        assert 30 <= int(gate.client.get("/readyz").headers["retry-after"]) <= 50


def test_a_gate_that_starts_again_sends_nobody_away_for_long(
    golden: Path, history: History, bystander: subprocess.Popen[bytes]
) -> None:
    _recovered(history, 400, ended_ago_s=30)
    episode = history.spawned(bystander.pid)
    history.journal.append("episode_close", "ready", {"verified": True}, context=Context("node", "a", episode, 1))
    gate = Gate("--slot", f"a=http://127.0.0.1:{free_port()}", "--journal", str(history.path), "--probes", str(golden))
    with ending(gate):
        assert gate.client.get("/readyz").headers["retry-after"] == "1"
        gate.until_state("loading", "engine_started")
        assert gate.client.get("/readyz").headers["retry-after"] == "1", "it need only answer"


def test_weights_that_may_be_resident_send_nobody_away_for_a_cold_start(
    golden: Path, history: History, bystander: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """The last start was a cold one; now gate, daemon and engine come back together: nobody says yet what is there."""
    _recovered(history, 400, ended_ago_s=30)
    asked = {"model_path": "/m", "tp_rank": 0, "tp_size": 1}
    where = Context("node", "a", history.replayed().episodes[-1].id, 1, 0)
    history.journal.append("publish", "published", {"generation": "g", "config": asked}, context=where)
    history.spawned(bystander.pid)
    gate = Gate(
        *("--slot", f"a=http://127.0.0.1:{free_port()}", "--journal", str(history.path), "--probes", str(golden)),
        *("--cache-socket", str(tmp_path / "cache.sock")),
    )
    with ending(gate):
        gate.until_state("loading", "engine_started")
        until(lambda: gate.slot()["next_start"], "the cache to be asked")
        assert gate.slot()["next_start"]["reason"] == "no_daemon"
        assert gate.client.get("/readyz").headers["retry-after"] == "5"


def _recovered(history: History, seconds: float, *, ended_ago_s: float, slot: str = "a") -> None:
    where = Context("node", slot, new_episode_id(), 1)
    began = boottime_ns() - round((seconds + ended_ago_s) * 1e9)
    fault = {"fault_boottime_ns": began, "fault_clock": "exit"}
    history.journal.append("episode_open", "crash", fault, context=where, at_ns=began)
    history.journal.append("attempt_start", "", {}, context=where, at_ns=began)
    history.journal.append("lookup", "miss", {"reason": "absent"}, context=where._replace(rank=0), at_ns=began)
    end = began + round(seconds * 1e9)
    history.journal.append("episode_close", "ready", {"verified": True}, context=where, at_ns=end)
