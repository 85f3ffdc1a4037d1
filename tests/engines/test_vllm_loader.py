"""Load format ``weightcache`` in vLLM: the same bytes, the same answers, and every refusal with its reason."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engines import checkpoints
from vllm import LLM, SamplingParams
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader
from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop

from weightcache.errors import ConfigError
from weightcache.integrations import vllm_loader
from weightcache.integrations.vllm import is_tested
from weightcache.integrations.vllm_loader import WeightCacheLoader

PROMPTS = [[1, 5, 9, 30, 77, 200], [1, 400, 3], [1, *range(40, 140)]]
State = dict[str, tuple[str, tuple[int, ...], str]]


@pytest.fixture(scope="module", params=list(checkpoints.ARCHITECTURES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write(request.param, tmp_path_factory.mktemp(request.param) / request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write("llama", tmp_path_factory.mktemp("llama") / "llama")


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A real daemon; yields its socket."""
    monkeypatch.setenv("READMIT_RUNTIME", str(tmp_path / "r"))
    monkeypatch.setenv("READMIT_STATE", str(tmp_path / "s"))
    socket = tmp_path / "cache.sock"
    command = [sys.executable, "-m", "weightcache.daemon", "--socket", str(socket), "--metrics", "127.0.0.1:0"]
    process = subprocess.Popen(command, env={**os.environ, "NOTIFY_SOCKET": ""})
    while not socket.exists():
        assert process.poll() is None, "the daemon ended"
    yield socket
    process.send_signal(signal.SIGTERM)
    process.wait(30)


def options(socket: Path, mode: str = "client") -> dict[str, Any]:
    return {"load_format": "weightcache", "model_loader_extra_config": {"mode": mode, "socket": str(socket)}}


def engine(checkpoint: Path, **arguments: Any) -> Any:
    return LLM(
        str(checkpoint), skip_tokenizer_init=True, enforce_eager=True, max_model_len=256, disable_log_stats=True, **arguments
    )


def answers(llm: Any) -> list[tuple[list[int], list[float]]]:
    """Greedy tokens and their log-probabilities for every prompt."""
    sampling = SamplingParams(temperature=0, max_tokens=12, logprobs=1, ignore_eos=True, detokenize=False)
    found = []
    for result in llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling, use_tqdm=False):
        output = result.outputs[0]
        steps = zip(output.token_ids, output.logprobs, strict=True)
        found.append((list(output.token_ids), [step[token].logprob for token, step in steps]))
    return found


def loader_of(llm: Any) -> None:
    llm.llm_engine.engine_core.shutdown()


class Capture:
    """What the loader holds at the moment at which weights are shared: before vLLM packs them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.states: list[State] = []
        process = vllm_loader.process_weights_after_loading

        def captured(model: torch.nn.Module, *rest: Any) -> None:
            self.states.append(state(model))
            process(model, *rest)

        monkeypatch.setattr(vllm_loader, "process_weights_after_loading", captured)


def state(model: torch.nn.Module) -> State:
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: (str(tensor.dtype), tuple(tensor.shape), digest(tensor)) for name, tensor in named.items()}


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


def lookups(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "weightcache.vllm"]


def test_disk_and_cache_give_the_same_bytes_and_the_same_answers(
    checkpoint: Path, daemon: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "weightcache.vllm")
    capture = Capture(monkeypatch)
    expected = answers(engine(checkpoint))
    for mode in ("off", "client", "client"):
        assert answers(engine(checkpoint, **options(daemon, mode))) == expected
    off, miss, hit = capture.states
    assert off == miss == hit
    assert all(bytes_ != hashlib.sha256(b"").hexdigest() for _, _, bytes_ in hit.values())
    told = lookups(caplog)
    assert told[0].startswith("loaded weights from disk; the weight cache is off")
    assert told[1].startswith("loaded weights from disk, published as generation")
    assert told[2].startswith("mapped ")
