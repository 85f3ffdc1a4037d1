"""Decoding with a cache of fixed size says what one that grows does. The captured graph itself was run on a GPU."""

from typing import Any

import pytest
import torch
from tests.weightcache.architectures import SIZES
from transformers import AutoConfig, AutoModelForCausalLM

from readmit.decoding import FEW_ROWS, GrowingDecoder, StaticDecoder
from readmit.engine import on_gpu
from weightcache.journal import Journal

MODELS: dict[str, dict[str, Any]] = {"llama": {}, "gemma2": {"head_dim": 16, "sliding_window": 8}}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(request.param, **SIZES | {"max_position_embeddings": 64} | MODELS[request.param])
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def decode(decoder: Any, prompt: list[int], count: int) -> tuple[list[int], list[torch.Tensor]]:
    """Greedy tokens, and the logits they were chosen by."""
    logits = [decoder.prefill(prompt)]
    tokens = []
    for _ in range(count):
        tokens.append(int(logits[-1].argmax()))
        logits.append(decoder.step(tokens[-1]))
    return tokens, logits


def test_a_cache_of_fixed_size_gives_the_same_answers_one_after_the_other(model: Any) -> None:
    static, growing = StaticDecoder(model), GrowingDecoder(model)
    static.warm_up()
    static.allocate()
    assert static.context == growing.context == 64
    for prompt in ([3, 14, 15, 92, 65], [27], list(range(30))):
        tokens, logits = decode(static, prompt, 20)
        expected_tokens, expected = decode(growing, prompt, 20)
        assert tokens == expected_tokens
        for ours, theirs in zip(logits, expected, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_a_sequence_may_fill_the_cache_to_its_end(model: Any) -> None:
    tokens, _ = decode(StaticDecoder(model, 32), list(range(20)), 12)
    assert tokens == decode(GrowingDecoder(model), list(range(20)), 12)[0]


@pytest.mark.parametrize("rows", [1, 5, FEW_ROWS, FEW_ROWS + 1])
def test_weights_as_the_left_factor_give_the_same(rows: int) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **SIZES | {"max_position_embeddings": 2 * FEW_ROWS})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    prompt = [3 * number % 90 for number in range(rows)]
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([prompt])).logits[0, -1].float()
    torch.testing.assert_close(GrowingDecoder(model).prefill(prompt), expected, rtol=0.05, atol=0.05)


def test_getting_ready_is_journaled_phase_by_phase(model: Any, tmp_path: Any) -> None:
    journal = Journal(tmp_path / "journal.sqlite3")
    on_gpu(model, journal, capture=False)
    assert [event.name for event in journal.query("WHERE kind = 'phase_end'")] == ["kernel_warmup", "cache_alloc"]
