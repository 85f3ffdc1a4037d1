"""Arenas: one rank's bytes behind file descriptors that outlive their creator.

`memfd` keeps them in host memory, `cuda_vmm` in GPU memory. A manifest (`weightcache.manifest`) describes what lies
where; a descriptor is the handle in both cases and travels over a Unix socket.
"""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

    from weightcache.manifest import Manifest

ALIGNMENT = 256
"""Every tensor starts at a multiple of this many bytes: the widest alignment that CPU and GPU kernels ask for."""


def align(offset: int, alignment: int = ALIGNMENT) -> int:
    """The next multiple of ``alignment`` at or after ``offset``."""
    return -(-offset // alignment) * alignment


class WritableArena(Protocol):
    """An arena while it is being filled."""

    kind: str
    size: int
    device: str | None
    """UUID of the GPU that the bytes are on, None in host memory."""
    digest_algorithm: str
    digest_size: int

    def write(self, offset: int, tensor: "torch.Tensor") -> None:
        """Copy a contiguous tensor's bytes to ``offset``."""

    def view(self, offset: int, like: "torch.Tensor") -> "torch.Tensor | None":
        """What takes the place of a tensor written to ``offset``, where there is no room for both; else None."""

    def digests(self, rows: "Sequence[tuple[int, torch.Tensor]]") -> bytes:
        """The digests, end to end, of written tensors, each given with its offset (or with what took its place)."""

    def seal(self) -> list[int]:
        """End writing; the descriptors (owned by the caller) that hold the bytes from now on, in order."""

    def chunks(self) -> list[int]:
        """The size in bytes of what each descriptor holds."""

    def close(self) -> None:
        """Give the bytes up, unless `seal` has handed them over."""


class FilledArena(WritableArena, Protocol):
    """An arena that a loader has read weights into."""

    def offset_of(self, address: int) -> int | None:
        """Where in the arena the byte at an address of this process lies; None for an address outside of it."""

    def grow(self, size: int) -> None:
        """Make it this long, for what else a model has; what lies in it stays where it is."""


class MappedArena(Protocol):
    """An arena mapped into this process so that nothing here can change what others see."""

    def views(self, manifest: "Manifest") -> "Iterable[torch.Tensor]":
        """One tensor for each row of the manifest, on the arena's bytes; made one by one, if that is quicker."""

    def digests(self, manifest: "Manifest", rows: "Sequence[int]") -> "Callable[[], bytes]":
        """Begin to compute the digests of these rows from the mapped bytes; the call's result waits for them.

        They come end to end, as a manifest keeps them. A GPU works on them while its process does something else.
        """
