"""Leave vLLM its way of starting processes by fork, in a process that was itself forked from a pre-imported one.

vLLM's CPU platform demands ``spawn`` while it checks the configuration. Spawned, engine core and workers would import
everything once more, which is most of a restart. This wraps that one method, and nothing without `weightcache.preload`.
"""

import functools
import os
from typing import Any, Final

METHOD: Final = "VLLM_WORKER_MULTIPROC_METHOD"
PRELOADED: Final = "READMIT_PRELOADED"
"""Set in processes that `weightcache.preload` has forked."""


def wanted() -> bool:
    """Whether this process was forked from a pre-imported one."""
    return bool(os.environ.get(PRELOADED))


def allow() -> None:
    """From now on vLLM forks its processes, unless whoever started it asked for another way."""
    from vllm.platforms import current_platform

    asked = os.environ.get(METHOD, "fork")
    platform = type(current_platform)
    check = platform.check_and_update_config
    if getattr(check, "forks", False):
        return

    @functools.wraps(check)
    def checked(vllm_config: Any) -> None:
        check(vllm_config)
        os.environ[METHOD] = asked

    checked.forks = True  # type: ignore[attr-defined]
    platform.check_and_update_config = staticmethod(checked)
