"""The third gate: whether the memory of a GPU can still be what was put there.

NVML reports faults without a CUDA context, so the daemon can listen while it owns no GPU. A fault that a program caused
is no loss: the driver ends that program and leaves other memory alone. A fault of the GPU or its driver is one, and is
told once: before the next engine attaches, and never again for the same GPU.

Which Xid is which: https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html. What asks for no more than a
restart of the program is its own fault, but for 94: that memory error is contained, and yet the bytes are gone.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

from weightcache.errors import WeightCacheError

FELL_OFF: Final = 79
"""The Xid of a GPU that left the bus."""
FATAL_XIDS: Final = {
    46: "the GPU stopped processing",
    48: "an uncorrectable memory error",
    62: "the GPU's power controller halted",
    64: "a faulty row could not be remapped",
    FELL_OFF: "the GPU has fallen off the bus",
    94: "a contained uncorrectable memory error",
    95: "an uncontained uncorrectable memory error",
    119: "the GPU's system processor does not answer the driver",
    120: "the GPU's system processor failed",
    140: "an unrecovered memory error",
}
"""Xids after which bytes in GPU memory cannot be trusted. 13, 31, 43 and 45, a program's own faults, are not among
them: the write into read-only weights that an engine dies of is a 31."""

_HEALTH_EVERY_S: Final = 10.0
_log = logging.getLogger("weightcache.gpu_watch")


class Xid(NamedTuple):
    """A fault that the driver reported of one GPU."""

    uuid: str
    number: int


class Health(NamedTuple):
    """Counters of one GPU: uncorrected memory errors since the driver was loaded, and whether a row stayed bad."""

    uncorrected: int
    remapping_failed: bool


class Finding(NamedTuple):
    """What was resident on a GPU is lost. ``detail`` is one of `weightcache.vocabulary.RESIDENCY_DETAILS`."""

    uuid: str
    detail: str
    message: str
    xid: int | None = None


class NvmlError(WeightCacheError):
    """NVML refused a call. ``reason``: ``lost`` (this GPU), ``driver`` (all of it), ``unsupported``, ``missing`` or
    ``timeout``."""

    kind = "nvml"


class Nvml(Protocol):
    """What the watcher asks of NVML; a test puts another in its place. Every method raises `NvmlError`."""

    def open(self) -> list[str]:
        """Start, and listen to every GPU; their UUIDs."""

    def wait(self, timeout_s: float) -> Xid | None:
        """The next fault, None when the time is up."""

    def health(self, uuid: str) -> Health:
        """The counters of a GPU."""

    def driver_version(self) -> str:
        """The driver's version."""

    def close(self) -> None:
        """Stop."""


class GpuWatch:
    """Watches every GPU of a node.

    Args:
        report: told about each loss, once a GPU, from the thread that runs the watch.
        nvml: the library's if None.
        clock: seconds.
    """

    def __init__(
        self, report: Callable[[Finding], None], nvml: Nvml | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._report = report
        self._nvml: Nvml = nvml or _Library()
        self._clock = clock
        self._watched: dict[str, Health | None] = {}
        self._driver = ""
        self._checked = 0.0

    def start(self) -> list[str]:
        """Begin; the UUIDs of the GPUs watched.

        Raises:
            NvmlError: ``missing`` or ``driver``: there is nothing to watch with.
        """
        self._watched = dict.fromkeys(self._nvml.open())
        self._driver = self._nvml.driver_version()
        for uuid in list(self._watched):
            self._check(uuid)
        self._checked = self._clock()
        return list(self._watched)

    def step(self, timeout_s: float = 1.0) -> bool:
        """Wait for the next fault and look at the counters when they are due. False once nothing is left to watch."""
        try:
            fault = self._nvml.wait(timeout_s)
            if fault is not None:
                self._weigh(fault)
            if self._clock() - self._checked >= _HEALTH_EVERY_S:
                self._checked = self._clock()
                self._check_driver()
                for uuid in list(self._watched):
                    self._check(uuid)
        except NvmlError as error:
            self._blame(error)
        return bool(self._watched)

    def run(self, stop: threading.Event) -> None:
        """Watch until told to stop, or until nothing is left to watch."""
        try:
            while not stop.is_set() and self.step():
                pass
        finally:
            self._nvml.close()

    def _weigh(self, fault: Xid) -> None:
        meaning = FATAL_XIDS.get(fault.number)
        if meaning is None:
            _log.info("Xid %d on %s: a program's fault, what is resident there stays", fault.number, fault.uuid)
            return
        detail = "gpu_lost" if fault.number == FELL_OFF else "driver_fault"
        self._lose(fault.uuid, detail, f"{meaning} (Xid {fault.number})", fault.number)

    def _blame(self, error: NvmlError) -> None:
        """A call that names no GPU failed: lose those that do not answer or, if all of them do, every one."""
        watched = len(self._watched)
        if error.reason == "lost":
            for uuid in list(self._watched):
                self._check(uuid)
        if len(self._watched) == watched:
            for uuid in list(self._watched):
                self._lose(uuid, "driver_fault", f"the NVIDIA driver does not answer any more: {error.message}")

    def _check(self, uuid: str) -> None:
        try:
            now = self._nvml.health(uuid)
        except NvmlError as error:
            if error.reason == "unsupported":
                return  # a GPU without these counters still reports its Xids
            if error.reason != "lost":
                raise
            self._lose(uuid, "gpu_lost", f"the GPU is gone: {error.message}")
            return
        before, self._watched[uuid] = self._watched[uuid], now
        if before is None:
            return  # what happened before the watch began, publishers have outlived
        if now.uncorrected > before.uncorrected:
            count = now.uncorrected - before.uncorrected
            self._lose(uuid, "driver_fault", f"{count} uncorrected memory errors since the last look")
        elif now.remapping_failed and not before.remapping_failed:
            self._lose(uuid, "driver_fault", "a faulty row could not be remapped")

    def _check_driver(self) -> None:
        version = self._nvml.driver_version()
        if version != self._driver:
            raise NvmlError("driver", f"the driver was reloaded: {self._driver} became {version}")

    def _lose(self, uuid: str, detail: str, message: str, xid: int | None = None) -> None:
        if uuid not in self._watched:
            return
        del self._watched[uuid]
        _log.error("what was resident on %s is lost: %s", uuid, message)
        self._report(Finding(uuid, detail, message, xid))


class _Library:
    """NVML, through ``nvidia-ml-py``."""

    def __init__(self) -> None:
        self._pynvml: Any = None
        self._devices: dict[str, Any] = {}
        self._events: Any = None

    def open(self) -> list[str]:
        try:
            import pynvml
        except ImportError as error:
            raise NvmlError("missing", f"{error}; install readmit[cuda]") from error
        self._pynvml = pynvml
        self._call(pynvml.nvmlInit)
        for index in range(self._call(pynvml.nvmlDeviceGetCount)):
            device = self._call(pynvml.nvmlDeviceGetHandleByIndex, index)
            self._devices[self._call(pynvml.nvmlDeviceGetUUID, device)] = device
        try:
            self._events = self._call(pynvml.nvmlEventSetCreate)
            for device in self._devices.values():
                self._call(pynvml.nvmlDeviceRegisterEvents, device, pynvml.nvmlEventTypeXidCriticalError, self._events)
        except NvmlError as error:
            if error.reason != "unsupported":
                raise
            _log.warning("this machine reports no Xid events; GPUs are watched by their counters alone")
            self._events = None
        return list(self._devices)

    def wait(self, timeout_s: float) -> Xid | None:
        if self._events is None:
            time.sleep(timeout_s)
            return None
        try:
            event = self._call(self._pynvml.nvmlEventSetWait_v2, self._events, int(timeout_s * 1000))
        except NvmlError as error:
            if error.reason == "timeout":
                return None
            raise
        return Xid(self._call(self._pynvml.nvmlDeviceGetUUID, event.device), int(event.eventData))

    def health(self, uuid: str) -> Health:
        pynvml, device = self._pynvml, self._devices[uuid]
        kind, since = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
        uncorrected = self._call(pynvml.nvmlDeviceGetTotalEccErrors, device, kind, since)
        _, _, _, failed = self._call(pynvml.nvmlDeviceGetRemappedRows, device)
        return Health(int(uncorrected), bool(failed))

    def driver_version(self) -> str:
        return str(self._call(self._pynvml.nvmlSystemGetDriverVersion))

    def close(self) -> None:
        if self._pynvml is not None and self._devices:
            self._devices.clear()
            if self._events is not None:
                self._call(self._pynvml.nvmlEventSetFree, self._events)
            self._call(self._pynvml.nvmlShutdown)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except self._pynvml.NVMLError as error:
            raise NvmlError(_reason(self._pynvml, error.value), f"{function.__name__}: {error}") from error


def _reason(pynvml: Any, status: int) -> str:
    return {
        pynvml.NVML_ERROR_TIMEOUT: "timeout",
        pynvml.NVML_ERROR_NOT_SUPPORTED: "unsupported",
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: "unsupported",
        pynvml.NVML_ERROR_NO_PERMISSION: "unsupported",
        pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "missing",
        pynvml.NVML_ERROR_GPU_IS_LOST: "lost",
        pynvml.NVML_ERROR_RESET_REQUIRED: "lost",
        pynvml.NVML_ERROR_NOT_FOUND: "lost",
    }.get(status, "driver")
