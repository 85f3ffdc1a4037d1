"""Models of transformers through the weight cache: equal in every tensor to what transformers loads by itself."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.fixtures.daemon import running_daemon
from tests.readmit.forked import forks
from tests.weightcache.architectures import SIZES
from tests.weightcache.models import bytes_of
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from weightcache.errors import CheckpointError, ConfigError, UnsupportedQuantForIPCError
from weightcache.identity import Identity, digest_of
from weightcache.integrations.transformers import from_pretrained
from weightcache.journal import Journal

logging.disable_progress_bar()

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


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("READMIT_STATE", str(tmp_path / "state"))


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Path]:
    """The socket of a running weight cache daemon."""
    with running_daemon(tmp_path / "cache" / "cache.sock") as socket:
        yield socket


def run(module: str, *words: object) -> tuple[int, str, str]:
    """The exit status of ``python -m MODULE`` and both its outputs."""
    command = [sys.executable, "-m", module, *map(str, words)]
    process = forks().popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    output, errors = process.communicate(timeout=240)
    return process.returncode, output, errors


def load_worker(model: Path, socket: Path) -> tuple[int, str]:
    """The load worker's exit status, and what it says of what is wrong."""
    status, _, said = run("weightcache.integrations.transformers", model, "--socket", socket)
    return status, said


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
    return {name: (type(it), it.dtype, tuple(it.shape), it.stride(), bytes_of(it)) for name, it in tensors(model)}


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


@pytest.mark.parametrize("device", ["cuda:99", "gpu"])
def test_a_device_that_is_none_is_refused(llama: Path, device: str) -> None:
    with pytest.raises(ConfigError, match=device) as caught:
        from_pretrained(llama, device=device)
    assert caught.value.reason == "device"


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


def test_a_hit_is_what_transformers_loads(checkpoint: Path, daemon: Path) -> None:
    status, said = load_worker(checkpoint, daemon)
    assert status == 0, said
    model, outcome = from_pretrained(checkpoint, mode="client", socket=daemon)
    plain = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert outcome.path == "hit"
    assert facts(model) == facts(plain)
    assert model.generation_config.to_dict() == plain.generation_config.to_dict()
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    ids = torch.arange(8)[None]
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, plain(ids).logits)


def test_a_first_load_publishes_and_stays_what_it_was(llama: Path, daemon: Path) -> None:
    model, outcome = from_pretrained(llama, mode="client", socket=daemon)
    assert (outcome.path, outcome.reason) == ("miss", "absent")
    assert outcome.generation
    assert facts(model) == facts(AutoModelForCausalLM.from_pretrained(llama))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_large_unknown_checkpoint_is_read_once(llama: Path, daemon: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A limit of 0 makes this checkpoint as unaffordable to hash beforehand as a terabyte is.
    unaffordable = partial(digest_of, hash_limit_bytes=0)
    monkeypatch.setattr("weightcache.integrations.transformers.digest_of", unaffordable)
    assert unaffordable(llama).digest is None
    _, first = from_pretrained(llama, mode="client", socket=daemon)
    assert (first.path, first.reason) == ("miss", "absent")
    assert first.generation is not None, first.private_because
    assert unaffordable(llama).digest == digest_of(llama).digest
    _, second = from_pretrained(llama, mode="client", socket=daemon)
    assert (second.path, second.generation) == ("hit", first.generation)


def test_writing_into_mapped_weights_harms_nobody_else(llama: Path, daemon: Path) -> None:
    first, _ = from_pretrained(llama, mode="client", socket=daemon)
    for tensor in (*first.parameters(), *first.buffers()):
        tensor.zero_()
    second, outcome = from_pretrained(llama, mode="client", socket=daemon)
    assert outcome.path == "hit"
    assert facts(second) == facts(AutoModelForCausalLM.from_pretrained(llama))


def test_other_bytes_under_the_same_headers_are_another_model(llama: Path, daemon: Path) -> None:
    from_pretrained(llama, mode="client", socket=daemon)
    make(llama, seed=1)
    model, outcome = from_pretrained(llama, mode="client", socket=daemon)
    assert (outcome.path, outcome.reason, outcome.detail) == ("miss", "fingerprint", "checkpoint_digest")
    assert facts(model) == facts(AutoModelForCausalLM.from_pretrained(llama))


def test_the_same_files_under_another_config_are_another_model(llama: Path, daemon: Path) -> None:
    """Rotary frequencies are in no file: they come from the config, and with the weights out of the cache."""
    from_pretrained(llama, mode="client", socket=daemon)
    edit(llama / "config.json", rope_parameters={"rope_theta": 500_000.0, "rope_type": "default"})
    model, outcome = from_pretrained(llama, mode="client", socket=daemon)
    assert (outcome.path, outcome.reason, outcome.detail) == ("miss", "fingerprint", "kernel_backend")
    assert facts(model) == facts(AutoModelForCausalLM.from_pretrained(llama))
    edit(llama / "config.json", transformers_version="5.0", _name_or_path="elsewhere")
    assert from_pretrained(llama, mode="client", socket=daemon)[1].path == "hit"


def test_a_moved_copy_is_the_same_model(llama: Path, daemon: Path, tmp_path: Path) -> None:
    from_pretrained(llama, mode="client", socket=daemon)
    _, outcome = from_pretrained(shutil.copytree(llama, tmp_path / "moved"), mode="client", socket=daemon)
    assert outcome.path == "hit"


def test_another_dtype_is_another_model(llama: Path, daemon: Path) -> None:
    from_pretrained(llama, mode="client", socket=daemon)
    model, outcome = from_pretrained(llama, mode="client", socket=daemon, dtype="float32")
    assert (outcome.reason, outcome.detail) == ("fingerprint", "dtype")
    assert model.dtype == torch.float32


def test_resident_weights_outlive_their_files(llama: Path, daemon: Path) -> None:
    model, _ = from_pretrained(llama, mode="client", socket=daemon)
    for shard in llama.glob("*.safetensors"):
        shard.unlink()
    again, outcome = from_pretrained(llama, mode="client", socket=daemon)
    assert outcome.path == "hit"
    assert facts(again) == facts(model)


def test_without_a_daemon_it_loads_from_disk_and_says_so(llama: Path, tmp_path: Path) -> None:
    model, outcome = from_pretrained(llama, mode="client", socket=tmp_path / "none.sock")
    assert (outcome.path, outcome.reason, outcome.generation) == ("miss", "no_daemon", None)
    assert facts(model) == facts(AutoModelForCausalLM.from_pretrained(llama))


def test_mode_daemon_starts_one_that_loads(llama: Path, tmp_path: Path) -> None:
    _, said, errors = run("tests.weightcache.insisting", llama, tmp_path / "cache" / "cache.sock")
    assert said.split() == ["absent", "True", "None"], errors


def test_damaged_files_are_never_published(llama: Path, daemon: Path) -> None:
    shard = sorted(llama.glob("*.safetensors"))[-1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    status, said = load_worker(llama, daemon)
    assert status == 1
    assert shard.name in said
    assert "Traceback" not in said
    shard.write_bytes(content)
    _, outcome = from_pretrained(llama, mode="client", socket=daemon)
    assert (outcome.path, outcome.reason) == ("miss", "absent")


def test_files_that_change_under_the_load_are_refused(
    llama: Path, daemon: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remembered = Identity("0" * 64, "remembered")
    monkeypatch.setattr("weightcache.integrations.transformers.digest_of", lambda folder: remembered)
    with pytest.raises(CheckpointError, match="changed while the model was loaded") as caught:
        from_pretrained(llama, mode="client", socket=daemon)
    assert caught.value.reason == "changed"


def test_a_load_worker_is_told_which_gpu_is_the_current_one(
    llama: Path, daemon: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("torch.cuda.current_device", lambda: 1)
    asked: dict[str, Any] = {}

    def attach(*_: object, **arguments: Any) -> None:
        asked.update(arguments)
        raise InterruptedError

    monkeypatch.setattr("weightcache.integrations.transformers.attach", attach)
    with pytest.raises(InterruptedError):
        from_pretrained(llama, mode="daemon", socket=daemon, device="cuda")
    assert (asked["device"], "--device=cuda:1" in asked["load_command"]) == (1, True)


def test_a_quantisation_that_may_not_travel_is_never_shared(llama: Path, daemon: Path, tmp_path: Path) -> None:
    edit(llama / "config.json", quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128})
    journal = Journal(tmp_path / "journal.sqlite3")
    with pytest.raises(UnsupportedQuantForIPCError, match="mode off"):
        from_pretrained(llama, mode="daemon", socket=daemon, journal=journal)
    (lookup,) = journal.query("WHERE kind = 'lookup'")
    told = lookup.attributes
    assert (lookup.name, told["reason"], told["detail"]) == ("miss", "quant_not_allowed", "gptq")


def drop(folder: Path, name: str) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shard = folder / index["weight_map"].pop(name)
    content = load_file(shard)
    del content[name]
    save_file(content, shard, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
