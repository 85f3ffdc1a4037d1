"""Drivers for the seam: one writes down what a GPU's driver was asked and answered, one plays that back without a GPU.

The player keeps GPU memory in memory files, so bytes, descriptors and protection are real: a write through a read-only
mapping kills the process, as it does on a GPU. Every call must be the recorded one, in the recorded order; where the
code asks the driver anything else, the recording proves nothing any more and has to be made again.
"""

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from weightcache import mapping
from weightcache.arena.cuda_driver import Driver, DriverError

_libc = ctypes.CDLL(None)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_PROT_NONE = 0
_NOTHING = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mapping.NORESERVE

Call = dict[str, Any]


class Names:
    """Names for what differs from run to run: handles and addresses, in the order of their first use."""

    def __init__(self) -> None:
        self._handles: dict[int, str] = {}
        self._handle_count = 0
        self._ranges: list[tuple[int, int]] = []

    def new_handle(self, value: int) -> str:
        self._handles[value] = f"handle {self._handle_count}"
        self._handle_count += 1
        return self._handles[value]

    def handle(self, value: int) -> str:
        return self._handles[value]

    def new_range(self, start: int, size: int) -> str:
        self._ranges.append((start, size))
        return f"range {len(self._ranges) - 1}"

    def address(self, value: int) -> str:
        for number, (start, size) in reversed(list(enumerate(self._ranges))):
            if start <= value < start + size:
                return f"range {number} + {value - start}"
        raise AssertionError(f"address {value:#x} lies in no reserved range")


class RecordingDriver:
    """Passes every call on, and keeps it with its answer."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.version = driver.version
        self.calls: list[Call] = []
        self._names = Names()

    def uuid(self, device: int) -> str:
        return self._answered("uuid", {"device": device}, lambda: self._driver.uuid(device))

    def can_export(self, device: int) -> bool:
        return self._answered("can_export", {"device": device}, lambda: self._driver.can_export(device))

    def granularity(self, device: int) -> int:
        return self._answered("granularity", {"device": device}, lambda: self._driver.granularity(device))

    def create(self, size: int, device: int) -> int:
        arguments = {"size": size, "device": device}
        return self._answered("create", arguments, lambda: self._driver.create(size, device), self._names.new_handle)

    def export(self, handle: int) -> int:
        arguments = {"handle": self._names.handle(handle)}
        return self._answered("export", arguments, lambda: self._driver.export(handle), lambda _: "descriptor")

    def import_(self, descriptor: int) -> int:
        call = lambda: self._driver.import_(descriptor)  # noqa: E731
        return self._answered("import_", {}, call, self._names.new_handle)

    def release(self, handle: int) -> None:
        self._answered("release", {"handle": self._names.handle(handle)}, lambda: self._driver.release(handle))

    def reserve(self, size: int) -> int:
        call = lambda: self._driver.reserve(size)  # noqa: E731
        return self._answered("reserve", {"size": size}, call, lambda start: self._names.new_range(start, size))

    def unreserve(self, address: int, size: int) -> None:
        arguments = {"address": self._names.address(address), "size": size}
        self._answered("unreserve", arguments, lambda: self._driver.unreserve(address, size))

    def map(self, address: int, size: int, handle: int) -> None:
        where = {"address": self._names.address(address), "size": size, "handle": self._names.handle(handle)}
        self._answered("map", where, lambda: self._driver.map(address, size, handle))

    def unmap(self, address: int, size: int) -> None:
        arguments = {"address": self._names.address(address), "size": size}
        self._answered("unmap", arguments, lambda: self._driver.unmap(address, size))

    def set_access(self, address: int, size: int, device: int, *, writable: bool) -> None:
        where = {"address": self._names.address(address), "size": size, "device": device, "writable": writable}
        self._answered("set_access", where, lambda: self._driver.set_access(address, size, device, writable=writable))

    def synchronize(self, device: int) -> None:
        self._answered("synchronize", {"device": device}, lambda: self._driver.synchronize(device))

    # What follows runs kernels or makes tensors; the player has no use for a record of it.

    def capability(self, device: int) -> tuple[int, int]:
        return self._driver.capability(device)

    def free_memory(self, device: int) -> tuple[int, int]:
        return self._driver.free_memory(device)

    def tensor(self, address: int, size: int, device: int, owner: object) -> torch.Tensor:
        return self._driver.tensor(address, size, device, owner)

    def load_function(self, image: bytes, name: str) -> Any:
        return self._driver.load_function(image, name)

    def launch(
        self, function: Any, blocks: int, threads: int, shared: int, stream: int, arguments: Sequence[int]
    ) -> None:
        self._driver.launch(function, blocks, threads, shared, stream, arguments)

    def _answered(
        self, name: str, arguments: dict[str, Any], call: Callable[[], Any], named: Callable[[Any], Any] | None = None
    ) -> Any:
        try:
            result = call()
        except DriverError as error:
            answer = [error.reason, error.data["description"], error.data["call"]]
            self.calls.append({"call": name, **arguments, "error": answer})
            raise
        self.calls.append({"call": name, **arguments, "result": named(result) if named else result})
        return result


class HostDriver:
    """GPU memory in memory files: bytes, descriptors, sharing and protection are real, everything else is refused."""

    version = 0
    page = 2 << 20

    def __init__(self, uuid: str = "GPU-host") -> None:
        self._uuid = uuid
        self._files: dict[int, int] = {}
        self._handle_count = 0

    def uuid(self, device: int) -> str:
        return self._uuid

    def can_export(self, device: int) -> bool:
        return True

    def granularity(self, device: int) -> int:
        return self.page

    def create(self, size: int, device: int) -> int:
        file = os.memfd_create("gpu-memory", os.MFD_CLOEXEC)
        os.ftruncate(file, size)
        return self._new_handle(file)

    def export(self, handle: int) -> int:
        return os.dup(self._files[handle])

    def import_(self, descriptor: int) -> int:
        return self._new_handle(os.dup(descriptor))

    def release(self, handle: int) -> None:
        os.close(self._files.pop(handle))

    def reserve(self, size: int) -> int:
        return mapping.map_at(None, size, _PROT_NONE, _NOTHING)

    def unreserve(self, address: int, size: int) -> None:
        mapping.unmap(address, size)

    def map(self, address: int, size: int, handle: int) -> None:
        mapping.map_at(address, size, _PROT_NONE, mmap.MAP_SHARED | mapping.FIXED, self._files[handle])

    def unmap(self, address: int, size: int) -> None:
        mapping.map_at(address, size, _PROT_NONE, _NOTHING | mapping.FIXED)

    def set_access(self, address: int, size: int, device: int, *, writable: bool) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        assert _libc.mprotect(address, size, protection) == 0

    def synchronize(self, device: int) -> None:
        pass

    def tensor(self, address: int, size: int, device: int, owner: object) -> torch.Tensor:
        region = type("Region", (ctypes.c_ubyte * size,), {}).from_address(address)
        region.owner = owner
        return torch.frombuffer(region, dtype=torch.uint8)

    def capability(self, device: int) -> tuple[int, int]:
        raise AssertionError("without a GPU no kernel is compiled")

    def free_memory(self, device: int) -> tuple[int, int]:
        raise AssertionError("no scenario asks for free memory")

    def load_function(self, image: bytes, name: str) -> Any:
        raise AssertionError("without a GPU no kernel is loaded")

    def launch(
        self, function: Any, blocks: int, threads: int, shared: int, stream: int, arguments: Sequence[int]
    ) -> None:
        raise AssertionError("without a GPU no kernel is started")

    def _new_handle(self, file: int) -> int:
        self._handle_count += 1
        self._files[self._handle_count] = file
        return self._handle_count


class ReplayDriver(HostDriver):
    """A `HostDriver` that lets through the recorded calls alone, with the answers that a GPU's driver gave."""

    def __init__(self, calls: list[Call]) -> None:
        super().__init__()
        self._calls = list(calls)
        self._names = Names()

    def finish(self) -> None:
        """Every recorded call must have been made."""
        assert not self._calls, f"{len(self._calls)} recorded calls were not made, first {self._calls[0]}"

    def uuid(self, device: int) -> str:
        return str(self._next("uuid", device=device))

    def can_export(self, device: int) -> bool:
        return bool(self._next("can_export", device=device))

    def granularity(self, device: int) -> int:
        return int(self._next("granularity", device=device))

    def create(self, size: int, device: int) -> int:
        self._next("create", size=size, device=device)
        return super().create(size, device)

    def export(self, handle: int) -> int:
        self._next("export", handle=self._names.handle(handle))
        return super().export(handle)

    def import_(self, descriptor: int) -> int:
        self._next("import_")
        return super().import_(descriptor)

    def release(self, handle: int) -> None:
        self._next("release", handle=self._names.handle(handle))
        super().release(handle)

    def reserve(self, size: int) -> int:
        self._next("reserve", size=size)
        start = super().reserve(size)
        self._names.new_range(start, size)
        return start

    def unreserve(self, address: int, size: int) -> None:
        self._next("unreserve", address=self._names.address(address), size=size)
        super().unreserve(address, size)

    def map(self, address: int, size: int, handle: int) -> None:
        where = {"address": self._names.address(address), "size": size, "handle": self._names.handle(handle)}
        self._next("map", **where)
        super().map(address, size, handle)

    def unmap(self, address: int, size: int) -> None:
        self._next("unmap", address=self._names.address(address), size=size)
        super().unmap(address, size)

    def set_access(self, address: int, size: int, device: int, *, writable: bool) -> None:
        self._next("set_access", address=self._names.address(address), size=size, device=device, writable=writable)
        super().set_access(address, size, device, writable=writable)

    def synchronize(self, device: int) -> None:
        self._next("synchronize", device=device)

    def _new_handle(self, file: int) -> int:
        handle = super()._new_handle(file)
        self._names.new_handle(handle)
        return handle

    def _next(self, name: str, **arguments: Any) -> Any:
        assert self._calls, f"the code makes a call that was not recorded: {name} {arguments}"
        recorded = dict(self._calls.pop(0))
        error, result = recorded.pop("error", None), recorded.pop("result", None)
        assert recorded == {"call": name, **arguments}, f"recorded {recorded}, called {name} {arguments}"
        if error is not None:
            raise DriverError(*error)
        return result
