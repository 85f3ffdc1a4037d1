"""GPU memory by process, as NVIDIA's driver counts it. Source: NVML's ``nvmlDeviceGetComputeRunningProcesses``."""

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol

log = logging.getLogger("readmit.gate")


class GpuMemory(Protocol):
    """Who knows it."""

    def by_process(self) -> Mapping[int, int]:
        """Bytes on all GPUs of every process that has any; empty where nobody can say."""


class Nvml:
    """The driver's library, where there is one; nvidia-ml-py comes with ``readmit[cuda]``."""

    def __init__(self) -> None:
        self._pynvml: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
        except ImportError:
            return
        except pynvml.NVMLError as error:  # no driver, or no GPU
            log.debug("GPU memory is not known: %s", error)
            return
        self._pynvml = pynvml

    def by_process(self) -> Mapping[int, int]:
        used: Counter[int] = Counter()
        if (nvml := self._pynvml) is None:
            return used
        try:
            for index in range(nvml.nvmlDeviceGetCount()):
                device = nvml.nvmlDeviceGetHandleByIndex(index)
                for process in nvml.nvmlDeviceGetComputeRunningProcesses(device):
                    used[process.pid] += process.usedGpuMemory or 0  # None where the driver does not say, as under MIG
        except nvml.NVMLError as error:  # a GPU that is being lost
            log.debug("GPU memory is not known: %s", error)
        return used
