"""How a `CacheConfig` names what torch knows of."""

import torch


def dtype_name(dtype: torch.dtype) -> str:
    """Such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def capability_name(device: torch.device) -> str | None:
    """The compute capability of a CUDA device, such as ``sm_90``; None on a CPU."""
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
