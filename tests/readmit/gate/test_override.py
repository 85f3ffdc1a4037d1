"""Golden answers that do not fit, and the operator who lets engines in all the same."""

import json
import os
import signal
import time
from pathlib import Path

import msgspec
import pytest
from tests.readmit.forked import forks
from tests.readmit.gate.harness import Gate, History, ReferenceEngine, ending, probe_file, until

from readmit.gate.operator import order
from readmit.gate.override import Override
from readmit.probes import ProbeSet
from weightcache.errors import ConfigError
from weightcache.journal import Context, Event, boot_id, boottime_ns

Pair = tuple[ReferenceEngine, ReferenceEngine]


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(tmp_path / "journal.sqlite3")


@pytest.fixture
def wrong(model: Path, tmp_path: Path) -> Path:
    return probe_file(tmp_path / "wrong.json", " London.", model=model.name, max_tokens=2)


@pytest.fixture
def options(engines: Pair, history: History, wrong: Path, tmp_path: Path) -> list[str]:
    return [
        *("--slot", f"a={engines[0].url}", "--journal", str(history.path), "--unsupervised", "--probes", str(wrong)),
        *("--verify-interval", "0.2", "--drain-notice", "0", "--runtime-dir", str(tmp_path)),
    ]


def set_override(folder: Path, ttl_s: float) -> None:
    order(folder, "POST", "/api/override", {"reason": "new model", "user": "ann", "ttl_s": ttl_s})


def overrides(history: History) -> list[tuple[str, str, str]]:
    events = history.journal.query("WHERE kind = 'override' ORDER BY id")
    return [(event.name, event.attributes["reason"], event.attributes["user"]) for event in events]


def test_an_override_lets_in_says_so_and_ends_by_itself(options: list[str], history: History, tmp_path: Path) -> None:
    gate = Gate(*options)
    with ending(gate):
        gate.until_state("suspect", "wrong_answer")
        set_override(tmp_path, 5)
        gate.until_state("ready", "override")
        assert gate.client.get("/readyz").text == "ok (override)\n"
        assert "warning: override by ann, new model" in gate.client.get("/readyz?verbose").text
        ends = gate.metric("readmit_gate_override_ends_timestamp_seconds")
        assert ends == pytest.approx(time.time(), abs=60)
        assert gate.metric("readmit_gate_open_unverified") == 1
        assert gate.slot()["verified"] is False
        until(lambda: ("suspect", "override_ended") in history.states(), "it to end by itself")
        until(lambda: not gate.ready, "the gate to shut")
        assert gate.metric("readmit_gate_override_ends_timestamp_seconds") == 0
        until(lambda: len(overrides(history)) == 2, "the journal to say so")
        assert overrides(history) == [("set", "new model", "ann"), ("lifted", "expired", "ann")]


def test_whoever_orders_one_is_told_as_data_where_they_ask_for_it(options: list[str], tmp_path: Path) -> None:
    env = {**os.environ, "READMIT_RUNTIME": str(tmp_path)}
    gate = Gate(*options)
    with ending(gate):
        begun = forks().readmit("gate", "override", "--ttl", "10m", "--reason", "new model", "--json", env=env)
        facts = json.loads(begun.stdout)
        assert (facts["reason"], facts["ttl_s"]) == ("new model", 600)
        assert facts["ends_s"] == pytest.approx(time.time() + 600, abs=60)
        lifted = [forks().readmit("gate", "override", "--lift", "--json", env=env) for _ in range(2)]
        assert json.loads(lifted[0].stdout) == {"lifted": True}
        assert "No override is in force" in json.loads(lifted[1].stderr)["message"]


def test_an_override_outlives_the_gate_that_was_told(options: list[str], history: History, tmp_path: Path) -> None:
    first = Gate(*options)
    with ending(first):
        set_override(tmp_path, 600)
        first.until_state("ready", "override")
    second = Gate(*options)
    with ending(second):
        second.until_state("ready", "override")
        order(tmp_path, "DELETE", "/api/override", {"user": "bob"})
        until(lambda: not second.ready, "the gate to shut")
        with pytest.raises(ConfigError, match="No override is in force"):
            order(tmp_path, "DELETE", "/api/override", {"user": "bob"})
        until(lambda: len(overrides(history)) == 2, "the journal to say so")
        assert overrides(history)[-1] == ("lifted", "lifted", "bob")
    third = Gate(*options)
    with ending(third):
        third.until_state("suspect", "wrong_answer")


def test_correct_answers_are_no_overrides_business(
    options: list[str], golden: Path, history: History, tmp_path: Path
) -> None:
    gate = Gate(*options, "--probes", str(golden))
    with ending(gate):
        gate.until_ready()
        set_override(tmp_path, 600)
        order(tmp_path, "DELETE", "/api/override", {"user": "bob"})
        known = len(history.names("probe"))
        until(lambda: len(history.names("probe")) >= known + 2, "it to be verified again")
        assert gate.slot()["reason"] == "verified"
        assert [state for state, _ in history.states()].count("suspect") == 0


def test_golden_answers_of_other_weights_are_not_even_asked(
    engines: Pair, golden: Path, history: History, tmp_path: Path
) -> None:
    probes, probe_set = tmp_path / "probes.json", ProbeSet.load(golden)
    msgspec.structs.replace(probe_set, checkpoint_digest="first").save(probes)
    episode = history.spawned(engines[0].pid)
    config = {"checkpoint_digest": "second", "quant_method": None}
    where = Context("node", "a", episode, 1, 0)
    history.journal.append("lookup", "hit", {"config": config, "generation": "g"}, context=where)
    gate = Gate("--slot", f"a={engines[0].url}", "--journal", str(history.path), "--probes", str(probes))
    with ending(gate):
        slot = gate.until_state("verifying", "stale_probes")
        assert "checkpoint_digest first recorded, second found in the engine" in slot["message"]
        assert "first recorded, second found" in gate.client.get("/readyz?verbose").text
        assert gate.client.get("/readyz").status_code == 503
        assert history.names("probe") == []
        msgspec.structs.replace(probe_set, checkpoint_digest="second").save(probes)
        gate.until_ready()
        assert history.states()[-1] == ("ready", "verified")


def test_that_verification_has_begun_is_written_before_anything_is_answered(
    engines: Pair, golden: Path, history: History
) -> None:
    engine = engines[0]
    os.kill(engine.pid, signal.SIGSTOP)  # it takes connections, and answers nothing
    try:
        episode = history.spawned(engine.pid)
        gate = Gate("--slot", f"a={engine.url}", "--journal", str(history.path), "--probes", str(golden))
        with ending(gate):
            begun = until(lambda: history.names("phase_begin"), "the phase to begin")
            assert (begun, history.names("probe")) == (["semantic_verify"], [])
            os.kill(engine.pid, signal.SIGCONT)
            gate.until_ready()
            until(lambda: history.names("episode_close"), "the episode to be closed")
            marks = history.journal.query("WHERE episode = ? AND kind LIKE 'phase%' ORDER BY id", episode)
            assert [mark.kind for mark in marks] == ["phase_begin", "phase_end"]
    finally:
        os.kill(engine.pid, signal.SIGCONT)


def test_setting_the_clock_back_does_not_make_an_override_last() -> None:
    facts = {"reason": "test", "user": "x", "ttl_s": 60.0}
    hour_ns = 3_600_000_000_000
    now_ns, wall_ns = boottime_ns(), time.time_ns()
    where = ("node", None, None, None, None, "override", "set", facts)
    told = Event(1, boot_id(), now_ns - 2 * hour_ns, wall_ns + hour_ns, *where)
    for event in (told, told._replace(boot_id="earlier", wall_ns=wall_ns - 2 * hour_ns)):
        override = Override.of(event)
        assert override is not None
        assert override.left_s == 0
    current = Override.of(told._replace(boottime_ns=now_ns))
    assert current is not None
    assert 0 < current.left_s <= 60
    future = Override.of(told._replace(boot_id="earlier"))
    assert future is not None
    assert future.left_s <= 60, "not even where the clock of the boot before was ahead"
