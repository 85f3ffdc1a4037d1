"""Golden answers by token ids, from a real engine."""

from pathlib import Path

import msgspec
import pytest
from tests.fixtures import http
from tests.readmit.gate.harness import ReferenceEngine, sse

from readmit.exchange import Answer, answer_of
from readmit.probes import Expectation, Interrogation, Probe, ProbeSet, judge, record
from weightcache.errors import ConfigError

Pair = tuple[ReferenceEngine, ReferenceEngine]
PROMPT = "The capital of France is"
ASK = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0}


async def test_they_are_recorded_and_compared(engines: Pair, model: Path) -> None:
    (probe,) = await record(engines[0].url, [PROMPT], model=model.name, max_tokens=3, by="token-ids")
    ids = probe.expect.token_ids
    assert ids is not None
    assert (len(ids), probe.expect.text, probe.expect.tokens) == (3, None, None)
    assert (await Interrogation(engines[1].url, model.name).put(probe, 60)).result == "correct"
    other = msgspec.structs.replace(probe, expect=Expectation(token_ids=(*ids[:-1], ids[-1] + 1)))
    wrong = await Interrogation(engines[1].url, model.name).put(other, 60)
    assert (wrong.result, wrong.found) == ("wrong", f"the tokens {list(ids)}")


def test_an_engine_gives_them_where_they_are_asked_for(engines: Pair) -> None:
    url = f"{engines[0].url}/v1/completions"
    plain = http.post(url, json=ASK, timeout=60).json()
    whole = http.post(url, json={**ASK, "return_token_ids": True}, timeout=60).json()
    streamed = http.post(url, json={**ASK, "return_token_ids": True, "stream": True}, timeout=60).text
    assert answer_of(plain).token_ids is None
    ids = answer_of(whole).token_ids
    assert ids is not None
    pieces = [event["choices"][0]["token_ids"] for event in sse(streamed) if event != "[DONE]"]
    assert tuple(token for piece in pieces for token in piece) == ids


def test_tokens_that_are_written_alike_are_told_apart() -> None:
    probe = Probe("emoji", "?", 2, Expectation(token_ids=(240, 159), logprobs=(-0.1, -0.2)))
    found = Answer("\ufffd\ufffd", ("\ufffd", "\ufffd"), (-0.1, -0.2), (240, 159))
    assert judge(probe, found, 0.0).result == "correct"
    assert judge(probe, msgspec.structs.replace(found, token_ids=(159, 240)), 0.0).result == "wrong"
    assert judge(probe, msgspec.structs.replace(found, logprobs=(-0.1, -0.9)), 0.0).result == "wrong"
    assert judge(probe, msgspec.structs.replace(found, token_ids=None), 0.0).found == "no tokens in the answer"


@pytest.mark.parametrize(
    "expect",
    ['{"token_ids": [1], "text": "x"}', '{"token_ids": [1], "logprobs": [-0.1, -0.2]}', '{"regex": "a{99999999999}"}'],
)
def test_a_file_that_says_too_much_is_refused(tmp_path: Path, expect: str) -> None:
    path = tmp_path / "probes.json"
    path.write_text(
        f'{{"model": "m", "probes": [{{"name": "p", "prompt": "?", "max_tokens": 1, "expect": {expect}}}]}}'
    )
    with pytest.raises(ConfigError) as caught:
        ProbeSet.load(path)
    assert caught.value.reason == "probes"
