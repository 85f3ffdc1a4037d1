"""Tensor-parallel shards: cut before loading, put together again to the same bytes (bug log B20 vi, B22)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fixtures import checkpoints

from weightcache.checkpoint import Checkpoint
from weightcache.digest import tensor_memory
from weightcache.errors import ConfigError
from weightcache.sharding import Plan, plan_shards

STYLES = {
    "embed_tokens": "embedding_rowwise",
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise_split_input",
    "layers.*.input_layernorm": "replicated_with_grad_allreduce",
    "lm_head": "colwise_gather_output",
}
BLOCK = checkpoints.BLOCK
Q = "model.layers.0.self_attn.q_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"


def one_file(folder: Path, tensors: dict[str, checkpoints.Tensor], **settings: Any) -> Checkpoint:
    config = checkpoints.config(quantization_config=checkpoints.fp8_config(), **settings)
    return Checkpoint.open(checkpoints.write(folder, {"model.safetensors": tensors}, config, index=False))


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor_memory(tensor.contiguous()))


def assert_whole_again(checkpoint: Checkpoint, plan: Plan) -> None:
    for name, tensor in checkpoint.read():
        shards = [plan.shard(name, tensor, rank) for rank in range(plan.tp_size)]
        again = plan.unshard(name, shards)
        assert again.shape == tensor.shape
        assert again.dtype == tensor.dtype
        assert raw(again) == raw(tensor), name
        if name in plan.splits:
            assert sum(shard.numel() for shard in shards) == tensor.numel()
            assert len({raw(shard) for shard in shards}) == plan.tp_size, f"two ranks hold the same part of {name}"


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_unquantised_shards_are_the_whole(tmp_path: Path, tp_size: int) -> None:
    checkpoint = Checkpoint.open(checkpoints.plain(tmp_path / "t"))
    plan = plan_shards(checkpoint, STYLES, tp_size)
    assert len(plan.splits) == 2 * 7 + 2
    assert_whole_again(checkpoint, plan)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_block_fp8_shards_are_the_whole_scales_too(tmp_path: Path, tp_size: int) -> None:
    checkpoint = Checkpoint.open(checkpoints.fp8(tmp_path / "t"))
    plan = plan_shards(checkpoint, STYLES, tp_size, BLOCK)
    assert len(plan.splits) == 2 * 7 * 2 + 2
    assert_whole_again(checkpoint, plan)


def test_a_rank_holds_its_own_rows_or_columns(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(checkpoints.plain(tmp_path / "t"))
    tensors = dict(checkpoint.read())
    plan = plan_shards(checkpoint, STYLES, 2)
    assert plan.shard(Q, tensors[Q], 1).equal(tensors[Q][128:])
    assert plan.shard(DOWN, tensors[DOWN], 1).equal(tensors[DOWN][:, 256:])
    norm = "model.layers.0.input_layernorm.weight"
    assert plan.shard(norm, tensors[norm], 1) is tensors[norm]


def dequantised(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    rows, columns = weight.shape
    factors = scale.repeat_interleave(BLOCK[0], 0)[:rows].repeat_interleave(BLOCK[1], 1)[:, :columns]
    return weight.float() * factors


@pytest.mark.parametrize(("name", "dim"), [(Q, 0), (DOWN, 1)])
def test_shards_dequantise_to_the_same_numbers(tmp_path: Path, name: str, dim: int) -> None:
    checkpoint = Checkpoint.open(checkpoints.fp8(tmp_path / "t"))
    tensors = dict(checkpoint.read())
    plan = plan_shards(checkpoint, STYLES, 2, BLOCK)
    scale = f"{name}_scale_inv"
    expected = dequantised(tensors[name], tensors[scale]).chunk(2, dim)
    for rank in range(2):
        weight, factors = (plan.shard(each, tensors[each], rank) for each in (name, scale))
        assert dequantised(weight, factors).equal(expected[rank])


def test_a_short_last_block_dequantises_to_the_same_numbers(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj"
    checkpoint = one_file(tmp_path / "t", checkpoints.linear(name, 256, 320, quantized=True))
    tensors = dict(checkpoint.read())
    plan = plan_shards(checkpoint, STYLES, 2, BLOCK)  # cut by rows; the short block lies along the columns
    expected = dequantised(tensors[Q], tensors[f"{Q}_scale_inv"])
    parts = [
        dequantised(*(plan.shard(each, tensors[each], rank) for each in (Q, f"{Q}_scale_inv"))) for rank in range(2)
    ]
    assert torch.cat(parts).equal(expected)
    assert_whole_again(checkpoint, plan)


def mismatch(checkpoint: Checkpoint, tp_size: int, styles: dict[str, str] = STYLES, block: Any = BLOCK) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        plan_shards(checkpoint, styles, tp_size, block)
    return caught.value


def test_a_cut_inside_a_block_is_refused_before_loading(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(checkpoints.fp8(tmp_path / "t"))
    for name in checkpoints.SHARDS:  # nothing of them is needed
        (tmp_path / "t" / name).unlink()
    error = mismatch(checkpoint, 4)
    assert error.reason == "shard_block_mismatch"
    where = {"layer": Q, "tensor": Q, "file": checkpoints.SHARDS[0]}
    assert error.data == {**where, "width": 64, "block": BLOCK}
    assert "64" in str(error)
    assert "128" in str(error)


def test_the_halves_of_a_fused_layer_are_cut_each_by_itself(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.gate_up_proj"
    checkpoint = one_file(tmp_path / "t", checkpoints.linear(name, 512, 256, quantized=True))
    plan = plan_shards(checkpoint, {"layers.*.mlp.gate_up_proj": "packed_colwise"}, 2, BLOCK)
    assert plan.ranges(f"{name}.weight", 1) == ((128, 256), (384, 512))
    assert plan.ranges(f"{name}.weight_scale_inv", 1) == ((1, 2), (3, 4))
    assert_whole_again(checkpoint, plan)


@pytest.mark.parametrize(("half", "width"), [(320, 160), (128, 64)])
def test_a_fused_width_that_divides_while_its_halves_do_not_is_refused(tmp_path: Path, half: int, width: int) -> None:
    name = "model.layers.0.mlp.gate_up_proj"
    checkpoint = one_file(tmp_path / "t", checkpoints.linear(name, 2 * half, 256, quantized=True))
    styles = {"layers.*.mlp.gate_up_proj": "packed_colwise"}
    assert_whole_again(checkpoint, plan_shards(checkpoint, styles, 1, BLOCK))
    error = mismatch(checkpoint, 2, styles)
    assert error.reason == "shard_block_mismatch"
    assert error.data["width"] == width


@pytest.mark.parametrize("tp_size", [2, 4])
def test_fused_experts_are_cut_along_their_rows(tmp_path: Path, tp_size: int) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors = {
        name: checkpoints.tensor(name, "F8_E4M3", 3, 1024, 256),
        f"{name}_scale_inv": checkpoints.tensor(f"{name}_scale_inv", "F32", 3, 8, 2),
    }
    checkpoint = one_file(tmp_path / "t", tensors)
    plan = plan_shards(checkpoint, {"layers.*.mlp.experts.gate_up_proj": "packed_colwise"}, tp_size, BLOCK)
    assert set(plan.splits) == set(tensors)
    assert_whole_again(checkpoint, plan)


@pytest.mark.parametrize("block", [None, BLOCK])
def test_a_width_that_does_not_divide_is_refused(tmp_path: Path, block: Any) -> None:
    checkpoint = Checkpoint.open(checkpoints.plain(tmp_path / "t"))
    error = mismatch(checkpoint, 3, block=block)
    assert error.reason == "shard_mismatch"
    assert "3 ranks" in str(error)


def test_a_bias_goes_with_the_rows_and_stays_whole_beside_columns(tmp_path: Path) -> None:
    q, o = "model.layers.0.self_attn.q_proj.bias", "model.layers.0.self_attn.o_proj.bias"
    checkpoint = one_file(tmp_path / "t", {name: checkpoints.tensor(name, "BF16", 256) for name in (q, o)})
    plan = plan_shards(checkpoint, STYLES, 2)
    assert plan.ranges(q, 1) == ((128, 256),)
    assert plan.ranges(o, 1) is None
    assert_whole_again(checkpoint, plan)


@pytest.mark.parametrize(
    "styles", [STYLES, {**STYLES, "lm_head": "replicate"}, {**STYLES, "embed_tokens": "replicate"}]
)
def test_tied_embeddings_stay_one_tensor_on_every_rank(tmp_path: Path, styles: dict[str, str]) -> None:
    shards = checkpoints.decoder(head=False)
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    shards[checkpoints.SHARDS[1]][head] = shards[checkpoints.SHARDS[0]][embedding]
    folder = checkpoints.write(tmp_path / "t", shards, checkpoints.config(tie_word_embeddings=True))
    checkpoint = Checkpoint.open(folder)
    tensors = dict(checkpoint.read())
    plan = plan_shards(checkpoint, styles, 2)
    for rank in range(2):
        assert plan.ranges(embedding, rank) == plan.ranges(head, rank)
        assert plan.shard(embedding, tensors[embedding], rank).equal(plan.shard(head, tensors[head], rank))


def test_an_unknown_style_is_refused(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(checkpoints.plain(tmp_path / "t"))
    error = mismatch(checkpoint, 2, {"layers.*.mlp.up_proj": "grouped_gemm"})
    assert error.reason == "shard_style"
    assert "layers.*.mlp.up_proj" in str(error)


def test_the_plans_of_transformers_are_understood() -> None:
    from transformers import LlamaConfig, Phi3Config, Qwen3MoeConfig

    from weightcache.sharding import _split_of

    for config in (LlamaConfig(), Phi3Config(), Qwen3MoeConfig()):
        assert any(_split_of(pattern, style) for pattern, style in config.base_model_tp_plan.items())
