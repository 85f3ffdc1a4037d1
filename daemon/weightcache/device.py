"""The GPU that a process computes on: its lasting identity, its free memory, and its faults in words.

An ordinal means nothing outside a process and NVML counts in another order; the UUID that CUDA gives is the same for
everybody.
"""

import re
from typing import Final, NamedTuple

import torch

from weightcache.arena.cuda_driver import Driver, DriverError, nvidia
from weightcache.errors import WeightCacheError
from weightcache.memory import Available

FAULTS: Final = {
    "illegal_access": re.compile(r"illegal memory access|ILLEGAL_ADDRESS", re.IGNORECASE),
    "ecc": re.compile(r"uncorrectable ECC|ECC_UNCORRECTABLE", re.IGNORECASE),
    "gpu_lost": re.compile(r"no CUDA-capable device|device.{0,20} unavailable|NO_DEVICE|has fallen off", re.IGNORECASE),
    "launch_failed": re.compile(r"unspecified launch failure|LAUNCH_FAILED|misaligned address", re.IGNORECASE),
}
"""Faults after which a process can no longer use its GPU, by what CUDA's message says. Memory that a descriptor
keeps outlives the first and the last."""


class Device(NamedTuple):
    """A GPU as CUDA describes it. ``driver`` is 1000 * major + 10 * minor of the CUDA that the driver speaks."""

    ordinal: int
    uuid: str
    capability: str
    driver: int


class DeviceFault(WeightCacheError):
    """The GPU stopped this process. ``reason`` is one of `FAULTS`."""

    kind = "device"


def describe(ordinal: int, driver: Driver | None = None) -> Device:
    """The GPU with this CUDA ordinal.

    Raises:
        DriverError: there is no such GPU, or no driver.
    """
    driver = driver or nvidia()
    major, minor = driver.capability(ordinal)
    return Device(ordinal, driver.uuid(ordinal), f"sm_{major}{minor}", driver.version)


def uuid(ordinal: int | None = None) -> str | None:
    """UUID of the GPU with this ordinal, torch's current one if None; None without a GPU or a driver to ask."""
    if not torch.cuda.is_available():
        return None
    try:
        return nvidia().uuid(torch.cuda.current_device() if ordinal is None else ordinal)
    except DriverError:  # whoever maps or publishes meets the same, and raises it
        return None


def available(ordinal: int | None = None, driver: Driver | None = None) -> Available:
    """Bytes of GPU memory that may still be taken. What is resident counts as taken, whoever uses it."""
    ordinal = torch.cuda.current_device() if ordinal is None else ordinal
    free, _ = (driver or nvidia()).free_memory(ordinal)
    return Available(free, f"CUDA device {ordinal}")


def fault_of(error: BaseException) -> DeviceFault | None:
    """The fault that an exception of torch or CUDA reports, None where it is something else."""
    text = str(error)
    for reason, pattern in FAULTS.items():
        if pattern.search(text):
            message = f"the GPU stopped this process: {text.splitlines()[0]}"
            return DeviceFault(reason, message, remedy=_REMEDIES[reason])
    return None


_REMEDIES: Final = {
    "illegal_access": "A kernel read or wrote memory that is not its own; resident weights are mapped read-only, so a "
    "write into them ends here and leaves them intact. Restart the engine",
    "ecc": "The GPU lost data; what was resident there must be loaded again",
    "gpu_lost": "The GPU or its driver is gone; see dmesg for an Xid, and restart the node if it does not come back",
    "launch_failed": "A kernel failed; resident weights are intact. Restart the engine",
}
