"""SGLang's weights from the weight cache, or from disk as SGLang's default loader reads them.

On a GPU the processed weights are shared, and a hit does not process them again: what quantisation leaves in Python
beside them is why only unquantised and block-wise FP8 weights may travel, as in SGLang's own cache. On a CPU SGLang may
pack weights after loading, so the state before that is shared.
"""

import logging
from functools import partial
from typing import Any, Final

import torch
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_loader.loader import (
    BaseModelLoader,
    DefaultModelLoader,
    _get_quantization_config,
    _initialize_model,
)
from sglang.srt.model_loader.utils import get_model_architecture, set_default_torch_dtype
from sglang.srt.runtime_context import get_exec, get_lora, get_model, get_parallel
from sglang.srt.weight_cache.protocol import UnsupportedQuantForIPCError as SGLangUnsupported
from sglang.srt.weight_cache.protocol import check_ipc_quant_support, get_quant_method_name
from sglang.version import __version__
from torch import nn

from weightcache import quantization
from weightcache.attachment import Outcome, Progress, ignore_progress
from weightcache.checkpoint import Checkpoint, Folder
from weightcache.client import attach
from weightcache.errors import CacheMiss, UnsupportedQuantForIPCError
from weightcache.fingerprint import CacheConfig, stable_hash
from weightcache.identity import computed_from
from weightcache.integrations.loader_options import read_options
from weightcache.integrations.model_folder import digest_before, model_folder, require_unchanged
from weightcache.integrations.skeleton import become, build, nbytes
from weightcache.integrations.torch_names import capability_name, dtype_name
from weightcache.journal import Journal

ENGINE: Final = "sglang"
LAYOUT: Final = f"sglang-{__version__}"
log = logging.getLogger("weightcache.sglang")


class WeightCacheLoader(BaseModelLoader):  # type: ignore[misc]  # SGLang is not there when types are checked
    """See the top of this module.

    Args:
        load_config: SGLang's.
        disk: the loader that reads the files.
        options: see `loader_options`.

    Raises:
        ConfigError: ``loader_option``: an unknown key or mode.
    """

    outcome: Outcome | None = None
    """How the model got its weights."""

    def __init__(self, load_config: LoadConfig, disk: DefaultModelLoader, options: dict[str, Any]) -> None:
        super().__init__(load_config)
        self.disk = disk
        self.mode, self.options = read_options(options, "weightcache in --model-loader-extra-config")
        self.preloaded_weights_bytes = 0

    def download_model(self, model_config: ModelConfig) -> None:
        """Have the files on disk, as SGLang does it."""
        self.disk.download_model(model_config)

    def load_model(self, *, model_config: ModelConfig, device_config: DeviceConfig) -> nn.Module:
        """A model with its weights, ready to run.

        ``preloaded_weights_bytes`` says then how much of them was resident before, for SGLang to size its caches.

        Raises:
            CacheMiss: the policy for the reason of a miss is to fail.
            CheckpointError: the files are bad, or changed while they were read.
        """
        parallel = get_parallel()
        journal = Journal.from_environment().bound(rank=parallel.pp_rank * parallel.tp_size + parallel.tp_rank)
        load = _Load(self, model_config, torch.device(device_config.device), journal)
        with journal.phase("load_weights"), set_default_torch_dtype(model_config.dtype):
            model = load.run()
        assert self.outcome is not None
        hit = self.outcome.path == "hit"
        self.preloaded_weights_bytes = self.outcome.bytes if hit and not load.processes_after else 0
        log.warning("weight cache (experimental): path %s, %s", self.outcome.path, self.outcome.message or "no miss")
        return model.eval()


class _Load:
    """One load of one rank's model."""

    def __init__(
        self, loader: WeightCacheLoader, model_config: ModelConfig, target: torch.device, journal: Journal
    ) -> None:
        self._loader = loader
        self._model_config = model_config
        self._target = target
        self._journal = journal
        self._quantization = _get_quantization_config(model_config, loader.disk.load_config)
        self.processes_after = target.type == "cpu"
        self._model = nn.Module()

    def run(self) -> nn.Module:
        self._loader.outcome = self._read_privately() if self._loader.mode == "off" else self._attach()
        if self.processes_after:
            self._process(self._model)
        return self._model

    def _attach(self) -> Outcome:
        name, revision = self._model_config.model_path, self._model_config.revision
        download_dir = self._loader.load_config.download_dir
        folder = model_folder(name, revision, download_dir, lambda: self._loader.download_model(self._model_config))
        miss = barred(self._model_config, folder)
        try:
            with self._journal.phase("load_weights.skeleton"):
                self._model = build(self._build, self._target)
        except CacheMiss as refused:
            miss = refused
        with self._journal.phase("load_weights.match"):
            digest = digest_before(folder, shared=miss is None)

        def load(progress: Progress) -> None:
            self._read(progress)
            require_unchanged(folder, digest)

        return attach(
            self._model,
            cache_config(self._model_config, folder, digest, self._target),
            mode=self._loader.mode,
            load=load,
            check=partial(Checkpoint.open, folder),
            load_bytes=nbytes(self._model),
            journal=self._journal,
            device=torch.cuda.current_device() if self._target.type == "cuda" else None,
            barred=miss,
            **self._loader.options,
        )

    def _read_privately(self) -> Outcome:
        self._journal.append("lookup", "off", {"mode": "off"})
        with self._journal.phase("load_weights.read"):
            self._read(ignore_progress)
        return Outcome(path="off", mode="off")

    def _read(self, progress: Progress) -> None:
        with self._target:
            loaded = self._build()
        total, disk = nbytes(loaded), self._loader.disk
        progress(0, total)
        disk.load_weights_only(loaded, disk._get_all_weights(self._model_config, loaded), self._target)
        if not self.processes_after:
            self._process(loaded)
        progress(total, total)
        if type(self._model) is nn.Module:
            self._model = loaded
        else:
            become(self._model, loaded)

    def _build(self) -> nn.Module:
        built: nn.Module = _initialize_model(self._model_config, self._loader.disk.load_config, self._quantization)
        return built

    def _process(self, model: nn.Module) -> None:
        with self._journal.phase("load_weights.process"):
            self._loader.disk.postprocess_weights(model, self._target)


def cache_config(model_config: ModelConfig, folder: Folder, digest: str | None, target: torch.device) -> CacheConfig:
    """The identity of this rank's weights. SGLang's configuration must be published."""
    found, parallel = quantization.of(folder), get_parallel()
    return CacheConfig(
        model_path=folder.path,
        model_arch=get_model_architecture(model_config)[0].__name__,
        revision=folder.revision or model_config.revision,
        checkpoint_digest=digest,
        tp_size=parallel.tp_size,
        tp_rank=parallel.tp_rank,
        pp_size=parallel.pp_size,
        pp_rank=parallel.pp_rank,
        dp_size=parallel.dp_size,
        ep_size=parallel.moe_ep_size,
        ep_rank=parallel.moe_ep_rank,
        quant_method=found.method,
        quant_config_hash=found.config_hash,
        dtype=dtype_name(model_config.dtype),
        device_capability=capability_name(target),
        torch_version=torch.__version__,
        engine=ENGINE,
        layout_id=LAYOUT,
        kernel_backend=f"{target.type}-{stable_hash(_choices())[:12]}-{computed_from(folder)}",
    )


def barred(model_config: ModelConfig, folder: Folder) -> CacheMiss | None:
    """Why the weights may not be shared, None if they may. Known before any is read."""
    found = quantization.of(folder)
    asked = get_quant_method_name(model_config.quantization) or quantization.UNQUANTIZED
    try:
        found.check_allowed()
        own = getattr(model_config.hf_config, "quantization_config", None)
        check_ipc_quant_support("" if asked == quantization.UNQUANTIZED else asked, own, where="client")
        found.check_asked(asked, "SGLang")
    except UnsupportedQuantForIPCError as refused:
        return refused
    except SGLangUnsupported as refused:
        return UnsupportedQuantForIPCError(
            "SGLang does not vouch for these weights", detail="other", expected="a verified method", found=str(refused)
        )
    for option, unwanted, why in _unrestorable():
        if unwanted:
            return CacheMiss(
                "state_unrestorable",
                f"weights cannot be shared together with {option}: {why}",
                remedy=f"Start SGLang without {option}, or without weightcache in --model-loader-extra-config",
                option=option,
            )
    return None


def _unrestorable() -> tuple[tuple[str, bool, str], ...]:
    chosen, lora = get_exec(), get_lora()
    adapters = bool(lora.enable_lora or lora.lora_paths)
    overlap = bool(get_model().is_startup_weight_load_overlap)
    return (
        ("--enable-lora", adapters, "adapters replace layers after loading"),
        ("--enable-memory-saver", bool(chosen.features.enable_memory_saver), "it frees weights that are not its own"),
        ("--enable-eplb", bool(chosen.moe.enable_eplb), "experts move between ranks while the engine runs"),
        ("--cpu-offload-gb", chosen.offload.cpu_offload_gb > 0, "offloaded weights live outside the model"),
        ("--offload-group-size", chosen.offload.offload_group_size > 0, "offloaded weights live outside the model"),
        ("--startup-weight-load-mode overlap", overlap, "weights are still read when others would map them"),
    )


def _choices() -> dict[str, Any]:
    """What else decides a rank's tensors and their layout."""
    parallel, chosen = get_parallel(), get_exec()
    return {
        "attention_cp": parallel.attn_cp_size,
        "attention_dp": parallel.attn_dp_size,
        "dense_tp": parallel.moe_dense_tp_size,
        "dp_lm_head": parallel.enable_dp_lm_head,
        "moe_dp": [parallel.moe_dp_size, parallel.moe_dp_rank],
        "a2a": str(chosen.moe.moe_a2a_backend),
        "experts": [str(chosen.moe.moe_runner_backend), chosen.moe.ep_num_redundant_experts],
        "expert_location": str(chosen.moe.init_expert_location),
        "fp8": str(chosen.kernel.fp8_gemm_runner_backend),
        "attention": str(chosen.kernel.attention_backend),
        "overrides": str(get_model().json_model_override_args),
    }
