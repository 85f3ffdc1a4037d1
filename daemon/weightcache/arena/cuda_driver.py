"""The one seam to the CUDA driver: the calls that a GPU arena makes, and their failures as data.

Everything goes through NVIDIA's ``cuda.bindings``. A test puts another `Driver` in its place, which replays calls that
were recorded on a GPU. See the CUDA driver API, "Virtual Memory Management".
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from weightcache.errors import WeightCacheError


class DriverError(WeightCacheError):
    """The driver refused a call. ``reason`` is its own name for that, such as ``CUDA_ERROR_OUT_OF_MEMORY``."""

    kind = "driver"

    def __init__(self, name: str, description: str, call: str) -> None:
        super().__init__(name, f"{call} answered {name} ({description})", call=call, description=description)


class Driver(Protocol):
    """What a GPU arena asks of a driver. Devices are CUDA ordinals, addresses and sizes are bytes.

    Every method raises `DriverError`.
    """

    version: int
    """1000 * major + 10 * minor, as the driver says."""

    def uuid(self, device: int) -> str:
        """``GPU-`` and the UUID, which no reordering of devices changes."""

    def capability(self, device: int) -> tuple[int, int]:
        """Compute capability, major and minor."""

    def can_export(self, device: int) -> bool:
        """Whether the device's attributes promise virtual memory management with POSIX descriptors as handles."""

    def granularity(self, device: int) -> int:
        """Allocations are multiples of this many bytes."""

    def free_memory(self, device: int) -> tuple[int, int]:
        """Free and total bytes of the device."""

    def create(self, size: int, device: int) -> int:
        """Allocate physical memory that can be exported; a handle."""

    def export(self, handle: int) -> int:
        """A descriptor that keeps the memory behind a handle allocated. Close-on-exec; owned by the caller."""

    def import_(self, descriptor: int) -> int:
        """A handle to the memory that a descriptor keeps; the descriptor stays the caller's."""

    def release(self, handle: int) -> None:
        """Give a handle up; the memory stays while it is mapped or a descriptor keeps it."""

    def reserve(self, size: int) -> int:
        """A range of addresses, nothing behind it yet."""

    def unreserve(self, address: int, size: int) -> None:
        """Give a range back; nothing is mapped there any more."""

    def map(self, address: int, size: int, handle: int) -> None:
        """Put a handle's memory behind an address."""

    def unmap(self, address: int, size: int) -> None:
        """Take the memory away from a range of whole mappings. The caller has waited for the work that uses it."""

    def set_access(self, address: int, size: int, device: int, *, writable: bool) -> None:
        """Let the device's kernels read a mapped range, and write it if ``writable``."""

    def tensor(self, address: int, size: int, device: int, owner: object) -> torch.Tensor:
        """The range as a tensor of uint8, which keeps ``owner`` alive."""

    def synchronize(self, device: int) -> None:
        """Wait for everything that this process gave a device to do."""

    def load_function(self, image: bytes, name: str) -> Any:
        """A kernel of a compiled module."""

    def launch(
        self, function: Any, blocks: int, threads: int, shared: int, stream: int, arguments: Sequence[int]
    ) -> None:
        """Start a kernel on a stream; every argument is 64 bits wide."""


class _NvidiaDriver:
    """libcuda, through ``cuda.bindings``."""

    def __init__(self) -> None:
        from cuda.bindings import driver as nvidia

        self._nvidia = nvidia
        self._ok = nvidia.CUresult.CUDA_SUCCESS
        self._fd = nvidia.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._granularity: dict[int, int] = {}
        self._call(nvidia.cuInit, 0)
        self.version = int(self._call(nvidia.cuDriverGetVersion))

    def uuid(self, device: int) -> str:
        # Before CUDA 13 only the _v2 call tells the instances of a divided GPU apart; since then it has the plain name.
        ask = getattr(self._nvidia, "cuDeviceGetUuid_v2", self._nvidia.cuDeviceGetUuid)
        digits = bytes(self._call(ask, self._device(device)).bytes[:16]).hex()
        return f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"

    def capability(self, device: int) -> tuple[int, int]:
        names = self._nvidia.CUdevice_attribute
        return (
            self._attribute(names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device),
            self._attribute(names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device),
        )

    def can_export(self, device: int) -> bool:
        names = self._nvidia.CUdevice_attribute
        return bool(
            self._attribute(names.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device)
            and self._attribute(names.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, device)
        )

    def granularity(self, device: int) -> int:
        if device not in self._granularity:
            flag = self._nvidia.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
            ask = self._nvidia.cuMemGetAllocationGranularity
            self._granularity[device] = int(self._call(ask, self._properties(device), flag))
        return self._granularity[device]

    def free_memory(self, device: int) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(device)
        return int(free), int(total)

    def create(self, size: int, device: int) -> int:
        return int(self._call(self._nvidia.cuMemCreate, size, self._properties(device), 0))

    def export(self, handle: int) -> int:
        return int(self._call(self._nvidia.cuMemExportToShareableHandle, self._handle(handle), self._fd, 0))

    def import_(self, descriptor: int) -> int:
        return int(self._call(self._nvidia.cuMemImportFromShareableHandle, descriptor, self._fd))

    def release(self, handle: int) -> None:
        self._call(self._nvidia.cuMemRelease, self._handle(handle))

    def reserve(self, size: int) -> int:
        return int(self._call(self._nvidia.cuMemAddressReserve, size, 0, self._nvidia.CUdeviceptr(0), 0))

    def unreserve(self, address: int, size: int) -> None:
        self._call(self._nvidia.cuMemAddressFree, self._nvidia.CUdeviceptr(address), size)

    def map(self, address: int, size: int, handle: int) -> None:
        self._call(self._nvidia.cuMemMap, self._nvidia.CUdeviceptr(address), size, 0, self._handle(handle), 0)

    def unmap(self, address: int, size: int) -> None:
        self._call(self._nvidia.cuMemUnmap, self._nvidia.CUdeviceptr(address), size)

    def set_access(self, address: int, size: int, device: int, *, writable: bool) -> None:
        flags = self._nvidia.CUmemAccess_flags
        access = self._nvidia.CUmemAccessDesc()
        access.location.type = self._nvidia.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = device
        access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if writable else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        self._call(self._nvidia.cuMemSetAccess, self._nvidia.CUdeviceptr(address), size, [access], 1)

    def tensor(self, address: int, size: int, device: int, owner: object) -> torch.Tensor:
        return torch.as_tensor(_Range(address, size, owner), device=torch.device("cuda", device))

    def synchronize(self, device: int) -> None:
        with torch.cuda.device(device):  # the call is for the current one
            self._call(self._nvidia.cuCtxSynchronize)

    def load_function(self, image: bytes, name: str) -> Any:
        module = self._call(self._nvidia.cuModuleLoadData, image)
        return self._call(self._nvidia.cuModuleGetFunction, module, name.encode())

    def launch(
        self, function: Any, blocks: int, threads: int, shared: int, stream: int, arguments: Sequence[int]
    ) -> None:
        import ctypes

        parameters = (tuple(arguments), (ctypes.c_uint64,) * len(arguments))
        queue = self._nvidia.CUstream(stream)
        self._call(self._nvidia.cuLaunchKernel, function, blocks, 1, 1, threads, 1, 1, shared, queue, parameters, 0)

    def _device(self, ordinal: int) -> Any:
        return self._call(self._nvidia.cuDeviceGet, ordinal)

    def _attribute(self, name: Any, device: int) -> int:
        return int(self._call(self._nvidia.cuDeviceGetAttribute, name, self._device(device)))

    def _handle(self, handle: int) -> Any:
        return self._nvidia.CUmemGenericAllocationHandle(handle)

    def _properties(self, device: int) -> Any:
        properties = self._nvidia.CUmemAllocationProp()
        properties.type = self._nvidia.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = self._nvidia.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = device
        properties.requestedHandleTypes = self._fd
        return properties

    def _call(self, function: Callable[..., tuple[Any, ...]], *arguments: Any) -> Any:
        status, *results = function(*arguments)
        if status != self._ok:
            _, name = self._nvidia.cuGetErrorName(status)
            _, description = self._nvidia.cuGetErrorString(status)
            raise DriverError(name.decode(), description.decode(), function.__name__)
        return results[0] if results else None


class _Range:
    """A range of device memory in the form that torch takes without copying.

    https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html, version 2
    """

    def __init__(self, address: int, size: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),  # torch refuses what calls itself read-only; the mapping's access is what guards
            "version": 2,
        }


@functools.cache
def nvidia() -> Driver:
    """This process's driver.

    Raises:
        DriverError: there is none, or it does not start; ``CUDA_ERROR_NO_DEVICE`` and its like.
    """
    try:
        return _NvidiaDriver()
    except ImportError as error:
        raise DriverError("NOT_INSTALLED", f"{error}; install readmit[cuda]", "import cuda.bindings") from error
    except RuntimeError as error:  # cuda.pathfinder finds no libcuda.so.1
        raise DriverError("NO_DRIVER", str(error), "cuInit") from error
