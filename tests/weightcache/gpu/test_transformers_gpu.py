"""Models of transformers read into an arena, on memory files in the place of GPU memory."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.weightcache.architectures import SIZES
from tests.weightcache.gpu.drivers import HostDriver
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from weightcache.arena import cuda_vmm
from weightcache.arena.cuda_vmm import CudaVmmMapping
from weightcache.binding import Binding
from weightcache.block_scale import dequantize
from weightcache.checkpoint import Checkpoint, Folder
from weightcache.errors import CheckpointError
from weightcache.integrations import transformers_gpu
from weightcache.integrations.transformers import cache_config, skeleton
from weightcache.integrations.transformers_form import Form
from weightcache.integrations.transformers_gpu import load_onto
from weightcache.journal import Journal
from weightcache.publish import pack

logging.disable_progress_bar()

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "gemma2": {"head_dim": 16},
    "mixtral": {"num_local_experts": 4},
}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> HostDriver:
    driver = HostDriver()
    monkeypatch.setattr(cuda_vmm, "nvidia", lambda: driver)
    return driver


def make(folder: Path, architecture: str) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, **SIZES | MODELS[architecture])
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def load(folder: Path, digest: str | None = None) -> tuple[Any, Any]:
    """The model and the arena that it was read into."""
    opened = Folder.open(folder)
    like = skeleton(opened)
    checkpoint = Checkpoint.open(opened)
    form = Form.of(opened)
    model, found, arena = load_onto(checkpoint, like, form, digest, Journal(None), lambda done, total: None, 0)
    assert found == checkpoint.digest is not None
    return model.eval().requires_grad_(False), arena


def bytes_of(model: Any) -> Iterator[tuple[str, list[int]]]:
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers()):
        yield name, tensor.detach().reshape(-1).view(torch.uint8).tolist()


def attach(folder: Path, model: Any, arena: Any, driver: HostDriver) -> Any:
    """The model of another process, from what this one publishes."""
    opened = Folder.open(folder)
    like = skeleton(opened)
    packed = pack(model, cache_config(opened, like, "digest", torch.device("cpu")), origin="test", filled=arena)
    mapping = CudaVmmMapping(packed.descriptors[1:], packed.manifest, 0, driver)
    binding = Binding(like, packed.manifest, mapping.views(packed.manifest))
    binding.copy_buffers()
    binding.place_parameters()
    binding.place_buffers()
    packed.close()
    return like


@pytest.mark.parametrize("architecture", MODELS)
def test_it_is_what_transformers_loads_and_so_is_what_others_attach(
    tmp_path: Path, driver: HostDriver, architecture: str
) -> None:
    folder = make(tmp_path, architecture)
    model, arena = load(folder)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    assert dict(bytes_of(model)) == dict(bytes_of(plain))
    held = [name for name, it in model.named_parameters() if arena.offset_of(it.data_ptr()) is not None]
    rest = {name.rpartition(".")[2] for name, _ in model.named_parameters()} - {
        name.rpartition(".")[2] for name in held
    }
    assert rest == ({"gate_up_proj", "down_proj"} if architecture == "mixtral" else set())  # what is merged
    attached = attach(folder, model, arena, driver)
    assert dict(bytes_of(attached)) == dict(bytes_of(plain))
    ids = torch.arange(8)[None]
    with torch.inference_mode():
        assert torch.equal(attached(ids).logits, plain(ids).logits)


def test_fp8_in_blocks_stays_as_it_is_stored(tmp_path: Path, driver: HostDriver) -> None:
    folder = make(tmp_path, "llama")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "weight_block_size": [32, 32],
        "activation_scheme": "dynamic",
    }
    (folder / "config.json").write_text(json.dumps(config))
    content = load_file(folder / "model.safetensors")
    for name in [name for name in content if name.endswith("_proj.weight")]:
        rows, columns = content[name].shape
        content[name] = (content[name].float() * 1000).to(torch.float8_e4m3fn)
        content[name + "_scale_inv"] = torch.rand(rows // 32, columns // 32) / 1000
    save_file(content, folder / "model.safetensors", metadata={"format": "pt"})
    model, arena = load(folder)
    attached = attach(folder, model, arena, driver)
    found = dict(attached.named_parameters())
    assert {name for name in content if not torch.equal(found[name].float(), content[name].float())} == set()
    name = "model.layers.1.mlp.up_proj.weight"
    assert found[name].dtype == torch.float8_e4m3fn
    layer = attached.get_submodule(name.removesuffix(".weight"))
    x = torch.randn(3, 64)
    weight = dequantize(content[name], content[name + "_scale_inv"], (32, 32), torch.float32)
    torch.testing.assert_close(layer(x), x @ weight.t())


def test_what_transformers_converts_is_read_to_host_memory(
    tmp_path: Path, driver: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path, "llama")
    settle = transformers_gpu._Source.settle
    monkeypatch.setattr(transformers_gpu._Source, "settle", lambda *given: [*settle(*given), "model.norm.weight"])
    model, arena = load(folder)
    assert arena is None
    assert dict(bytes_of(model)) == dict(bytes_of(AutoModelForCausalLM.from_pretrained(folder)))


def test_other_content_than_expected_leaves_no_memory_behind(tmp_path: Path, driver: HostDriver) -> None:
    folder = make(tmp_path, "llama")
    with pytest.raises(CheckpointError) as caught:
        load(folder, "0" * 64)
    assert caught.value.reason == "changed"
    assert not driver._files
