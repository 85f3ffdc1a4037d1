"""The reference engine as a process: what it answers, what it journals, how it fails and how it dies."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.fixtures import checkpoints
from tests.readmit.forked import forks

from readmit import demo_model
from weightcache.journal import Event, Journal

Start = Callable[..., "subprocess.Popen[str]"]
CAPITAL = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 8}
LOGPROBS = ["tokens", "text_offset", "token_logprobs", "top_logprobs"]
PHASES = ["spawn", "import", "tokenizer_init", "load_weights", "kernel_warmup", "server_ready"]


@pytest.fixture(scope="module")
def model() -> Path:
    return demo_model.prepare()


class Engine:
    """A running engine, once it has said where it serves."""

    def __init__(self, start: Start, command: list[str], journal: Path | None = None) -> None:
        variables = {"READMIT_JOURNAL": str(journal)} if journal else {}
        self.process = start(command, env={**os.environ, **variables}, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        self.said: list[str] = []
        for line in self.process.stderr:
            self.said.append(line)
            if url := re.search(r"serving on (http://\S+)", line):
                self.client = httpx.Client(base_url=url[1], timeout=120)
                break
        else:
            raise AssertionError(f"the engine ended with {self.process.wait()}: {''.join(self.said)}")
        threading.Thread(target=self.said.extend, args=[self.process.stderr], daemon=True).start()

    def complete(self, **fields: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={**CAPITAL, **fields})

    def text(self, **fields: Any) -> str:
        response = self.complete(**fields)
        assert response.status_code == 200, response.text
        answer: str = response.json()["choices"][0]["text"]
        return answer

    def end(self, number: signal.Signals = signal.SIGKILL) -> int:
        self.client.close()
        self.process.send_signal(number)
        return self.process.wait(60)


def command(model: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "readmit.engine", str(model), "--port", "0", *options]


@contextlib.contextmanager
def running(command: list[str], journal: Path | None = None, *, plainly: bool = False) -> Iterator[Engine]:
    """An engine that ends with the block, forked with its imports done unless it is to be started plainly."""
    engine = Engine(subprocess.Popen if plainly else forks().popen, command, journal)
    try:
        yield engine
    finally:
        if engine.process.poll() is None:
            engine.end()


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with running(command(model)) as engine:
        yield engine


def events_of(response: httpx.Response) -> list[str]:
    assert response.headers["content-type"].startswith("text/event-stream")
    return [block.removeprefix("data: ") for block in response.text.split("\n\n") if block]


def test_it_answers(engine: Engine) -> None:
    answer = engine.complete().json()
    assert answer["object"] == "text_completion"
    assert answer["choices"][0]["text"].startswith(" Paris")
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 8, "total_tokens": 13}


def test_a_stream_says_the_same_piece_by_piece(engine: Engine) -> None:
    *chunks, usage, done = events_of(engine.complete(stream=True, stream_options={"include_usage": True}))
    pieces = [json.loads(chunk)["choices"][0] for chunk in chunks]
    assert len(pieces) > 3
    assert "".join(piece["text"] for piece in pieces) == engine.text()
    assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert json.loads(usage)["usage"]["completion_tokens"] == 8
    assert done == "[DONE]"


def test_a_stop_string_ends_the_answer_and_is_no_part_of_it(engine: Engine) -> None:
    whole = engine.text(max_tokens=30)
    choice = engine.complete(max_tokens=30, stop=["never said", "answer is"]).json()["choices"][0]
    assert "answer is" in whole
    assert choice["text"] == whole.partition("answer is")[0]
    assert choice["finish_reason"] == "stop"


def test_a_length_that_can_be_relied_on(engine: Engine) -> None:
    chat = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    ended = engine.complete(prompt=chat, max_tokens=120).json()
    length = ended["usage"]["completion_tokens"]
    assert (ended["choices"][0]["finish_reason"], length < 120) == ("stop", True)
    forced = engine.complete(prompt=chat, max_tokens=length + 5, ignore_eos=True).json()
    assert (forced["choices"][0]["finish_reason"], forced["usage"]["completion_tokens"]) == ("length", length + 5)


def test_log_probabilities_go_with_each_token(engine: Engine) -> None:
    choice = engine.complete(logprobs=3).json()["choices"][0]
    told = choice["logprobs"]
    assert "".join(told["tokens"]) == choice["text"]
    for token, offset, logprob, top in zip(*(told[key] for key in LOGPROBS), strict=True):
        assert choice["text"][offset:].startswith(token)
        assert len(top) == 3
        assert list(top.values()) == sorted(top.values(), reverse=True)
        assert max(top, key=top.__getitem__) == token  # greedy takes the likeliest
        assert top[token] == logprob < 0


def test_a_prompt_can_be_tokens(engine: Engine) -> None:
    assert engine.text(prompt=[504, 3575, 282, 4649, 314]) == engine.text()


def test_a_seed_makes_sampling_repeatable(engine: Engine) -> None:
    first, again, other = (engine.text(temperature=1.5, seed=seed, max_tokens=6) for seed in (1, 1, 2))
    assert first == again != other


def test_requests_wait_their_turn_and_get_the_same_answers(engine: Engine) -> None:
    alone = engine.text()
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: engine.text(), range(4))) == [alone] * 4


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_whose_client_has_gone_is_dropped(engine: Engine, stream: bool) -> None:
    fields = {**CAPITAL, "max_tokens": 8000, "stream": stream, "stop": ["never said"]}
    with (
        httpx.Client(base_url=engine.client.base_url, timeout=1) as impatient,
        contextlib.suppress(httpx.ReadTimeout),
        impatient.stream("POST", "/v1/completions", json=fields) as response,
    ):
        assert response.status_code == 200
    assert engine.text()  # with 8000 tokens before it, this would run into the client's time-out


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": "eight"}, 400, "max_tokens"),
        ({"max_tokens": 9000}, 400, "max_tokens"),
        ({"temperature": -1}, 400, "temperature"),
        ({"top_p": 0}, 400, "top_p"),
        ({"logprobs": 21}, 400, "logprobs"),
        ({"n": 2}, 400, "n"),
        ({"echo": True}, 400, "echo"),
        ({"stop": ["a", "b", "c", "d", "e"]}, 400, "stop"),
        ({"prompt": None}, 400, "prompt"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": [1, 49152]}, 400, "prompt"),
        ({"prompt": {"text": "x"}}, 400, "prompt"),
        ({"model": "another"}, 404, "model"),
    ],
)
def test_a_bad_request_is_told_which_field_is_wrong(
    engine: Engine, fields: dict[str, Any], status: int, param: str
) -> None:
    response = engine.complete(**fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["type"]) == (status, param, "invalid_request_error")
    assert error["message"]


def test_what_is_not_json_or_not_there_is_an_error_object(engine: Engine) -> None:
    responses = [
        engine.client.post("/v1/completions", content=b"{"),
        engine.client.post("/v1/completions", content=b"[1]"),
        engine.client.get("/v1/completions"),
        engine.client.get("/v1/chat"),
    ]
    assert [response.status_code for response in responses] == [400, 400, 405, 404]
    assert all(response.json()["error"]["message"] for response in responses)


def test_null_means_the_default(engine: Engine) -> None:
    response = engine.complete(stop=None, n=None, logprobs=None, stream=None, max_tokens=None)
    assert response.json()["usage"]["completion_tokens"] == 16


def test_it_lists_its_model(engine: Engine, model: Path) -> None:
    (listed,) = engine.client.get("/v1/models").json()["data"]
    assert listed["id"] == model.name
    assert listed["max_model_len"] == 8192
    assert engine.complete(model=listed["id"]).status_code == 200


def phases(events: list[Event], name: str) -> list[str]:
    return [event.name for event in events if event.kind == name and "." not in event.name]


def test_every_phase_of_its_start_is_journaled(model: Path, tmp_path: Path) -> None:
    journal = tmp_path / "journal.sqlite3"
    with running(command(model), journal, plainly=True):
        events = Journal(journal).events()
    assert phases(events, "phase_begin") == phases(events, "phase_end") == PHASES
    parts = [event.name for event in events if event.kind == "phase_begin" and "." in event.name]
    assert parts == ["load_weights.skeleton", "load_weights.read", "load_weights.process"]
    lookups = [(event.name, event.attributes["mode"]) for event in events if event.kind == "lookup"]
    assert lookups == [("off", "off")]
    begun = [event.boottime_ns for event in events if event.kind == "phase_begin" and event.name in PHASES]
    assert begun == sorted(begun)


def test_killed_and_started_again_on_its_port_it_maps_the_weights_it_published(model: Path, tmp_path: Path) -> None:
    cache, journal = tmp_path / "cache" / "cache.sock", tmp_path / "journal.sqlite3"
    options = ["--weight-cache", "client", "--socket", str(cache)]
    daemon = [sys.executable, "-m", "weightcache.daemon", "--socket", str(cache), "--metrics", "127.0.0.1:0"]
    with subprocess.Popen([*daemon, "--journal", str(journal)]) as holder:
        try:
            while not cache.exists():
                assert holder.poll() is None
                time.sleep(0.02)
            with running(command(model, *options), journal) as first:
                answer = first.text()
                port = str(first.client.base_url.port)
                assert first.end(signal.SIGKILL) == -signal.SIGKILL
            with running([*command(model, *options), "--port", port], journal) as second:
                assert second.client.base_url.port == int(port)
                assert second.text() == answer
                assert any("mapped 269 MB" in line for line in second.said)
        finally:
            holder.terminate()
    lookups = Journal(journal).query("WHERE kind = 'lookup' ORDER BY id")
    assert [(event.name, event.attributes.get("reason")) for event in lookups] == [("miss", "absent"), ("hit", None)]
    marks = Journal(journal).query("WHERE kind = 'phase_end' AND name LIKE 'load_weights.%' ORDER BY id")
    parts = [event.name.removeprefix("load_weights.") for event in marks]
    again = len(parts) - parts[::-1].index("skeleton")
    assert {"match", "read", "process", "publish"} <= set(parts[:again])
    assert {"match", "connect", "map", "bind", "buffers"} <= set(parts[again:])
    assert not {"read", "process", "publish"} & set(parts[again:])


def test_a_signal_lets_the_answer_under_way_finish(model: Path) -> None:
    fields = {**CAPITAL, "max_tokens": 40, "stream": True}
    with running(command(model)) as engine:
        with engine.client.stream("POST", "/v1/completions", json=fields) as response:
            lines = response.iter_lines()
            next(lines)
            engine.process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert "data: [DONE]" in rest
        assert engine.process.wait(60) == -signal.SIGTERM


def failed(*options: str) -> tuple[int, str]:
    run = forks().popen([sys.executable, "-m", "readmit.engine", *options], stderr=subprocess.PIPE)
    _, said = run.communicate(timeout=120)
    return run.returncode, said


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A small checkpoint that can be broken."""
    return checkpoints.with_tokenizer(checkpoints.plain(tmp_path / "broken"))


def test_a_model_that_is_not_there_is_said_in_a_paragraph(tmp_path: Path) -> None:
    code, said = failed(str(tmp_path / "nothing"), "--port", "0")
    assert code == os.EX_CONFIG
    assert said.count("\n") == 1
    assert str(tmp_path / "nothing") in said


def test_a_damaged_model_is_said_in_a_paragraph(broken: Path) -> None:
    shard = broken / checkpoints.SHARDS[1]
    os.truncate(shard, shard.stat().st_size - 1)
    code, said = failed(str(broken), "--port", "0")
    assert code == os.EX_CONFIG
    assert said.count("\n") == 1
    assert shard.name in said


def test_an_unknown_architecture_is_said_in_a_paragraph(broken: Path) -> None:
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "model_type": "no_such_model"}))
    code, said = failed(str(broken), "--port", "0")
    assert code == os.EX_CONFIG
    assert "no_such_model" in said
    assert "Traceback" not in said


def test_a_model_without_tokenizer_is_said_in_a_paragraph(broken: Path) -> None:
    for file in broken.glob("tokenizer*"):
        file.unlink()
    code, said = failed(str(broken), "--port", "0")
    assert code == os.EX_CONFIG
    assert "tokenizer" in said
    assert "Traceback" not in said


def test_a_taken_port_is_said_at_once(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, said = failed(str(model), "--port", str(port))
    assert code == os.EX_CONFIG
    assert said.count("\n") == 1
    assert f"127.0.0.1:{port}" in said
