"""Addresses on a GPU and the chunks behind them, and the driver's refusals as misses."""

import logging
import sys
from typing import Final

import torch

from weightcache.arena.cuda_driver import Driver, DriverError
from weightcache.errors import CacheMiss, ResourceError

_GONE: Final = frozenset({"CUDA_ERROR_NO_DEVICE", "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA_ERROR_SYSTEM_NOT_READY"})
_BROKEN: Final = frozenset(
    {
        "CUDA_ERROR_ECC_UNCORRECTABLE",
        "CUDA_ERROR_HARDWARE_STACK_ERROR",
        "CUDA_ERROR_LAUNCH_FAILED",
        "CUDA_ERROR_UNKNOWN",
    }
)
_log = logging.getLogger("weightcache.arena.cuda_range")


class Range:
    """Addresses and the chunks mapped there, from the first byte on. Tensors made here keep it alive."""

    def __init__(self, driver: Driver, size: int, device: int) -> None:
        self.device = device
        self.size = size
        self.sizes: list[int] = []
        self._driver = driver
        self._protected = 0
        self._address = 0
        self._address = driver.reserve(size)

    @property
    def mapped(self) -> int:
        return sum(self.sizes)

    def add(self, handle: int, size: int, *, writable: bool) -> None:
        start = self._address + self.mapped
        self._driver.map(start, size, handle)
        self.sizes.append(size)
        if writable:
            self._driver.set_access(start, size, self.device, writable=True)

    def protect(self) -> None:
        """Give what was mapped since the last time to this process's kernels to read, and to none to write."""
        start, mapped = self._protected, self.mapped
        self._driver.set_access(self._address + start, mapped - start, self.device, writable=False)
        self._protected = mapped

    def tensor(self) -> torch.Tensor:
        return self._driver.tensor(self._address, self.size, self.device, self)

    def close(self) -> None:
        """Unmap everything; no tensor made here may be in use any more."""
        start, sizes, self.sizes = self._address, self.sizes, []
        self._address = 0
        if not start:
            return
        try:
            if sizes:
                self._driver.synchronize(self.device)
            at = start
            for size in sizes:
                self._driver.unmap(at, size)
                at += size
            self._driver.unreserve(start, self.size)
        except DriverError as error:  # after a fault the context takes no more calls; it goes with the process
            _log.warning("%d bytes stay mapped until this process ends: %s", self.size, error)

    def __del__(self) -> None:
        if not sys.is_finalizing():  # the end of the process takes everything along
            self.close()


def chunk_sizes(size: int, chunk_bytes: int, page: int) -> list[int]:
    """The chunks of an arena of ``size`` bytes or a little more: whole pages, all but the last of one size."""
    whole, rest = divmod(-(-max(size, 1) // page) * page, chunk_bytes)
    return [chunk_bytes] * whole + ([rest] if rest else [])


def miss_of(error: DriverError, what: str, needed: int | None = None) -> CacheMiss:
    """The driver's refusal as a miss."""
    message = f"{what}: {error.message}"
    if error.reason == "CUDA_ERROR_OUT_OF_MEMORY":
        return ResourceError(
            message, remedy="Release what is resident and unused (readmit cache release)", needed=needed
        )
    if error.reason in _GONE:
        return CacheMiss("residency_lost", message, detail="gpu_lost", found=error.reason)
    if error.reason in _BROKEN:
        return CacheMiss("residency_lost", message, detail="driver_fault", found=error.reason)
    return CacheMiss("ipc_unavailable", message, found=error.reason)
