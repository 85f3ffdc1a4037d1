"""Golden answers: files, comparisons, verdicts, and recording them from an engine."""

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.readmit.gate.harness import ScriptedEngine, ending, free_port, probe_file
from typer.testing import CliRunner

from readmit.commands.probe import app
from readmit.exchange import NoCompletion, answer_of, complaint
from readmit.probes import Answer, Expectation, Interrogation, Probe, ProbeSet, judge, record
from weightcache.errors import ConfigError

PARIS = Answer(" Paris, of course", (" Paris", ",", " of", " course"), (-0.1, -0.2, -1.5, -0.01))


def verdict(expect: Expectation, answer: Answer = PARIS) -> str:
    return judge(Probe("p", "?", 4, expect), answer, 0.0).result


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('{"error": {"message": "there is no model x", "code": 404}}', "there is no model x"),
        ('{"object": "error", "message": "there is no model x"}', "there is no model x"),
        ('{"error": "no"}', None),
        ("[1]", None),
        ("<html>", None),
        ("", None),
    ],
)
def test_what_an_engine_says_of_its_refusal_is_told(body: str, said: str | None) -> None:
    assert complaint(body.encode()) == said


@pytest.fixture(scope="module")
def engine() -> Iterator[ScriptedEngine]:
    engine = ScriptedEngine()
    with ending(engine):
        yield engine


@pytest.fixture(autouse=True)
def well_behaved(engine: ScriptedEngine) -> None:
    engine.tell(answer=" Paris", status=200, delay_s=0)


@pytest.mark.parametrize(
    ("expect", "result"),
    [
        (Expectation(text=" Paris, of course"), "correct"),
        (Expectation(text=" Paris"), "wrong"),
        (Expectation(regex="^ Paris"), "correct"),
        (Expectation(regex="Paris$"), "wrong"),
        (Expectation(tokens=(" Paris", ",", " of", " course")), "correct"),
        (Expectation(tokens=(" Paris", ", of", " course")), "wrong"),
        (Expectation(tokens=PARIS.tokens, logprobs=(-0.1, -0.2, -1.0, -0.01), tolerance=0.5), "correct"),
        (Expectation(tokens=PARIS.tokens, logprobs=(-0.1, -0.2, -0.9, -0.01), tolerance=0.5), "wrong"),
    ],
)
def test_each_kind_of_expectation_compares(expect: Expectation, result: str) -> None:
    assert verdict(expect) == result


@pytest.mark.parametrize("logprob", [math.nan, math.inf, -math.inf, 0.3, None])
def test_a_log_probability_that_is_no_number_is_wrong(logprob: float | None) -> None:
    expect = Expectation(tokens=(" Paris",), logprobs=(-0.1,), tolerance=1e9)
    assert verdict(expect, Answer(" Paris", (" Paris",), (logprob,))) == "wrong"


def test_an_answer_without_the_tokens_asked_for_is_wrong() -> None:
    assert verdict(Expectation(tokens=(" Paris",)), Answer(" Paris")) == "wrong"


def test_a_wrong_answer_names_what_was_expected_and_found() -> None:
    wrong = judge(Probe("capital", "?", 1, Expectation(text=" Paris")), Answer(" London"), 0.5)
    assert (wrong.expected, wrong.found) == ("' Paris'", "' London'")
    assert str(wrong) == "capital: wrong: expected ' Paris', found ' London'"


async def test_an_answer_is_correct_wrong_late_or_an_error(engine: ScriptedEngine) -> None:
    asked = Interrogation(engine.url, "scripted")
    probe = Probe("capital", "?", 1, Expectation(text=" Paris"))
    assert (await asked.put(probe, 30)).result == "correct"
    engine.tell(answer=" London")
    assert (await asked.put(probe, 30)).result == "wrong"
    engine.tell(delay_s=3600)
    late = await asked.put(probe, 0.2)
    assert (late.result, late.refused) == ("late", False)
    engine.tell(delay_s=0, status=500)
    error = await asked.put(probe, 30)
    assert (error.result, error.status, error.refused) == ("error", 500, False)
    port = free_port()
    nobody = await Interrogation(f"http://127.0.0.1:{port}", "scripted").put(probe, 30)
    assert (nobody.result, nobody.refused) == ("error", True)
    assert nobody.message == f"cannot connect to 127.0.0.1:{port}: Connection refused"


async def test_what_is_no_completion_is_an_error(engine: ScriptedEngine) -> None:
    probe = Probe("capital", "?", 1, Expectation(regex=""))
    for answer in (None, 7, ["x"]):
        engine.tell(answer=answer)
        assert (await Interrogation(engine.url, "scripted").put(probe, 30)).result == "error"


@pytest.mark.parametrize(
    "reply",
    [
        {"choices": [{"text": " Paris"}], "error": {"message": "out of memory", "code": 500}},
        {"choices": [{"text": " Paris", "finish_reason": "abort"}]},
        {"choices": [{"text": " Paris"}, {"text": " London"}]},
        {"choices": []},
        {"error": {"message": "out of memory", "code": 500}},
    ],
    ids=["error-beside-text", "aborted", "two-answers", "no-answer", "error"],
)
def test_an_error_with_status_200_is_an_error(reply: dict[str, Any]) -> None:
    with pytest.raises(NoCompletion):
        answer_of(reply)


async def test_questions_end_with_the_first_that_gets_no_answer_but_not_with_a_wrong_one(
    engine: ScriptedEngine,
) -> None:
    probes = [Probe(name, "?", 1, Expectation(text=" Paris")) for name in "abc"]
    asked = Interrogation(engine.url, "scripted")
    engine.tell(answer=" London")
    assert [it.result for it in await asked.put_all(probes, 30)] == ["wrong"] * 3
    engine.tell(status=500)
    assert [it.result for it in await asked.put_all(probes, 30)] == ["error"]


def test_a_file_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    expect = Expectation(tokens=("a", "b"), logprobs=(-0.5, -0.25), tolerance=0.1)
    saved = ProbeSet("m", (Probe("p", "?", 2, expect),), checkpoint_digest="d", quant_method="fp8", recorded_at="now")
    saved.save(tmp_path / "probes.json")
    loaded = ProbeSet.load(tmp_path / "probes.json")
    assert loaded == saved
    assert loaded.digest == saved.digest


def test_the_digest_is_of_the_questions_and_not_of_when_they_were_recorded() -> None:
    probe = Probe("p", "?", 1, Expectation(text="x"))
    base = ProbeSet("m", (probe,))
    assert base.digest == ProbeSet("m", (probe,), recorded_at="later", engine="other").digest
    other = msgspec.structs.replace(probe, expect=Expectation(text="y"))
    assert len({base.digest, ProbeSet("n", (probe,)).digest, ProbeSet("m", (other,)).digest}) == 3


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"expect": {}}, "exactly one of text, regex and tokens"),
        ({"expect": {"text": "a", "regex": "b"}}, "exactly one of text, regex and tokens"),
        ({"expect": {"regex": "("}}, "not a regular expression"),
        ({"expect": {"text": "a", "logprobs": [-1.0]}}, "one number for each of the tokens"),
        ({"expect": {"txt": "a"}}, "unknown field `txt`"),
        ({"max_tokens": "many"}, "Expected `int`, got `str` - at `$.probes[0].max_tokens`"),
    ],
)
def test_a_bad_file_is_refused_with_the_place(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    path = probe_file(tmp_path / "probes.json")
    content = json.loads(path.read_text())
    content["probes"][0] |= change
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError) as caught:
        ProbeSet.load(path)
    assert caught.value.reason == "probes"
    assert says in str(caught.value)


def test_a_file_without_probes_or_none_at_all_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "probes.json"
    with pytest.raises(ConfigError) as caught:
        ProbeSet.load(path)
    assert caught.value.reason == "probes_absent"
    assert f"readmit probe record URL --out {path}" in str(caught.value)
    path.write_text('{"model": "m", "probes": []}')
    with pytest.raises(ConfigError, match="one or more"):
        ProbeSet.load(path)


async def test_recording_refuses_what_cannot_be_a_golden_answer(engine: ScriptedEngine) -> None:
    engine.tell(answer="")
    with pytest.raises(ConfigError) as caught:
        await record(engine.url, ["?"], model="scripted")
    assert caught.value.reason == "probe_empty"
    engine.tell(answer=" Paris")
    with pytest.raises(ConfigError) as caught:
        await record(engine.url, ["?"], model="scripted", by="tokens")
    assert caught.value.reason == "probe_tokens"


async def test_recording_refuses_an_answer_that_changes(engine: ScriptedEngine) -> None:
    engine.tell(answers=[" Paris", " Paris", " London"])
    with pytest.raises(ConfigError) as caught:
        await record(engine.url, ["?"], model="scripted", repeat=3)
    assert caught.value.reason == "probe_unstable"
    assert (caught.value.expected, caught.value.found) == ("' Paris'", "' London'")


def test_record_and_verify_from_the_command_line(engine: ScriptedEngine, tmp_path: Path) -> None:
    run, out = CliRunner(), tmp_path / "probes.json"
    options = ["--prompt", "The capital of France is", "--checkpoint-digest", "d", "--engine", "scripted 1"]
    recorded = run.invoke(app, ["record", engine.url, "--out", str(out), *options])
    assert recorded.exit_code == 0, recorded.output
    probe_set = ProbeSet.load(out)
    assert (probe_set.model, probe_set.checkpoint_digest, probe_set.engine) == ("scripted", "d", "scripted 1")
    assert probe_set.probes[0].expect == Expectation(text=" Paris")
    assert run.invoke(app, ["verify", engine.url, str(out)]).exit_code == 0
    engine.tell(answer=" London")
    wrong = run.invoke(app, ["verify", engine.url, str(out), "--json"])
    assert wrong.exit_code == 1
    report = json.loads(wrong.output)
    assert not report["correct"]
    assert report["verdicts"][0]["found"] == "' London'"


def test_recording_from_nobody_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    result = CliRunner().invoke(app, ["record", url, "--out", str(tmp_path / "p.json"), "--wait", "0"])
    assert isinstance(result.exception, ConfigError)
    assert result.exception.reason == "no_answer"
    assert not (tmp_path / "p.json").exists()


def test_the_module_needs_no_web_framework() -> None:
    script = "import sys, readmit.probes; sys.exit('fastapi' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_recording_waits_for_an_engine_that_is_still_starting(tmp_path: Path) -> None:
    out, port = tmp_path / "probes.json", free_port()
    words = ["probe", "record", f"http://127.0.0.1:{port}", "--prompt", "The capital of France is", "--out", str(out)]
    command = [sys.executable, "-m", "readmit.cli", *words]
    with subprocess.Popen([*command, "--wait", "240"], stderr=subprocess.PIPE, text=True) as recording:
        assert recording.stderr is not None
        assert "waiting up to 240 s for the engine" in recording.stderr.readline()
        with ending(ScriptedEngine(port)):
            assert recording.wait(240) == 0
    assert ProbeSet.load(out).probes[0].expect.text == " Paris"
