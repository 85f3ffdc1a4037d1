"""Tensor-parallel ranks: each loads and publishes its own part; together they are the original (B20 vi, B22)."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fixtures import checkpoints
from tests.readmit.forked import forks
from tests.weightcache.architectures import SIZES
from tests.weightcache.caches import Cache
from tests.weightcache.models import bytes_of
from tests.weightcache.rank import IDS
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed.tensor_parallel import apply_tensor_parallelism
from transformers.utils import logging

from weightcache.checkpoint import Checkpoint, TensorInfo
from weightcache.errors import ConfigError
from weightcache.integrations.transformers import from_pretrained, skeleton
from weightcache.integrations.transformers_form import Form
from weightcache.sharding import plan_tensors

logging.disable_progress_bar()

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 4},  # whose files hold each expert's tensors by themselves
}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(checkpoints.SEED)
    config = AutoConfig.for_model(request.param, **SIZES | {"num_key_value_heads": 4} | ARCHITECTURES[request.param])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder, max_shard_size=sum(p.nbytes for p in model.parameters()) * 2 // 3)
    return folder


def whole_again(ranks: list[Any], whole: Any, block: tuple[int, int] | None = None) -> dict[str, torch.Tensor]:
    """A model's parameters, put together from its ranks' by the plan of the whole model."""
    parameters = dict(whole.named_parameters())
    stored = {torch.float8_e4m3fn: "F8_E4M3", torch.float32: "F32", torch.bfloat16: "BF16"}
    tensors = {name: TensorInfo("", stored[it.dtype], tuple(it.shape), 0, 0) for name, it in parameters.items()}
    plan = plan_tensors(tensors, whole.tp_plan, len(ranks), block)
    shards = [dict(rank.named_parameters(remove_duplicate=False)) for rank in ranks]
    return {name: plan.unshard(name, [each[name] for each in shards]) for name in parameters}


def as_bytes(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: bytes_of(it) for name, it in tensors.items()}


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_the_ranks_published_parts_are_the_original(folder: Path, ours: Cache, tp_size: int) -> None:
    for rank in range(tp_size):
        _, outcome = from_pretrained(folder, mode="client", socket=ours.socket, tp_size=tp_size, tp_rank=rank)
        assert outcome.generation is not None, outcome.private_because
    ranks = []
    for rank in range(tp_size):
        model, outcome = from_pretrained(folder, mode="client", socket=ours.socket, tp_size=tp_size, tp_rank=rank)
        assert outcome.path == "hit"
        ranks.append(model)
    whole = AutoModelForCausalLM.from_pretrained(folder)
    assert as_bytes(whole_again(ranks, whole)) == as_bytes(dict(whole.named_parameters()))
    own = {rank: model.model.layers[0].self_attn.q_proj.weight for rank, model in enumerate(ranks)}
    assert {tuple(weight.shape) for weight in own.values()} == {(64 // tp_size, 64)}
    assert len({tuple(weight.flatten().tolist()) for weight in own.values()}) == tp_size, "a rank holds another's part"
    published = {each["config"]["tp_rank"] for each in ours.generations() if each["config"]["tp_size"] == tp_size}
    assert published == set(range(tp_size))


@pytest.mark.parametrize("tp_size", [2, 4])
def test_the_parts_are_those_of_transformers_own_tensor_parallelism(folder: Path, tp_size: int) -> None:
    if "llama" in folder.name:  # its head is tied, which transformers' own way of sharing a loaded model out is not for
        folder = checkpoints.plain(folder / "untied")
    for rank in range(tp_size):
        theirs = AutoModelForCausalLM.from_pretrained(folder).requires_grad_(False)
        distributed.init_process_group("fake", rank=rank, world_size=tp_size, store=FakeStore())
        try:
            plan = theirs._expand_parallel_plan(dict(theirs.tp_plan))
            apply_tensor_parallelism(theirs, init_device_mesh("cpu", (tp_size,)), plan)
            parts = {name: getattr(it, "_local_tensor", it) for name, it in theirs.named_parameters()}
        finally:
            distributed.destroy_process_group()
        ours, _ = from_pretrained(folder, tp_size=tp_size, tp_rank=rank)
        assert as_bytes(dict(ours.named_parameters())) == as_bytes(parts)


def test_two_ranks_run_together_on_what_they_map(folder: Path, ours: Cache, tmp_path: Path) -> None:
    for rank in range(2):
        from_pretrained(folder, mode="client", socket=ours.socket, dtype="float32", tp_size=2, tp_rank=rank)
    command = [sys.executable, "-m", "tests.weightcache.rank", str(folder), str(ours.socket)]
    ranks = [
        forks().popen([*command, str(rank), str(tmp_path / "meeting")], stdout=subprocess.PIPE) for rank in range(2)
    ]
    said = [json.loads(rank.communicate(timeout=240)[0]) for rank in ranks]
    assert [path for path, _ in said] == ["hit", "hit"]
    assert said[0][1] == said[1][1]
    whole, _ = from_pretrained(folder, dtype="float32")
    with torch.inference_mode():
        assert torch.allclose(torch.tensor(said[0][1]), whole(IDS).logits, atol=1e-5)


def test_one_command_loads_all_ranks(ours: Cache, tmp_path: Path) -> None:
    folder = checkpoints.fp8(tmp_path / "t")
    done = forks().readmit("cache", "load", str(folder), "--tp-size", "2", "--json", env=ours.environment)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["ranks"]) == 2
    ranks = []
    for rank in range(2):
        model, outcome = from_pretrained(folder, mode="client", socket=ours.socket, tp_size=2, tp_rank=rank)
        assert outcome.path == "hit"
        ranks.append(model)
    whole, _ = from_pretrained(folder)
    again = whole_again(ranks, whole, checkpoints.BLOCK)
    assert as_bytes(again) == as_bytes(dict(whole.named_parameters()))
    for name, tensor in Checkpoint.open(folder).read():
        assert again[name].view(torch.uint8).equal(tensor.view(torch.uint8)), name
    lookups = [event for event in ours.lookups() if event.attributes["config"]["model_path"] == str(folder)]
    assert [(event.name, event.rank) for event in lookups] == [("hit", 0), ("hit", 1), ("off", None)]


def test_what_cannot_be_cut_is_said_before_anything_is_loaded(ours: Cache, tmp_path: Path) -> None:
    folder = checkpoints.fp8(tmp_path / "t")
    done = forks().readmit("cache", "preflight", str(folder), "--tp-size", "4", "--json", env=ours.environment)
    assert done.returncode == 2
    told = json.loads(done.stderr)
    assert (told["kind"], told["reason"], told["width"]) == ("config", "shard_block_mismatch", 64)
    assert "q_proj" in told["layer"]
    for shard in checkpoints.SHARDS:  # nothing of them is needed to say so
        (folder / shard).unlink()
    with pytest.raises(ConfigError, match="inside a block"):
        from_pretrained(folder, mode="client", socket=ours.socket, tp_size=4, tp_rank=1)


def test_no_head_is_cut_in_two(tmp_path: Path) -> None:
    folder = checkpoints.plain(tmp_path / "t", num_attention_heads=8, num_key_value_heads=2, head_dim=32)
    with pytest.raises(ConfigError, match="k_proj") as caught:
        from_pretrained(folder, tp_size=4)
    assert (caught.value.reason, caught.value.found) == ("shard_mismatch", "2 heads")


@pytest.mark.parametrize(("tp_size", "tp_rank"), [(2, 2), (2, -1), (0, 0)])
def test_there_is_no_such_rank(tmp_path: Path, tp_size: int, tp_rank: int) -> None:
    with pytest.raises(ConfigError) as caught:
        from_pretrained(checkpoints.plain(tmp_path / "t"), tp_size=tp_size, tp_rank=tp_rank)
    assert caught.value.reason == "tp_rank"


def test_weights_of_another_kind_are_not_cut(tmp_path: Path) -> None:
    folder = checkpoints.plain(tmp_path / "t", quantization_config={"quant_method": "awq"})
    with pytest.raises(ConfigError) as caught:
        from_pretrained(folder, tp_size=2)
    assert caught.value.reason == "shard_quantization"


def test_an_architecture_without_a_plan_is_not_cut(tmp_path: Path) -> None:
    config = AutoConfig.for_model("gpt2", n_embd=64, n_layer=1, n_head=4, vocab_size=256)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "t")
    with pytest.raises(ConfigError, match="GPT2LMHeadModel") as caught:
        from_pretrained(tmp_path / "t", tp_size=2)
    assert caught.value.reason == "shard_plan"


def test_layers_that_are_rearranged_as_they_load_are_not_cut(tmp_path: Path) -> None:
    from weightcache.sharding import Target, plan_shards

    checkpoint = Checkpoint.open(checkpoints.plain(tmp_path / "t"))
    name = "model.layers.0.self_attn.q_proj.weight"
    for target in (Target(name, rearranged="Transpose"), Target(name, merged=True)):
        with pytest.raises(ConfigError) as caught:
            plan_shards(checkpoint, {"layers.*.self_attn.q_proj": "colwise"}, 2, targets={name: target})
        assert caught.value.reason == "shard_style"


def test_a_rank_reads_its_own_bytes_only(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(checkpoints.plain(tmp_path / "t"))
    plan = Form.of(checkpoint.folder, 4, 3).plan(skeleton(checkpoint.folder, tp_size=4, tp_rank=3), checkpoint)
    assert plan is not None

    def read_so_far() -> int:
        with open(f"/proc/{os.getpid()}/io") as file:
            return int(file.readline().split()[1])

    list(checkpoint.read_parts(plan.parts(3)))  # whatever is imported for it
    before = read_so_far()
    parts = dict(checkpoint.read_parts(plan.parts(3)))
    read = read_so_far() - before
    held = sum(tensor.nbytes for tensor in parts.values())
    assert held <= read < held + 64 * 1024
    assert held < checkpoint.total_bytes * 0.27
    for name, tensor in checkpoint.read():
        assert parts[name].equal(plan.shard(name, tensor, 3)), name
