"""Load format ``weightcache`` in vLLM: the same bytes, the same answers, and every refusal with its reason."""

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engines import checkpoints
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.load import LoadConfig
from vllm.config.lora import LoRAConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader, register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop

from weightcache import messages
from weightcache.checkpoint import Folder
from weightcache.errors import CacheMiss, CheckpointError, ConfigError, UnsupportedQuantForIPCError
from weightcache.integrations import vllm, vllm_identity, vllm_loader
from weightcache.integrations.vllm_identity import barred
from weightcache.integrations.vllm_loader import WeightCacheLoader
from weightcache.protocol import Connection
from weightcache.version import VERSION


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write("llama", tmp_path_factory.mktemp("llama") / "llama")


@pytest.fixture
def vllm_config(llama: Path) -> Iterator[VllmConfig]:
    """A configuration in force, and the parallel groups of one rank."""
    from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel

    _set_torch_accelerator_to_noop()
    config = EngineArgs(model=str(llama), skip_tokenizer_init=True, enforce_eager=True).create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{llama}-rendezvous", 0, "gloo")
        initialize_model_parallel(1, 1)
        yield config
        cleanup_dist_env_and_memory()


def load(config: VllmConfig, socket: Path, **extra: Any) -> tuple[torch.nn.Module, WeightCacheLoader]:
    config.load_config.load_format = "weightcache"
    config.load_config.model_loader_extra_config = {"socket": str(socket), **extra}
    loader = get_model_loader(config.load_config)
    assert isinstance(loader, WeightCacheLoader)
    return loader.load_model(config, config.model_config), loader


def generations(socket: Path) -> list[dict[str, Any]]:
    """What a daemon holds."""
    connection = Connection(socket, messages.Hello(version=VERSION))
    try:
        status, _ = connection.ask(messages.Status(), messages.Done)
    finally:
        connection.close()
    held: list[dict[str, Any]] = status.data["generations"]
    return held


@pytest.mark.parametrize(
    ("change", "reason", "detail"),
    [
        (lambda config: setattr(config.model_config, "enable_sleep_mode", True), "state_unrestorable", None),
        (lambda config: setattr(config.parallel_config, "enable_eplb", True), "state_unrestorable", None),
        (lambda config: setattr(config.offload_config.uva, "cpu_offload_gb", 1), "state_unrestorable", None),
        (
            lambda config: setattr(config.offload_config.prefetch, "offload_group_size", 1),
            "state_unrestorable",
            None,
        ),
        (lambda config: setattr(config, "lora_config", LoRAConfig()), "state_unrestorable", None),
        (lambda config: setattr(config.model_config, "quantization", "fp8"), "quant_not_allowed", "other"),
    ],
    ids=["sleep mode", "moving experts", "offloading", "offloading groups", "adapters", "quantised by vLLM itself"],
)
def test_what_cannot_travel_is_refused_before_a_byte_is_loaded(
    vllm_config: VllmConfig, daemon: Path, change: Any, reason: str, detail: str | None
) -> None:
    change(vllm_config)
    with pytest.raises(CacheMiss) as refused:
        load(vllm_config, daemon, policies={reason: "fail"})
    assert (refused.value.reason, refused.value.detail) == (reason, detail)


@pytest.mark.parametrize(
    ("quantization", "detail"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, "awq"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}, "gptq"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "fp8_per_tensor"),
        ({"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {}}, "compressed-tensors"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.usefixtures("vllm_config")
def test_a_quantised_checkpoint_is_refused_by_its_family(
    llama: Path, tmp_path: Path, quantization: dict[str, Any], detail: str
) -> None:
    folder = Path(shutil.copytree(llama, tmp_path / "model"))
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "quantization_config": quantization}))
    arguments = EngineArgs(model=str(folder), skip_tokenizer_init=True, enforce_eager=True)
    refused = barred(*_configs(arguments), Folder.open(folder))
    assert isinstance(refused, UnsupportedQuantForIPCError)
    assert refused.detail == detail


def _configs(arguments: EngineArgs) -> tuple[VllmConfig, Any]:
    """vLLM's own, which are checked against its platform only as far as they can be made."""
    model_config = arguments.create_model_config()
    return VllmConfig(), model_config


def test_without_a_daemon_the_weights_come_from_disk_and_the_reason_is_told(
    vllm_config: VllmConfig, tmp_path: Path
) -> None:
    nowhere = tmp_path / "no.sock"
    with pytest.raises(CacheMiss) as refused:
        load(vllm_config, nowhere, policies={"no_daemon": "fail"})
    assert refused.value.reason == "no_daemon"
    model, loader = load(vllm_config, nowhere)
    assert loader.outcome is not None
    assert (loader.outcome.path, loader.outcome.reason) == ("miss", "no_daemon")
    assert loader.get_external_weight_memory(vllm_config) == 0
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_a_model_on_the_hub_is_its_snapshot_of_the_revision_that_is_asked_for(
    vllm_config: VllmConfig, daemon: Path, llama: Path, tmp_path: Path
) -> None:
    repository = tmp_path / "hub" / "models--org--tiny"
    for commit in ("a" * 40, "b" * 40):
        shutil.copytree(llama, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    model_config, load_config = vllm_config.model_config, vllm_config.load_config
    model_config.model, model_config.revision, load_config.download_dir = "org/tiny", "b" * 40, str(tmp_path / "hub")
    _, loader = load(vllm_config, daemon)
    folder = loader.folder(model_config)
    assert (folder.root, folder.revision) == (str(repository / "snapshots" / ("b" * 40)), "b" * 40)


def computes(how: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the model look at tensors while it is built, as one does that maps the experts of a rank."""
    build = vllm_loader.initialize_model

    def built(*arguments: Any, **options: Any) -> Any:
        how()
        return build(*arguments, **options)

    monkeypatch.setattr(vllm_loader, "initialize_model", built)


def test_a_model_that_looks_at_what_it_computes_as_it_is_built_hits_all_the_same(
    vllm_config: VllmConfig, daemon: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def map_experts() -> list[int]:
        return torch.where(torch.full((4,), 3) != -1)[0].tolist()

    computes(map_experts, monkeypatch)
    layers = vllm_config.compilation_config.static_forward_context
    for path in ("miss", "hit"):
        layers.clear()
        model, loader = load(vllm_config, daemon)
        assert loader.outcome is not None
        assert loader.outcome.path == path
        assert not any(parameter.is_meta for parameter in model.parameters())


def test_a_model_that_needs_memory_to_be_built_is_loaded_from_disk_and_says_why(
    vllm_config: VllmConfig, daemon: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computes(lambda: torch.empty(4).tolist(), monkeypatch)
    model, loader = load(vllm_config, daemon)
    assert loader.outcome is not None
    assert (loader.outcome.path, loader.outcome.reason) == ("miss", "state_unrestorable")
    assert "without memory" in (loader.outcome.message or "")
    assert sum(parameter.numel() for parameter in model.parameters()) > 0
    assert generations(daemon) == []


@pytest.fixture
def shares_processed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU. On a CPU processing empties parameters, which is what must show."""
    build = vllm_loader._Load.__init__

    def shares_processed(self: Any, *rest: Any) -> None:
        build(self, *rest)
        self._shares_processed = True

    monkeypatch.setattr(vllm_loader._Load, "__init__", shares_processed)


@pytest.mark.usefixtures("shares_processed_weights")
def test_a_release_that_does_not_ask_for_resident_weights_is_warned_about(
    vllm_config: VllmConfig, daemon: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(BaseModelLoader, "get_external_weight_memory")
    load(vllm_config, daemon)
    assert "does not ask which weights are resident" in caplog.text


@pytest.mark.usefixtures("shares_processed_weights")
def test_weights_that_processing_moves_elsewhere_are_never_published(vllm_config: VllmConfig, daemon: Path) -> None:
    model, loader = load(vllm_config, daemon)
    assert loader.outcome is not None
    assert (loader.outcome.path, loader.outcome.reason) == ("miss", "state_unrestorable")
    assert loader.outcome.generation is None
    assert "q" in (loader.outcome.private_because or "")
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert generations(daemon) == []


def test_resident_weights_count_when_caches_are_sized(vllm_config: VllmConfig, daemon: Path) -> None:
    vllm_config.load_config.load_format = "weightcache"
    vllm_config.load_config.model_loader_extra_config = {"socket": str(daemon)}
    assert get_model_loader(vllm_config.load_config).get_external_weight_memory(vllm_config) == 0
    model, loader = load(vllm_config, daemon)
    [held] = generations(daemon)
    assert loader.get_external_weight_memory(vllm_config) == held["bytes"] > 0
    del model


@pytest.mark.parametrize("stands_alone", [False, True], ids=["beside the target", "in a configuration of its own"])
def test_a_draft_model_is_loaded_from_disk_and_publishes_nothing(
    vllm_config: VllmConfig, daemon: Path, stands_alone: bool
) -> None:
    vllm_config.load_config.load_format = "weightcache"
    vllm_config.load_config.model_loader_extra_config = {"socket": str(daemon)}
    draft_config = copy.copy(vllm_config.model_config)
    draft_config.runner_type = "draft"
    if stands_alone:
        vllm_config.model_config = draft_config
    loader = get_model_loader(vllm_config.load_config)
    draft = loader.load_model(vllm_config, draft_config)
    assert loader.outcome is None
    assert not any(parameter.is_meta for parameter in draft.parameters())
    assert "_weightcache_lease" not in draft.__dict__


def test_what_else_decides_the_tensors_is_part_of_the_identity(
    vllm_config: VllmConfig, daemon: Path, llama: Path
) -> None:
    load(vllm_config, daemon)
    changed = EngineArgs(
        model=str(llama), skip_tokenizer_init=True, enforce_eager=True, hf_overrides={"num_hidden_layers": 1}
    ).create_engine_config()
    with pytest.raises(CacheMiss) as refused:
        load(changed, daemon, policies={"fingerprint": "fail"})
    assert (refused.value.reason, refused.value.detail) == ("fingerprint", "kernel_backend")


def test_what_decides_the_layout_of_processed_weights_is_part_of_a_gpus_identity(
    vllm_config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def backend(device: str) -> str:
        vllm_config.device_config.device_type = device
        return vllm_identity._kernel_backend(vllm_config, vllm_config.model_config)

    on_cpu, on_gpu = backend("cpu"), backend("cuda")
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "0")
    assert backend("cuda") != on_gpu
    monkeypatch.delenv("VLLM_USE_DEEP_GEMM")
    vllm_config.cache_config.cache_dtype = "fp8"
    assert backend("cuda") != on_gpu
    assert backend("cpu") == on_cpu, "there the weights are shared before anything is chosen"


@pytest.mark.usefixtures("vllm_config")
def test_an_edited_config_with_the_same_files_is_another_identity(daemon: Path, llama: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(llama, tmp_path / "model"))
    options = EngineArgs(model=str(folder), skip_tokenizer_init=True, enforce_eager=True)
    load(options.create_engine_config(), daemon)
    written = json.loads((folder / "config.json").read_text())
    # The rotary table is in no file, is computed from this, and is what the cache would hand out.
    (folder / "config.json").write_text(json.dumps({**written, "rope_theta": 123_456.0, "rope_parameters": None}))
    with pytest.raises(CacheMiss) as refused:
        load(options.create_engine_config(), daemon, policies={"fingerprint": "fail"})
    assert (refused.value.reason, refused.value.detail) == ("fingerprint", "kernel_backend")


@pytest.mark.usefixtures("vllm_config")
def test_resident_weights_are_not_given_up_for_files_that_are_away(daemon: Path, llama: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(llama, tmp_path / "model"))
    options = EngineArgs(model=str(folder), skip_tokenizer_init=True, enforce_eager=True)
    model, _ = load(options.create_engine_config(), daemon)
    del model
    held = generations(daemon)
    for shard in folder.glob("*.safetensors"):
        shard.unlink()
    options.hf_overrides = {"num_hidden_layers": 1}  # what is resident is of no use now, and would be replaced
    with pytest.raises(CheckpointError):
        load(options.create_engine_config(), daemon)
    assert [each["generation"] for each in generations(daemon)] == [each["generation"] for each in held] != []


def test_files_that_change_while_they_are_read_are_not_published(
    vllm_config: VllmConfig, daemon: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [shard] = llama.glob("*.safetensors")
    bytes_before = shard.read_bytes()
    read = DefaultModelLoader.load_weights

    def meddle(*arguments: Any) -> None:
        read(*arguments)
        shard.write_bytes(bytes_before[:-2] + b"\x11\x22")

    monkeypatch.setattr(DefaultModelLoader, "load_weights", meddle)
    try:
        with pytest.raises(CheckpointError) as refused:
            load(vllm_config, daemon)
    finally:
        shard.write_bytes(bytes_before)
    assert refused.value.reason == "changed"


def test_a_second_load_in_one_process_leaves_no_layer_behind(vllm_config: VllmConfig, daemon: Path) -> None:
    layers = vllm_config.compilation_config.static_forward_context
    model, loader = load(vllm_config, daemon)
    assert loader.outcome is not None
    assert loader.outcome.path == "miss"
    modules = set(map(id, model.modules()))
    assert len(layers) == 2
    assert all(id(layer) in modules for layer in layers.values()), "the skeleton's layers are forgotten"


@pytest.mark.parametrize("extra", [{"mode": "sometimes"}, {"sockets": "/tmp/x"}])
def test_an_unknown_option_is_an_error_that_names_it(vllm_config: VllmConfig, extra: dict[str, str]) -> None:
    vllm_config.load_config.load_format = "weightcache"
    vllm_config.load_config.model_loader_extra_config = extra
    with pytest.raises(ConfigError, match=next(iter(extra.values()) if "mode" in extra else iter(extra))):
        get_model_loader(vllm_config.load_config)


def test_another_release_says_what_was_expected() -> None:
    vllm.refuse("0.99.0")
    try:
        with pytest.raises(ConfigError, match=r"expected vLLM 0\.32.*found vLLM 0\.99\.0"):
            get_model_loader(LoadConfig(load_format="weightcache"))
    finally:
        register_model_loader("weightcache")(WeightCacheLoader)


def test_only_tested_releases_get_the_load_format() -> None:
    assert vllm.is_tested("0.32.0")
    assert vllm.is_tested("0.32.1.dev3")
    assert not vllm.is_tested("0.33.0")
    assert not vllm.is_tested("0.3")
