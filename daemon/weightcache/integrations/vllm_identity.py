"""Which weights a rank of vLLM needs, from vLLM's own configuration, and which of them may not be shared."""

import json
import os
import re
from typing import Any, Final

import torch
import vllm
from vllm.config import ModelConfig, VllmConfig
from vllm.distributed import get_ep_group, get_pp_group, get_tp_group
from vllm.model_executor.model_loader.utils import get_architecture_class_name

from weightcache import quantization
from weightcache.checkpoint import Folder
from weightcache.errors import CacheMiss, UnsupportedQuantForIPCError
from weightcache.fingerprint import CacheConfig, stable_hash
from weightcache.identity import computed_from
from weightcache.integrations.torch_names import capability_name, dtype_name

ENGINE: Final = "vllm"
LAYOUT: Final = f"vllm-{vllm.__version__}"
"""vLLM decides which tensors of the files it fuses and pads, so its version stands for the layout."""

_SWITCHES: Final = re.compile(r"VLLM_.*(AITER|CUTLASS|DEEP_GEMM|FLASHINFER|FP4|FP8|MARLIN|MOE)")
"""Variables by which vLLM's choice of a kernel, and with it the layout of processed weights, is changed."""


def cache_config(vllm_config: VllmConfig, model_config: ModelConfig, folder: Folder, digest: str | None) -> CacheConfig:
    """The identity of this rank's weights. Parallel groups must exist."""
    found = quantization.of(folder)
    parallel = vllm_config.parallel_config
    experts = get_ep_group() if parallel.enable_expert_parallel and model_config.is_moe else None
    return CacheConfig(
        model_path=folder.path,
        model_arch=get_architecture_class_name(model_config),
        revision=folder.revision or model_config.revision,
        checkpoint_digest=digest,
        tp_size=get_tp_group().world_size,
        tp_rank=get_tp_group().rank_in_group,
        pp_size=get_pp_group().world_size,
        pp_rank=get_pp_group().rank_in_group,
        dp_size=parallel.data_parallel_size,
        ep_size=experts.world_size if experts else 1,
        ep_rank=experts.rank_in_group if experts else 0,
        quant_method=found.method,
        quant_config_hash=found.config_hash,
        dtype=dtype_name(model_config.dtype),
        device_capability=capability_name(torch.device(vllm_config.device_config.device_type)),
        torch_version=torch.__version__,
        engine=ENGINE,
        layout_id=LAYOUT,
        kernel_backend=f"{_kernel_backend(vllm_config, model_config)}-{computed_from(folder)}",
    )


def is_draft(vllm_config: VllmConfig, model_config: ModelConfig) -> bool:
    """Whether a model proposes tokens for another one; vLLM loads some of those in a configuration of their own."""
    return model_config is not vllm_config.model_config or model_config.runner_type == "draft"


def barred(vllm_config: VllmConfig, model_config: ModelConfig, folder: Folder) -> CacheMiss | None:
    """Why the weights may not be shared, None if they may. Known before any is read."""
    found = quantization.of(folder)
    try:
        found.check_allowed()
        found.check_asked(model_config.quantization, "vLLM")
    except UnsupportedQuantForIPCError as refused:
        return refused
    for option, unwanted, why in _unrestorable(vllm_config, model_config):
        if unwanted:
            return CacheMiss(
                "state_unrestorable",
                f"weights cannot be shared together with {option}: {why}",
                remedy=f"Start vLLM without {option}, or without --load-format weightcache",
                option=option,
            )
    return None


def _unrestorable(vllm_config: VllmConfig, model_config: ModelConfig) -> tuple[tuple[str, bool, str], ...]:
    parallel, offload = vllm_config.parallel_config, vllm_config.offload_config
    return (
        ("--enable-lora", vllm_config.lora_config is not None, "adapters replace layers after loading"),
        ("--enable-sleep-mode", model_config.enable_sleep_mode, "sleep frees weights that are not this process's own"),
        ("--enable-eplb", parallel.enable_eplb, "experts move between ranks while the engine runs"),
        ("--cpu-offload-gb", offload.uva.cpu_offload_gb > 0, "offloaded weights live outside the model"),
        ("--offload-group-size", offload.prefetch.offload_group_size > 0, "offloaded weights live outside the model"),
    )


def _kernel_backend(vllm_config: VllmConfig, model_config: ModelConfig) -> str:
    """What else chooses which tensors a rank has, and the layout of processed ones.

    On the CPU weights are shared before any kernel decides on a layout.
    """
    device: str = vllm_config.device_config.device_type
    parallel, overrides = vllm_config.parallel_config, model_config.hf_overrides
    chosen: dict[str, Any] = {
        "convert": "" if model_config.convert_type == "none" else model_config.convert_type,
        "experts": parallel.expert_placement_strategy if parallel.enable_expert_parallel else "",
        "overrides": json.dumps(overrides, sort_keys=True, default=repr) if overrides else "",
    }
    if device != "cpu":
        chosen["moe"] = str(vllm_config.kernel_config.moe_backend)
        chosen["all2all"] = parallel.all2all_backend
        chosen["attention"] = str(vllm_config.attention_config.backend)
        chosen["kv_cache"] = vllm_config.cache_config.cache_dtype
        chosen["switches"] = {name: value for name, value in os.environ.items() if _SWITCHES.match(name)}
    if not any(chosen.values()):
        return device
    return f"{device}-{stable_hash(chosen)[:12]}"
