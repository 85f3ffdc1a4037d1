"""The same bytes and the same answers from vLLM whether its weights come from disk or from the cache."""

import functools
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engines import checkpoints
from tests.fixtures.checkpoints import fp8
from vllm import LLM, SamplingParams

from weightcache.integrations import vllm_loader

PROMPTS = [[1, 5, 9, 30, 77, 200], [1, 400, 3], [1, *range(40, 140)]]
State = dict[str, tuple[str, tuple[int, ...], str]]
MODELS: dict[str, Callable[[Path], Path]] = {
    name: functools.partial(checkpoints.write, name) for name in checkpoints.ARCHITECTURES
}
if torch.cpu._is_amx_tile_supported():  # vLLM has no other kernel for it on a CPU
    MODELS["llama_block_fp8"] = fp8


@pytest.fixture(scope="module", params=list(MODELS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODELS[request.param](tmp_path_factory.mktemp(request.param) / request.param)


def options(socket: Path, mode: str = "client") -> dict[str, Any]:
    return {"load_format": "weightcache", "model_loader_extra_config": {"mode": mode, "socket": str(socket)}}


def engine(checkpoint: Path, **arguments: Any) -> Any:
    # vLLM sets it for processes that it will start; its next engine's look at the model's class would fail on it.
    os.environ.pop("LD_PRELOAD", None)
    return LLM(
        str(checkpoint),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
        disable_log_stats=True,
        **arguments,
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
