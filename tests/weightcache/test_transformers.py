"""Models of transformers through the weight cache: equal in every tensor to what transformers loads by itself."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from weightcache.errors import CheckpointError, ConfigError
from weightcache.integrations.transformers import from_pretrained

logging.disable_progress_bar()

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "gemma2": {"head_dim": 16},
    "mixtral": {"num_local_experts": 4},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
}


def make(folder: Path, architecture: str = "llama", seed: int = 0) -> Path:
    """A random checkpoint of two shards."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(architecture, **SIZES | ARCHITECTURES[architecture])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size=sum(p.nbytes for p in model.parameters()) * 2 // 3)
    assert len(list(folder.glob("*.safetensors"))) >= 2
    return folder


@pytest.fixture(params=ARCHITECTURES)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make(tmp_path / request.param, request.param)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return make(tmp_path / "llama")


def tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def facts(model: Any) -> dict[str, tuple[object, ...]]:
    """Everything two equal models have in common, tensor by tensor."""
    return {
        name: (type(it), it.dtype, tuple(it.shape), it.stride(), it.reshape(-1).view(torch.uint8).tolist())
        for name, it in tensors(model)
    }


def test_off_loads_what_transformers_loads(checkpoint: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(checkpoint)
    model, outcome = from_pretrained(checkpoint)
    assert outcome.path == "off"
    assert facts(model) == facts(plain)
    assert model.name_or_path == plain.name_or_path
    assert model.config.to_dict() == plain.config.to_dict()
    assert model.generation_config.to_dict() == plain.generation_config.to_dict()
    ids = torch.arange(8)[None]
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, plain(ids).logits)


def test_the_model_is_ready_for_inference(llama: Path) -> None:
    model, _ = from_pretrained(llama)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not any(tensor.is_meta for _, tensor in tensors(model))


def test_another_dtype_can_be_asked_for(llama: Path) -> None:
    model, _ = from_pretrained(llama, dtype="float32")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("dtype", ["bfloat61", "int8", "nn"])
def test_a_dtype_that_is_none_is_refused(llama: Path, dtype: str) -> None:
    with pytest.raises(ConfigError, match=dtype) as caught:
        from_pretrained(llama, dtype=dtype)
    assert caught.value.reason == "dtype"


def test_a_tensor_that_is_in_no_file_is_named(llama: Path) -> None:
    drop(llama, "model.layers.1.mlp.up_proj.weight")
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight") as caught:
        from_pretrained(llama)
    assert caught.value.reason == "tensor_missing"


def test_a_config_of_another_size_is_refused(llama: Path) -> None:
    edit(llama / "config.json", intermediate_size=96)
    with pytest.raises(CheckpointError, match="expected") as caught:
        from_pretrained(llama)
    assert caught.value.reason == "geometry"
    assert (caught.value.expected, caught.value.found) == ([64, 96], [64, 128])


@pytest.mark.parametrize(
    "change", [{"model_type": "no_such_model"}, {"model_type": "vit"}, {"num_attention_heads": "four"}]
)
def test_an_architecture_that_cannot_be_built_is_refused(llama: Path, change: dict[str, object]) -> None:
    edit(llama / "config.json", **change)
    with pytest.raises(ConfigError, match=str(llama)) as caught:
        from_pretrained(llama)
    assert caught.value.reason == "architecture"


def drop(folder: Path, name: str) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shard = folder / index["weight_map"].pop(name)
    content = load_file(shard)
    del content[name]
    save_file(content, shard, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
