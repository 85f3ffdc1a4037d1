"""Engines that look alive and must not be let in. An engine on the wrong checkpoint is among `test_readiness`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fixtures import http
from tests.readmit.gate.harness import Gate, History, ScriptedEngine, ending, until

from readmit.probes import Expectation, Probe, ProbeSet

PROMPT = "The capital of France is"
GOOD = {"tokens": [" Paris"], "token_logprobs": [-0.1]}


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    engine = ScriptedEngine()
    with ending(engine):
        yield engine


@pytest.fixture
def options(engine: ScriptedEngine, tmp_path: Path) -> list[str]:
    expect = Expectation(tokens=(" Paris",), logprobs=(-0.1,))
    ProbeSet(model="scripted", probes=(Probe("capital", PROMPT, 1, expect),)).save(tmp_path / "probes.json")
    return [
        *("--slot", f"a={engine.url}", "--unsupervised", "--journal", str(tmp_path / "journal.sqlite3")),
        *("--probes", str(tmp_path / "probes.json"), "--verify-interval", "0.2", "--drain-notice", "0"),
        *("--hang-limit", "2"),
    ]


def ask(url: str, prompt: str) -> int:
    return http.post(f"{url}/v1/completions", json={"prompt": prompt}, timeout=60).status_code


@pytest.mark.parametrize(
    ("orders", "state", "reason"),
    [
        ({"logprobs": {"tokens": [" Paris"], "token_logprobs": [float("nan")]}}, "suspect", "wrong_answer"),
        ({"logprobs": {"tokens": ["!"], "token_logprobs": [float("nan")]}, "answer": "!"}, "suspect", "wrong_answer"),
        ({"logprobs": {"tokens": [" Paris"], "token_logprobs": [None]}}, "suspect", "wrong_answer"),
        ({"logprobs": {"tokens": [], "token_logprobs": []}, "answer": ""}, "suspect", "wrong_answer"),
        ({"status": 500}, "verifying", "error"),
        ({"delay_s": 3600}, "verifying", "late"),
        ({"hangs_on": PROMPT}, "verifying", "late"),
    ],
    ids=["nan-logprob", "nan-token", "no-logprob", "empty", "error", "hangs", "answers-others-only"],
)
def test_what_gives_no_correct_answer_is_never_ready(
    engine: ScriptedEngine, options: list[str], tmp_path: Path, orders: dict[str, Any], state: str, reason: str
) -> None:
    engine.tell(**{"logprobs": GOOD, **orders})
    gate = Gate(*options, "--probe-limit", "0.5")
    with ending(gate):
        gate.until_state(state, reason)
        if "hangs_on" in orders:
            assert ask(engine.url, "Something else") == 200, "others are answered, which proves nothing"
        assert ask(gate.url, "Something else") == 503
        engine.tell(logprobs=GOOD, answer=" Paris", status=200, delay_s=0, hangs_on=None)
        gate.until_ready()
    assert "ready" not in [name for name, _ in History(tmp_path / "journal.sqlite3").states()[:-1]]


def test_what_stops_answering_the_question_is_out_though_it_answers_others(
    engine: ScriptedEngine, options: list[str], tmp_path: Path
) -> None:
    engine.tell(logprobs=GOOD)
    gate = Gate(*options, "--probe-limit", "0.5")
    with ending(gate):
        gate.until_ready()
        engine.tell(hangs_on=PROMPT)

        def still_in() -> bool:
            return ask(gate.url, "Something else") == 200

        until(lambda: not still_in(), "the gate to shut")
        history = History(tmp_path / "journal.sqlite3")
        until(lambda: ("suspect", "hang") in history.states(), "the journal to say why")
