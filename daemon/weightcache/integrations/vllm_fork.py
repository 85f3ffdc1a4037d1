"""Leave vLLM its way of starting processes by fork, in a process that was itself forked from a pre-imported one.

vLLM's command line and its CPU platform demand ``spawn``, the latter whenever a configuration is checked. Spawned,
engine core and workers would import everything once more, which is most of a restart. This wraps the platform's method,
and nothing without `weightcache.preload`.
"""

import contextlib
import functools
import importlib
import os
from typing import Any, Final

from weightcache.keeper.preloaded import PRELOADED

METHOD: Final = "VLLM_WORKER_MULTIPROC_METHOD"
LATE: Final = (
    "vllm.compilation.backends",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "weightcache.integrations.vllm_loader",
)
"""Modules that engine core and workers import when they are asked for."""
LATE_BY_DEVICE: Final = {
    "cpu": ("vllm.v1.worker.cpu_worker", "vllm.v1.attention.backends.cpu_attn"),
    "cuda": ("vllm.v1.worker.gpu_worker",),
}


def wanted() -> bool:
    """Whether this process was forked from a pre-imported one."""
    return bool(os.environ.get(PRELOADED))


def allow() -> None:
    """From now on vLLM forks its processes."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    check = platform.check_and_update_config
    if getattr(check, "forks", False):
        return

    @functools.wraps(check)
    def checked(vllm_config: Any) -> None:
        check(vllm_config)
        os.environ[METHOD] = "fork"

    checked.forks = True  # type: ignore[attr-defined]
    platform.check_and_update_config = staticmethod(checked)


def preload() -> None:
    """Import what vLLM imports late; called in the resident process that engines are forked from."""
    from vllm.platforms import current_platform

    for module in (*LATE_BY_DEVICE.get(current_platform.device_type, ()), *LATE):
        with contextlib.suppress(ModuleNotFoundError):  # moved by another release: imported when it is needed
            importlib.import_module(module)
