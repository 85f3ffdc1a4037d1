"""A GPU arena: physical memory that lives as long as a descriptor of it, mapped read-only by whoever computes with it.

It is allocated in chunks through CUDA's virtual memory management and exported as POSIX descriptors, which a process
without CUDA can hold. Chunks are created as weights move in, so that weights and arena together never take much more
than the weights. See the CUDA driver API, "Virtual Memory Management"; `cuMemSetAccess` gives the protection.

A read-only mapping guards against accidents: a kernel that writes into it fails, and with it its process, while the
bytes stay. It does not guard against a process that takes the descriptor and maps it writable.
"""

import fcntl
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch

from weightcache.arena import align, cuda_digest
from weightcache.arena.cuda_driver import Driver, DriverError, nvidia
from weightcache.arena.cuda_range import Range, chunk_sizes, miss_of
from weightcache.arena.cuda_views import STORAGE_ALIGNMENT, views
from weightcache.errors import CacheMiss, ImportRejected, ResourceError
from weightcache.manifest import Manifest, span

KIND: Final = "cuda_vmm"
CHUNK_BYTES: Final = 2 << 30
"""96 GiB in chunks of 2 GiB map in 6 ms, of 256 MiB in 25 ms; larger ones raise what a publisher needs to spare."""

FIRST_CHUNKS: Final = 2
"""How many chunks are mapped before the GPU begins to verify them."""

_NO_HANDLE: Final = frozenset(
    {"CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_INVALID_HANDLE", "CUDA_ERROR_INVALID_RESOURCE_TYPE"}
)
_DESCRIPTORS: Final = 512
_log = logging.getLogger("weightcache.arena.cuda_vmm")


def _make_room_for_descriptors() -> None:
    """Let this process's table of descriptors grow now, to hold an arena's dozens.

    Once other threads run (a CUDA context has several) growing it waits for every processor to pass a quiescent state:
    7 ms in the middle of an attach. See ``expand_fdtable`` in Linux's fs/file.c.
    """
    try:
        os.close(fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, _DESCRIPTORS))
    except OSError:  # no standard input, or a limit below: then it grows when it must
        _log.debug("the descriptor table was not grown ahead")


_make_room_for_descriptors()  # on import, which an engine does before it touches its GPU


def prepare(device: int | None) -> None:
    """Load the digest's kernel, which the first mapping would otherwise wait for, into the context that it makes."""
    device = torch.cuda.current_device() if device is None else device
    try:
        driver = nvidia()
        torch.cuda.set_device(device)  # makes this process's context where there is none; entering the device does not
        cuda_digest.prepare(driver, device)
    except (DriverError, RuntimeError) as error:  # whoever needs the kernel meets the same, and raises it
        _log.debug("the digest's kernel was not loaded ahead: %s", error)


def require_export(device: int | None, driver: Driver | None = None, *, prove: bool = True) -> None:
    """Check that this GPU's memory can be handed over by descriptor, before anything is loaded.

    Args:
        device: CUDA ordinal, torch's current device if None.
        driver: this process's own if None.
        prove: do it with one page, which takes 1 ms, instead of believing the device's attributes.

    Raises:
        CacheMiss: ``ipc_unavailable``, with the driver's reason.
    """
    device = torch.cuda.current_device() if device is None else device
    try:
        driver = driver or nvidia()
        if not driver.can_export(device):
            raise DriverError("CUDA_ERROR_NOT_SUPPORTED", "by the device's attributes", "cuDeviceGetAttribute")
        if not prove:
            return
        handle = driver.create(driver.granularity(device), device)
        try:
            os.close(driver.export(handle))
        finally:
            driver.release(handle)
    except DriverError as error:
        if error.reason == "CUDA_ERROR_OUT_OF_MEMORY":
            return  # a full GPU can still map what is resident
        raise CacheMiss(
            "ipc_unavailable",
            f"the memory of GPU {device} cannot be handed over by descriptor: {error.message}",
            expected="virtual memory management with POSIX descriptors",
            found=error.reason,
            remedy="Start the engine with mode off on this machine",
        ) from error


class CudaVmmWriter:
    """A GPU arena while it is being filled.

    The tensors that `view` gives stay valid after `seal`, read-only: an engine that publishes moves onto the arena.

    Args:
        size: bytes, rounded up to whole pages of the GPU.
        device: CUDA ordinal.
        chunk_bytes: of every chunk but the last.
        spare: bytes of addresses kept, for `grow`; they take no memory.
        driver: this process's own if None.

    Raises:
        CacheMiss: ``ipc_unavailable``, ``residency_lost``.
    """

    kind = KIND
    digest_algorithm = cuda_digest.ALGORITHM
    digest_size = cuda_digest.SIZE

    def __init__(
        self,
        size: int,
        device: int,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        spare: int = 0,
        driver: Driver | None = None,
    ) -> None:
        try:
            self._driver = driver or nvidia()
            self._chunk_bytes, self._page = chunk_bytes, self._driver.granularity(device)
            self._sizes = chunk_sizes(size, chunk_bytes, self._page)
            self.size = sum(self._sizes)
            self.device: str | None = self._driver.uuid(device)
            self._range = Range(self._driver, align(self.size + spare, self._page), device)
        except DriverError as error:
            raise miss_of(error, "a GPU arena cannot be made") from error
        self._descriptors: list[int] = []
        self._bytes: torch.Tensor | None = None

    def write(self, offset: int, tensor: torch.Tensor) -> None:
        """Copy a contiguous tensor's bytes, from any device, to ``offset``. Chunks are created as far as that reaches.

        Raises:
            ResourceError: the GPU is full; what is written stays readable through its views.
        """
        if tensor.numel():
            content = tensor.detach().reshape(-1).view(torch.uint8)
            self._reach(offset + content.numel())
            assert self._bytes is not None
            self._bytes[offset : offset + content.numel()].copy_(content, non_blocking=True)

    def view(self, offset: int, like: torch.Tensor) -> torch.Tensor | None:
        """What lies at ``offset``, with dtype, shape and strides of ``like``; None for a tensor on another device."""
        if self._bytes is None or like.device != self._bytes.device or not like.numel():
            return None
        empty = torch.empty(0, dtype=like.dtype, device=self._bytes.device)
        low = offset // STORAGE_ALIGNMENT * STORAGE_ALIGNMENT
        end = offset + span(tuple(like.shape), like.stride()) * like.element_size()
        storage = self._bytes.untyped_storage()[low:end]
        return empty.set_(storage, (offset - low) // like.element_size(), like.shape, like.stride())

    def room(self) -> torch.Tensor:
        """The whole arena as bytes, every chunk of it created, for whoever fills it in place."""
        self._reach(self.size)
        assert self._bytes is not None
        return self._bytes

    def offset_of(self, address: int) -> int | None:
        """Where in the arena an address lies; None outside of what was given to `room`."""
        start = self._bytes.data_ptr() if self._bytes is not None else 0
        return address - start if start <= address < start + self.size else None

    def grow(self, size: int) -> None:
        """Make the arena longer; what lies in it stays where it is.

        Raises:
            ResourceError: more than was spared.
        """
        if size > self._range.size:
            raise ResourceError(
                "what a model has beside its checkpoint's tensors does not fit the arena they were read into",
                expected=f"at most {self._range.size} bytes in all",
                found=f"{size} bytes",
                needed=size,
                available=self._range.size,
            )
        made = list(self._range.sizes)
        if size > self.size:
            self._sizes = [*made, *chunk_sizes(size - sum(made), self._chunk_bytes, self._page)]
            self.size = sum(self._sizes)

    def digests(self, rows: Sequence[tuple[int, torch.Tensor]]) -> bytes:
        offsets = [offset for offset, _ in rows]
        sizes = [span(tuple(tensor.shape), tensor.stride()) * tensor.element_size() for _, tensor in rows]
        return cuda_digest.start(self.room(), offsets, sizes, self._driver)()

    def seal(self) -> list[int]:
        """Make the mapping read-only; the chunks' descriptors, owned by the caller, hold the bytes from now on."""
        self._reach(self.size)
        self._give_back()
        try:
            self._driver.synchronize(self._range.device)
            self._range.protect()
        except DriverError as error:
            raise miss_of(error, "a filled arena cannot be protected") from error
        descriptors, self._descriptors = self._descriptors, []
        return descriptors

    def chunks(self) -> list[int]:
        return list(self._sizes)

    def close(self) -> None:
        self._bytes = None
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _give_back(self) -> None:
        """Make room with what the weights moved so far have left in torch's cache."""
        if self._bytes is not None and self._bytes.is_cuda:
            torch.cuda.empty_cache()

    def _reach(self, end: int) -> None:
        while self._range.mapped < end:
            size = self._sizes[len(self._range.sizes)]
            self._give_back()
            try:
                handle = self._driver.create(size, self._range.device)
                try:
                    self._range.add(handle, size, writable=True)
                    self._descriptors.append(self._driver.export(handle))
                finally:
                    self._driver.release(handle)
            except DriverError as error:
                number = len(self._range.sizes)
                raise miss_of(
                    error, f"chunk {number} of {len(self._sizes)} of an arena cannot be made", size
                ) from error
            if self._bytes is None:
                self._bytes = self._range.tensor()


class CudaVmmMapping:
    """A GPU arena mapped read-only into one range of addresses. It is unmapped when the last tensor on it is gone.

    Args:
        descriptors: the chunks in order; may be closed once this returns.
        manifest: validated.
        device: CUDA ordinal of the GPU that will compute with it.
        driver: this process's own if None.
        rows: whose digests to begin with while the rest is still being mapped.

    Raises:
        ImportRejected: ``manifest_invalid``: a descriptor is no GPU memory, or not as much as the manifest says.
        CacheMiss: ``device`` (the weights are on another GPU), ``ipc_unavailable``, ``residency_lost``, ``resource``.
    """

    def __init__(
        self,
        descriptors: Sequence[int],
        manifest: Manifest,
        device: int,
        driver: Driver | None = None,
        rows: Sequence[int] | None = None,
    ) -> None:
        try:
            self._driver = driver or nvidia()
            here = self._driver.uuid(device)
            if here != manifest.device:
                raise CacheMiss(
                    "device",
                    f"the weights are on another GPU than CUDA device {device}",
                    expected=here,
                    found=manifest.device,
                    remedy="Run the engine on that GPU (CUDA_VISIBLE_DEVICES takes UUIDs), or load on this one",
                )
            self._range = Range(self._driver, manifest.size, device)
        except DriverError as error:
            raise miss_of(error, "the arena cannot be mapped") from error
        self._rows = rows
        self._sums: cuda_digest.Sums | None = None
        steps = _steps(len(manifest.chunks))
        try:
            for index, (descriptor, size) in enumerate(zip(descriptors, manifest.chunks, strict=True)):
                self._map(index, descriptor, size)
                if index + 1 in steps:
                    self._range.protect()
                    if index + 1 == steps[0]:
                        self._bytes = self._range.tensor()
                    if rows is not None:
                        self._digest_ahead(manifest, rows, first=index + 1 == steps[0])
        except DriverError as error:
            self._range.close()
            raise miss_of(error, "the arena cannot be mapped") from error
        except CacheMiss:
            self._range.close()  # at once: the error's traceback keeps this object alive for as long as somebody has it
            raise

    def views(self, manifest: Manifest) -> Iterator[torch.Tensor]:
        return views(self._bytes, manifest, manifest.lengths)

    def digests(self, manifest: Manifest, rows: Sequence[int]) -> Callable[[], bytes]:
        sums, self._sums = self._sums, None
        if sums is not None and rows == self._rows:
            return sums.collect
        return cuda_digest.start(self._bytes, *self._extents(manifest, rows), self._driver)

    def _digest_ahead(self, manifest: Manifest, rows: Sequence[int], *, first: bool) -> None:
        """Let the GPU begin with those rows that lie in what is readable by now."""
        if first:
            self._sums = cuda_digest.ahead(self._bytes, *self._extents(manifest, rows), self._driver)
        if self._sums is not None:
            self._sums.launch(self._bytes.data_ptr() + self._range.mapped)

    def _extents(self, manifest: Manifest, rows: Sequence[int]) -> tuple[list[int], list[int]]:
        """First byte and bytes of each of these rows."""
        offsets, sizes = manifest.offsets, manifest.lengths
        if rows != range(len(offsets)):
            offsets, sizes = [offsets[row] for row in rows], [sizes[row] for row in rows]
        return offsets, sizes

    def _map(self, index: int, descriptor: int, size: int) -> None:
        imported = False
        try:
            handle = self._driver.import_(descriptor)
            imported = True
            try:
                self._range.add(handle, size, writable=False)
            finally:
                self._driver.release(handle)
        except DriverError as error:
            # What the H200's driver says of a descriptor of something else, and of an allocation of another size.
            foreign = error.reason == ("CUDA_ERROR_NOT_SUPPORTED" if imported else "CUDA_ERROR_UNKNOWN")
            if not foreign and error.reason not in _NO_HANDLE:
                raise miss_of(error, f"chunk {index} cannot be mapped", size) from error
            raise ImportRejected(
                "manifest_invalid",
                f"descriptor {index} is not the GPU memory that the manifest describes: {error.message}",
                expected=f"an exported allocation of {size} bytes",
                found=os.readlink(f"/proc/self/fd/{descriptor}"),
                remedy="Release the generation and load the model again",
            ) from error


def _steps(chunks: int) -> list[int]:
    """After how many chunks what is mapped becomes readable: a GPU has something to verify while the rest is mapped.

    It verifies 2 GiB in 0.5 ms, and mapping them takes 0.1 ms; so every step may be twice as long as the one before.
    """
    steps: list[int] = []
    length = FIRST_CHUNKS
    while sum(steps[-1:]) + length < chunks:
        steps.append(sum(steps[-1:]) + length)
        length *= 2
    return [*steps, chunks]
