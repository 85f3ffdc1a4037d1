"""A CPU arena: an anonymous memory file, sealed so that nobody can ever write to it again.

Once sealed, a shared writable mapping is refused by the kernel and a private one is copy-on-write: an engine that
writes into its weights damages only its own copy. See ``memfd_create(2)`` and ``fcntl(2)``, F_ADD_SEALS.
"""

import ctypes
import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any

import torch

from weightcache import mapping, memory
from weightcache.arena import huge_pages
from weightcache.arena.seals import SEALS, memory_file, require_sealed
from weightcache.digest import tensor_digest, tensor_memory
from weightcache.errors import ResourceError
from weightcache.manifest import Manifest, span

_STEP = 256 << 20
_HEADROOM = 64 << 20
"""Left to everybody else when space is reserved: a machine filled to the last page kills somebody."""


class MemfdWriter:
    """A memory file while it is being filled.

    Args:
        size: bytes.

    Raises:
        ResourceError: less memory is available than ``size``, or no descriptor; nothing is left behind.
    """

    kind = "memfd"
    device: str | None = None
    digest_algorithm = "blake3"
    digest_size = 32

    def __init__(self, size: int) -> None:
        self.size = size
        self._descriptor = memory_file("weightcache-arena")
        try:
            _require_memory(size)
            os.ftruncate(self._descriptor, size)
            in_huge_pages = True
            for start in range(0, size, _STEP):
                step = min(_STEP, size - start)
                _require_memory(step)  # others may have taken memory since the first look
                in_huge_pages = in_huge_pages and huge_pages.reserve(self._descriptor, start, step)
                os.posix_fallocate(self._descriptor, start, step)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise _no_room(size, memory.available()) from error
            raise

    def write(self, offset: int, tensor: torch.Tensor) -> None:
        """Copy a contiguous CPU tensor's bytes to ``offset``."""
        if tensor.numel() == 0:
            return
        rest = tensor_memory(tensor.detach())
        while rest:
            written = os.pwrite(self._descriptor, rest, offset)
            rest, offset = rest[written:], offset + written

    def view(self, offset: int, like: torch.Tensor) -> None:
        return None

    def digests(self, rows: Sequence[tuple[int, torch.Tensor]]) -> bytes:
        return b"".join(tensor_digest(tensor) for _, tensor in rows)

    def seal(self) -> list[int]:
        """Seal against writing, growing and shrinking, for good."""
        fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, SEALS)
        descriptor, self._descriptor = self._descriptor, -1
        return [descriptor]

    def chunks(self) -> list[int]:
        return [self.size]

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class MemfdMapping:
    """A sealed memory file mapped copy-on-write. It is unmapped when the last tensor on it is gone.

    Args:
        descriptor: the memory file; may be closed once this returns.
        size: bytes that the manifest promises.

    Raises:
        ImportRejected: the file lacks a seal or has another size.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        require_sealed(descriptor, size, "arena")
        self._size = size
        self._memory = _map_private(descriptor, size) if size else None

    def views(self, manifest: Manifest) -> list[torch.Tensor]:
        # One storage a tensor: with one for all, `torch.save` of a single module would write the whole arena.
        memory_, frombuffer, empty = self._memory, torch.frombuffer, torch.empty
        dtypes = [getattr(torch, name) for name in manifest.dtypes]
        tensors = []
        rows = zip(manifest.dtype, manifest.shapes, manifest.strides, manifest.offsets, strict=True)
        for code, shape, stride, offset in rows:
            dtype = dtypes[code]
            count = prod(shape) if stride is None else span(shape, stride)
            if count == 0:
                tensors.append(empty(shape, dtype=dtype))
                continue
            # frombuffer itself refuses to reach past the mapping
            flat = frombuffer(memory_, dtype=dtype, count=count, offset=offset)
            tensors.append(flat.view(shape) if stride is None else flat.as_strided(shape, stride))
        return tensors

    def digests(self, manifest: Manifest, rows: Sequence[int]) -> Callable[[], bytes]:
        def compute() -> bytes:
            views = self.views(manifest)
            with ThreadPoolExecutor() as pool:  # blake3 lets go of the interpreter lock
                return b"".join(pool.map(lambda row: tensor_digest(views[row]), rows))

        return compute


def _map_private(descriptor: int, size: int) -> ctypes.Array[ctypes.c_char]:
    # mmap.mmap would keep a duplicate of the descriptor open for as long as the mapping lives.
    flags = mmap.MAP_PRIVATE | mapping.NORESERVE
    address = huge_pages.map_aligned(descriptor, size, mmap.PROT_READ | mmap.PROT_WRITE, flags)

    def unmap(self: ctypes.Array[ctypes.c_char]) -> None:
        mapping.unmap(ctypes.addressof(self), size)

    # Tensors made by frombuffer hold this object; when the last is gone the mapping goes with it.
    mapped: Any = type("Mapped", (ctypes.c_char * size,), {"__del__": unmap})
    region: ctypes.Array[ctypes.c_char] = mapped.from_address(address)
    return region


def _require_memory(size: int) -> None:
    there = memory.available()
    if there.bytes < size + _HEADROOM:
        raise _no_room(size, there)


def _no_room(size: int, there: memory.Available) -> ResourceError:
    return ResourceError(
        f"not enough memory for an arena of {size} bytes under {there.limit}",
        expected=f"{size + _HEADROOM} bytes available",
        found=f"{there.bytes} bytes",
        remedy="Release an unused generation (readmit cache release), raise the limit, or start with mode off",
        needed=size,
        available=there.bytes,
        limit=there.limit,
    )
