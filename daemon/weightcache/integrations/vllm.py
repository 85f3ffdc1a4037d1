"""The vLLM plug-in: load format ``weightcache``, phases in the journal, and restarts from a pre-imported process.

vLLM calls `register` in each of its processes (entry point group ``vllm.general_plugins``). It adds a loader, which
takes effect with ``--load-format weightcache`` only, and listens to vLLM's own tracing spans. Two functions of vLLM are
wrapped: the one that makes the tokenizer, to time it, and in a process forked by `weightcache.preload` the one in which
its platform puts ``spawn`` in place of ``fork`` (see `weightcache.integrations.vllm_fork`).
"""

import os
from typing import Any, Final

from weightcache.errors import ConfigError

TESTED: Final = ("0.32",)
"""Releases whose loader interface this was tested with: the first two parts of the version."""


def register() -> None:
    """Make vLLM know the load format; called by vLLM, more than once."""
    import vllm

    from weightcache.integrations import vllm_fork, vllm_phases

    if vllm_fork.wanted():
        vllm_fork.allow()
    if is_tested(vllm.__version__):
        from vllm.model_executor.model_loader import register_model_loader

        from weightcache.integrations.vllm_loader import WeightCacheLoader

        register_model_loader("weightcache")(WeightCacheLoader)
    else:
        refuse(vllm.__version__)
    if os.environ.get("READMIT_JOURNAL"):
        vllm_phases.install()


def refuse(version: str) -> None:
    """Have vLLM answer ``--load-format weightcache`` with why it cannot be had; without that option nothing changes."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class Untested(BaseModelLoader):  # type: ignore[misc]  # vLLM is not there when types are checked
        def __init__(self, load_config: Any) -> None:
            raise ConfigError(
                "engine_version",
                "load format weightcache has not been tested with this vLLM, whose loaders may take other arguments",
                expected=f"vLLM {', '.join(f'{release}.*' for release in TESTED)}",
                found=f"vLLM {version}",
                remedy="Start without --load-format weightcache, or install a vLLM that was tested",
            )

        download_model = load_weights = __init__

    register_model_loader("weightcache")(Untested)


def is_tested(version: str) -> bool:
    """Whether a version of vLLM belongs to a release that was tested."""
    return ".".join(version.split(".")[:2]) in TESTED
