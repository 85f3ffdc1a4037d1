"""The SGLang plug-in against SGLang's own classes and a real model, as far as they run without a GPU."""

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import parallel_state
from sglang.srt.model_executor.model_runner_components import load_model_utils
from sglang.srt.model_loader import loader as sglang_loaders
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter
from tests.engines import checkpoints

from weightcache.checkpoint import Folder
from weightcache.errors import CacheMiss, CheckpointError, ConfigError
from weightcache.integrations import sglang
from weightcache.integrations.sglang_loader import WeightCacheLoader, barred


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write("llama", tmp_path_factory.mktemp("llama") / "llama")


@pytest.fixture(scope="module", autouse=True)
def rank(llama: Path) -> Iterator[None]:
    """One rank of SGLang on the CPU, with its plug-ins loaded as SGLang loads them: by their entry points."""
    arguments = ServerArgs(model_path=str(llama), device="cpu", skip_tokenizer_init=True)
    arguments.resolve_once()
    runtime_context.publish(arguments, role="scheduler", ranks=runtime_context.SpawnRanks(world_rank=0, gpu_id=0))
    parallel_state.init_distributed_environment(1, 0, f"file://{llama}-rendezvous", 0, "gloo")
    parallel_state.initialize_model_parallel()
    load_plugins()
    yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


def model_config(llama: Path, **options: Any) -> ModelConfig:
    return ModelConfig(str(llama), dtype="bfloat16", **options)


def asking(socket: Path | str = "/nowhere", **options: Any) -> LoadConfig:
    return LoadConfig(model_loader_extra_config={"weightcache": {"socket": str(socket), **options}})


def load(llama: Path, load_config: LoadConfig) -> Any:
    """What SGLang's model runner does."""
    return load_model_utils.load_model_with_memory_saver(
        model_config=model_config(llama),
        load_config=load_config,
        device="cpu",
        gpu_id=0,
        memory_saver_adapter=TorchMemorySaverAdapter.create(enable=False),
        is_draft_worker=False,
    )


def state(model: torch.nn.Module) -> dict[str, tuple[str, tuple[int, ...], str]]:
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        name: (
            str(tensor.dtype),
            tuple(tensor.shape),
            hashlib.sha256(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest(),
        )
        for name, tensor in named.items()
    }


def test_the_hook_is_in_force_wherever_a_loader_is_asked_for(llama: Path) -> None:
    for module in (sglang_loaders, load_model_utils):
        assert isinstance(module.get_model_loader(asking(), model_config(llama)), WeightCacheLoader)
        assert type(module.get_model_loader(LoadConfig(), model_config(llama))) is DefaultModelLoader


def test_a_start_without_the_hook_ends_rather_than_load_as_if_nobody_had_asked(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = sglang_loaders.get_model_loader.__wrapped__
    monkeypatch.setattr(load_model_utils, "get_model_loader", original)
    with pytest.raises(ConfigError, match="not in force"):
        load(llama, asking())
    with pytest.raises(ValueError, match="weightcache"):
        original(asking(), model_config(llama))  # SGLang itself, were neither hook there
    assert sglang.GET_LOADER in HookRegistry._patched


def test_disk_and_cache_give_the_same_bytes(llama: Path, daemon: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = state(load(llama, LoadConfig()).model)
    assert len(expected) > 10
    for mode, path in (("off", "off"), ("client", "miss"), ("client", "hit")):
        loaded = load(llama, asking(daemon, mode=mode))
        assert loaded.loader.outcome.path == path
        assert state(loaded.model) == expected
        assert not loaded.model.training
        # On a CPU what is resident is copied when weights are processed, so nothing of it counts as this engine's.
        assert loaded.loader.preloaded_weights_bytes == 0
    assert "experimental" in caplog.text


@pytest.mark.parametrize(
    ("fields", "option"),
    [
        ({"enable_lora": True}, "--enable-lora"),
        ({"enable_memory_saver": True}, "--enable-memory-saver"),
        ({"enable_eplb": True}, "--enable-eplb"),
        ({"cpu_offload_gb": 1}, "--cpu-offload-gb"),
        ({"offload_group_size": 1}, "--offload-group-size"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_travel_is_refused_with_its_reason(llama: Path, fields: dict[str, Any], option: str) -> None:
    context = runtime_context.get_context()
    before = {name: getattr(context.server_args, name) for name in fields}
    context.override("test", **fields)
    try:
        refused = barred(model_config(llama), Folder.open(llama))
    finally:
        context.override("test", **before)
    assert isinstance(refused, CacheMiss)
    assert (refused.reason, refused.data["option"]) == ("state_unrestorable", option)


def test_resident_weights_are_not_given_up_for_files_that_are_away(llama: Path, daemon: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(llama, tmp_path / "model"))
    load(folder, asking(daemon))
    for shard in folder.glob("*.safetensors"):
        shard.unlink()
    context = runtime_context.get_context()
    before = context.server_args.json_model_override_args
    # What is resident is of no use now, and would be replaced.
    context.override("test", json_model_override_args='{"rope_theta": 1}')
    try:
        with pytest.raises(CheckpointError):
            load(folder, asking(daemon))
    finally:
        context.override("test", json_model_override_args=before)
    assert load(folder, asking(daemon, mode="client")).loader.outcome.path == "hit"


def test_weights_that_sglang_quantises_itself_do_not_travel(llama: Path) -> None:
    quantised = model_config(llama)
    quantised.quantization = "fp8"
    refused = barred(quantised, Folder.open(llama))
    assert refused is not None
    assert refused.reason == "quant_not_allowed"
    assert barred(model_config(llama), Folder.open(llama)) is None


@pytest.mark.parametrize("load_format", ["dummy", "sharded_state", "layered"])
def test_another_way_of_loading_is_an_error(llama: Path, load_format: str) -> None:
    load_config = asking()
    load_config.load_format = sglang_loaders.LoadFormat(load_format)
    with pytest.raises(ConfigError, match="default loader"):
        sglang_loaders.get_model_loader(load_config, model_config(llama))


def test_a_draft_model_is_loaded_from_disk(llama: Path) -> None:
    draft = model_config(llama, is_draft_model=True)
    assert type(sglang_loaders.get_model_loader(asking(), draft)) is DefaultModelLoader


@pytest.mark.parametrize("extra", [{"mode": "sometimes"}, {"sockets": "/x"}])
def test_an_unknown_option_is_an_error_that_names_it(llama: Path, extra: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(extra.values() if "mode" in extra else extra))):
        sglang_loaders.get_model_loader(asking(**extra), model_config(llama))
