"""The vLLM plug-in: load format ``weightcache``, phases in the journal, and restarts from a pre-imported process.

vLLM calls `register` in each of its processes (entry point group ``vllm.general_plugins``). It adds a loader, which
takes effect with ``--load-format weightcache`` only, and listens to vLLM's own tracing spans. Nothing of vLLM is
patched, with one exception: in a process forked by `weightcache.preload` its platform may not put ``spawn`` in place
of ``fork`` (see `weightcache.integrations.vllm_fork`).
"""

import logging
import os
from typing import Final

TESTED: Final = ("0.32",)
"""Releases whose loader interface this was tested with: the first two parts of the version."""

log = logging.getLogger("weightcache.vllm")


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
        # Said by whoever wants the format, when it is not known; an engine that does not want it is none of ours.
        log.warning("load format weightcache is not offered to vLLM %s, tested is %s", vllm.__version__, TESTED)
    if os.environ.get("READMIT_JOURNAL"):
        vllm_phases.install()


def is_tested(version: str) -> bool:
    """Whether a version of vLLM belongs to a release that was tested."""
    return ".".join(version.split(".")[:2]) in TESTED
