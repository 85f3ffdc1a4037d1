"""Block-wise FP8 models of transformers: shared as they are stored, and exact (bug log B17, B19, B21)."""

import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.fixtures import checkpoints
from tests.readmit.forked import forks
from tests.weightcache.caches import Cache
from transformers import AutoConfig, AutoModelForCausalLM

from weightcache.block_scale import dequantize
from weightcache.checkpoint import Checkpoint, Folder
from weightcache.errors import CheckpointError, UnsupportedQuantForIPCError
from weightcache.integrations.block_fp8 import BlockFP8Linear
from weightcache.integrations.transformers import from_pretrained
from weightcache.vocabulary import MISS_REASONS

FAIL = dict.fromkeys(MISS_REASONS, "fail")
IDS = torch.arange(12)[None]


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(IDS).logits
    return found


def dequantised(folder: Path) -> torch.nn.Module:
    """The model that transformers builds of the same weights once they are dequantised."""
    tensors = dict(Checkpoint.open(folder).read())
    plain = {
        name: dequantize(it, tensors[f"{name}_scale_inv"], checkpoints.BLOCK, torch.bfloat16)
        if it.dtype == torch.float8_e4m3fn
        else it
        for name, it in tensors.items()
        if not name.endswith("_scale_inv")
    }
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    kind = type(AutoModelForCausalLM.from_config(config))
    model: torch.nn.Module = kind.from_pretrained(None, config=config, state_dict=plain, dtype=torch.bfloat16)
    return model.eval()


def test_a_hit_holds_the_stored_bytes_and_answers_exactly(ours: Cache, tmp_path: Path) -> None:
    folder = checkpoints.fp8(tmp_path / "t")
    command = [sys.executable, "-m", "weightcache.integrations.transformers", str(folder)]
    worker = forks().popen(command, env=ours.environment, stderr=subprocess.PIPE)
    _, said = worker.communicate(timeout=240)
    assert worker.returncode == 0, said
    model, outcome = from_pretrained(folder, mode="client", socket=ours.socket, policies=FAIL)
    assert outcome.path == "hit"
    parameters = dict(model.named_parameters())
    stored = dict(Checkpoint.open(folder).read())
    assert parameters.keys() == stored.keys()
    for name, tensor in stored.items():
        assert parameters[name].dtype == tensor.dtype
        assert parameters[name].view(torch.uint8).equal(tensor.view(torch.uint8)), name
    assert logits(model).equal(logits(dequantised(folder)))
    assert outcome.bytes < sum(tensor.numel() * 2 for tensor in stored.values()) * 0.75, "half the bytes of bf16"
    assert ours.generations()[-1]["config"]["quant_method"] == "fp8"


@pytest.mark.parametrize("listed", ["model.layers.0.self_attn", "self_attn", "qkv_proj"])
def test_what_the_list_leaves_out_stays_plain(ours: Cache, tmp_path: Path, listed: str) -> None:
    plain = {"self_attn": ("self_attn",), "qkv_proj": ("q_proj", "k_proj", "v_proj")}.get(listed, (f"{listed}.",))
    quantization = checkpoints.fp8_config(modules_to_not_convert=[listed, "lm_head"])
    folder = checkpoints.fp8(tmp_path / "t", plain_layers=plain, quantization=quantization)
    first, outcome = from_pretrained(folder, mode="client", socket=ours.socket)
    assert outcome.generation is not None, outcome.private_because
    model, outcome = from_pretrained(folder, mode="client", socket=ours.socket, policies=FAIL)
    for name, module in model.named_modules():
        stored = any(part in f"{name}." for part in plain)
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            assert isinstance(module, BlockFP8Linear) != stored, name
    expected = logits(dequantised(folder))
    assert logits(first).equal(expected)
    assert logits(model).equal(expected)


def refused(folder: Path, ours: Cache) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        from_pretrained(folder, mode="client", socket=ours.socket)
    assert caught.value.reason == "quant_conflict"
    assert str(folder) not in {each["config"]["model_path"] for each in ours.generations()}
    return caught.value


def test_a_kind_of_layer_that_is_plain_everywhere_must_be_listed(ours: Cache, tmp_path: Path) -> None:
    error = refused(checkpoints.fp8(tmp_path / "t", plain_layers=("o_proj",)), ours)
    assert "o_proj" in error.data["tensor"]


def test_files_in_fp8_under_a_plain_config_are_never_converted_in_silence(ours: Cache, tmp_path: Path) -> None:
    shards = checkpoints.decoder(quantized=True)
    error = refused(checkpoints.write(tmp_path / "t", shards, checkpoints.config()), ours)
    assert "F8_E4M3" in str(error)


def test_plain_files_under_an_fp8_config_are_refused(ours: Cache, tmp_path: Path) -> None:
    refused(checkpoints.plain(tmp_path / "t", quantization_config=checkpoints.fp8_config()), ours)


def test_a_scale_that_is_no_number_is_never_published(ours: Cache, tmp_path: Path) -> None:
    shards = checkpoints.decoder(quantized=True)
    name = "model.layers.1.mlp.up_proj.weight_scale_inv"
    scale = shards[checkpoints.SHARDS[1]][name]
    shards[checkpoints.SHARDS[1]][name] = scale._replace(data=struct.pack("<f", float("nan")) + scale.data[4:])
    folder = checkpoints.write(tmp_path / "t", shards, checkpoints.config(quantization_config=checkpoints.fp8_config()))
    assert refused(folder, ours).data["tensor"] == name


def mixture(folder: Path, width: int) -> Path:
    """A mixture of two experts, whose files hold each expert's layers by themselves and the model in one tensor."""
    shards = checkpoints.decoder(quantized=True)
    hidden = checkpoints.HIDDEN
    for number, shard in enumerate(checkpoints.SHARDS):
        block = f"model.layers.{number}.block_sparse_moe"
        tensors = {name: it for name, it in shards[shard].items() if ".mlp." not in name}
        tensors |= checkpoints.linear(f"{block}.gate", 2, hidden)
        for expert in range(2):
            for part, (rows, columns) in {"w1": (width, hidden), "w2": (hidden, width), "w3": (width, hidden)}.items():
                tensors |= checkpoints.linear(f"{block}.experts.{expert}.{part}", rows, columns, quantized=True)
        shards[shard] = tensors
    settings = checkpoints.config(
        model_type="mixtral",
        architectures=["MixtralForCausalLM"],
        num_local_experts=2,
        intermediate_size=width,
        quantization_config=checkpoints.fp8_config(),
    )
    return checkpoints.write(folder, shards, settings)


def test_experts_stay_fp8_too_and_answer_exactly(ours: Cache, tmp_path: Path) -> None:
    folder = mixture(tmp_path / "t", 512)
    from_pretrained(folder, mode="client", socket=ours.socket)
    model, outcome = from_pretrained(folder, mode="client", socket=ours.socket, policies=FAIL)
    assert outcome.path == "hit"
    experts = model.model.layers[1].mlp.experts
    assert experts.gate_up_proj.dtype == experts.down_proj.dtype == torch.float8_e4m3fn
    assert experts.gate_up_proj_scale_inv.shape == (2, 8, 2)
    assert logits(model).equal(logits(dequantised(folder)))
    assert experts.gate_up_proj.dtype == torch.float8_e4m3fn, "and stay so"
    ranks = [from_pretrained(folder, tp_size=2, tp_rank=rank)[0].model.layers[1].mlp.experts for rank in range(2)]
    halves = [torch.cat([it.gate_up_proj.view(torch.uint8).chunk(2, 1)[half] for it in ranks], 1) for half in range(2)]
    assert torch.cat(halves, 1).equal(experts.gate_up_proj.view(torch.uint8))
    assert torch.cat([it.down_proj_scale_inv for it in ranks], 2).equal(experts.down_proj_scale_inv)


def test_experts_whose_halves_share_a_block_are_not_shared(ours: Cache, tmp_path: Path) -> None:
    folder = Folder.open(mixture(tmp_path / "t", 192))
    with pytest.raises(UnsupportedQuantForIPCError, match="gate_up_proj") as caught:
        from_pretrained(folder, mode="daemon", socket=ours.socket)
    assert caught.value.detail == "other"
