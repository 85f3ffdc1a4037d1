"""torch's allocator while an engine loads weights of its own that will then move to an arena."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any, Final

import torch

_OPTION: Final = "expandable_segments"


@contextlib.contextmanager
def growing() -> Iterator[None]:
    """Let segments grow page by page inside the block, unless the environment says otherwise.

    Segments of fixed size waste a sixth on many small tensors (five of 3.4 MiB lie in 20 MiB), and one goes back to
    the GPU only when all of its tensors have moved. Pages go as they are left. Afterwards torch allocates nothing in
    what is left of these segments, so what other processes open by CUDA IPC never lies there.
    https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf
    """
    configured = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    if _OPTION in configured:
        yield
        return
    # Whatever a setting leaves out goes back to its default, so what was configured is said again.
    _set(",".join(filter(None, (configured, f"{_OPTION}:True"))))
    try:
        yield
    finally:
        _set(",".join(filter(None, (configured, f"{_OPTION}:False"))))


def _set(settings: str) -> None:
    private: Any = torch._C
    # The second name until torch 2.9.
    change = getattr(private, "_accelerator_setAllocatorSettings", None)
    (change or private._cuda_cudaCachingAllocator_set_allocator_settings)(settings)
