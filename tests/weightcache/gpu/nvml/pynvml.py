"""In the place of NVIDIA's ``pynvml``: two GPUs that are as the file named by ``FAKE_NVML`` says, at any moment.

The file is JSON: ``wait`` (an Xid as ``[GPU, number]``, or a status that the call fails with), ``health`` (by GPU:
``[uncorrected errors, remapping failed]`` or a status), ``version`` (of the driver, or a status), ``events`` (False
where the machine reports none). Statuses are those of nvml.h.
"""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NVML_ERROR_UNINITIALIZED = 1
NVML_ERROR_NOT_SUPPORTED = 3
NVML_ERROR_NO_PERMISSION = 4
NVML_ERROR_NOT_FOUND = 6
NVML_ERROR_DRIVER_NOT_LOADED = 9
NVML_ERROR_TIMEOUT = 10
NVML_ERROR_LIBRARY_NOT_FOUND = 12
NVML_ERROR_FUNCTION_NOT_FOUND = 13
NVML_ERROR_GPU_IS_LOST = 15
NVML_ERROR_RESET_REQUIRED = 16
NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18
NVML_ERROR_UNKNOWN = 999
NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
NVML_VOLATILE_ECC = 0
nvmlEventTypeXidCriticalError = 8  # noqa: N816 - NVML's own name

GPUS = ("GPU-1", "GPU-2")
_told: list[Any] = []


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


def _now() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(os.environ["FAKE_NVML"]).read_text())
    return found


def _answer(value: Any) -> Any:
    if isinstance(value, int):
        raise NVMLError(value)
    return value


def nvmlInit() -> None:  # noqa: N802
    _told.clear()


def nvmlShutdown() -> None:  # noqa: N802
    pass


def nvmlDeviceGetCount() -> int:  # noqa: N802
    return len(GPUS)


def nvmlDeviceGetHandleByIndex(index: int) -> str:  # noqa: N802
    return GPUS[index]


def nvmlDeviceGetUUID(device: str) -> str:  # noqa: N802
    return device


def nvmlEventSetCreate() -> object:  # noqa: N802
    return _answer(_now().get("events", "an event set"))


def nvmlDeviceRegisterEvents(device: str, kinds: int, events: object) -> None:  # noqa: N802
    assert device in GPUS
    assert kinds == nvmlEventTypeXidCriticalError


def nvmlEventSetFree(events: object) -> None:  # noqa: N802
    pass


def nvmlEventSetWait_v2(events: object, timeout_ms: int) -> SimpleNamespace:  # noqa: N802
    happened = _now().get("wait")
    if happened is None or happened in _told:
        time.sleep(min(timeout_ms / 1000, 0.05))
        raise NVMLError(NVML_ERROR_TIMEOUT)
    _told.append(happened)
    device, number = _answer(happened)
    return SimpleNamespace(device=device, eventData=number)


def nvmlDeviceGetTotalEccErrors(device: str, kind: int, since: int) -> int:  # noqa: N802
    assert (kind, since) == (NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC)
    return int(_answer(_now().get("health", {}).get(device, [0, False]))[0])


def nvmlDeviceGetRemappedRows(device: str) -> tuple[int, int, bool, bool]:  # noqa: N802
    return 0, 0, False, bool(_answer(_now().get("health", {}).get(device, [0, False]))[1])


def nvmlSystemGetDriverVersion() -> str:  # noqa: N802
    return str(_answer(_now().get("version", "580.1")))
