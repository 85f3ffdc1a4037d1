"""The SGLang plug-in, **experimental**: it has not been run with SGLang on a GPU.

SGLang calls `register` in each of its processes (entry point group ``sglang.srt.plugins``). It puts a hook around
``get_model_loader``, which changes nothing unless an engine asks for it::

    python -m sglang.launch_server --model-path MODEL \
        --model-loader-extra-config '{"weightcache": {"mode": "client"}}'

SGLang logs what goes wrong with a plug-in and goes on without it. Here that cannot pass unnoticed: a second hook checks
before each load that the first is in force, and a SGLang without either refuses the key ``weightcache``.
"""

import dataclasses
import logging
from typing import Any, Final

from weightcache.errors import ConfigError

TESTED: Final = ("0.5.23",)
"""Releases whose classes this was tested with, on a CPU."""
KEY: Final = "weightcache"
GET_LOADER: Final = "sglang.srt.model_loader.loader.get_model_loader"
LOAD: Final = "sglang.srt.model_executor.model_runner_components.load_model_utils.load_model_with_memory_saver"

log = logging.getLogger("weightcache.sglang")


def register() -> None:
    """Have SGLang ask for our loader; called by SGLang, once a process."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(GET_LOADER, get_model_loader, HookType.AROUND)
    HookRegistry.register(LOAD, before_load, HookType.BEFORE)


def get_model_loader(original: Any, load_config: Any, model_config: Any = None) -> Any:
    """The loader of an engine that asks for the weight cache, otherwise SGLang's own.

    Raises:
        ConfigError: ``loader_option``, where SGLang would load in a way that cannot be shared.
    """
    extra = dict(load_config.model_loader_extra_config or {})
    if KEY not in extra:
        return original(load_config, model_config)
    options = extra.pop(KEY)
    disk = original(dataclasses.replace(load_config, model_loader_extra_config=extra), model_config)
    if model_config is None or model_config.is_draft_model:
        log.warning("a draft model is loaded from disk: only the target's weights are shared")
        return disk

    from sglang.srt.model_loader.loader import DefaultModelLoader

    from weightcache.integrations.sglang_loader import WeightCacheLoader

    if type(disk) is not DefaultModelLoader:
        raise ConfigError(
            "loader_option",
            "the weight cache shares what SGLang's default loader reads, and this is loaded by another one",
            expected="load format auto or safetensors, --weight-cache-mode off, no quantisation as it loads",
            found=type(disk).__name__,
            remedy=f"Take {KEY} out of --model-loader-extra-config, or change the load format",
        )
    return WeightCacheLoader(load_config, disk, options)


def before_load(*_: Any, load_config: Any, **__: Any) -> None:
    """Check, where the weight cache is asked for, that the hook around ``get_model_loader`` is in force.

    Raises:
        ConfigError: ``plugin``: the weights would be loaded as if nobody had asked.
    """
    if KEY not in (load_config.model_loader_extra_config or {}):
        return

    from sglang.srt.model_executor.model_runner_components import load_model_utils
    from sglang.srt.model_loader import loader
    from sglang.version import __version__

    if not hasattr(loader.get_model_loader, "__wrapped__") or load_model_utils.get_model_loader is not (
        loader.get_model_loader
    ):
        raise ConfigError(
            "plugin",
            f"the hook around {GET_LOADER} is not in force",
            expected=f"a SGLang such as {', '.join(TESTED)}",
            found=f"SGLang {__version__}",
            remedy=f"Take {KEY} out of --model-loader-extra-config",
        )
    log.warning("weight cache for SGLang %s: experimental, tested with %s; its hook is in force", __version__, TESTED)
