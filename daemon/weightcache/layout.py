"""The layout: which bytes of a loaded model go where in an arena.

Tensors that share a storage (views of one buffer, a transposed weight) share their bytes in the arena too, stride and
all; tensors that are one object under several names (tied weights) are stored once.
"""

import ctypes
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from weightcache.arena import ALIGNMENT, FilledArena, align
from weightcache.binding import Place, walk
from weightcache.manifest import KINDS


class Region(NamedTuple):
    """A run of bytes of one storage that goes to ``offset`` in the arena, and the rows that lie in it.

    Without a ``source`` it is there.
    """

    offset: int
    size: int
    source: torch.Tensor | None
    rows: list[int]


class Row(NamedTuple):
    """One stored tensor; ``offset`` in bytes from the arena's start."""

    name: str
    tensor: torch.Tensor
    kind: int
    offset: int


class Layout(NamedTuple):
    """Where everything goes; ``size`` in bytes."""

    size: int
    rows: list[Row]
    regions: list[Region]
    aliases: dict[str, int]

    @property
    def device(self) -> torch.device:
        """Where the weights are: a GPU if any of them is on one."""
        devices = {row.tensor.device for row in self.rows}
        return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))

    @property
    def shared(self) -> list[list[int]]:
        """Groups of rows that overlap on purpose."""
        return [region.rows for region in self.regions if len(region.rows) > 1]


def of(model: nn.Module, arena: FilledArena | None = None) -> Layout:
    """The layout of a loaded model's parameters and buffers, in the order of the module tree.

    Args:
        model: loaded.
        arena: one that some of it lies in already. That stays there, and the rest comes behind.
    """
    found: list[Place] = []
    first: dict[int, int] = {}
    aliases: dict[str, int] = {}
    for place in walk(model).places:
        if id(place.tensor) in first:
            aliases[place.name] = first[id(place.tensor)]
        else:
            first[id(place.tensor)] = len(found)
            found.append(place)
    offsets = [0] * len(found)
    regions = []
    end = 0 if arena is None else arena.size
    for low, high, members in _runs(found):
        there = None if arena is None else arena.offset_of(low)
        if there is not None:
            start, source = there, None
        else:
            # Several views of one storage keep its phase, so that every one of them stays as aligned as it was.
            start = align(end) + (low % ALIGNMENT if len(members) > 1 else 0)
            source = _bytes([found[row].tensor for row in members], low, high)
            end = start + high - low
        regions.append(Region(start, high - low, source, members))
        for member in members:
            offsets[member] = start + _extent(found[member].tensor)[0] - low
    rows = [Row(place.name, place.tensor, _kind(place), offset) for place, offset in zip(found, offsets, strict=True)]
    return Layout(align(max(end, 1)), rows, regions, aliases)  # an arena has bytes, even if no tensor has any


def _runs(found: list[Place]) -> Iterator[tuple[int, int, list[int]]]:
    """Runs of overlapping bytes: first address, end, and the rows in it, in the order of their first row."""
    extents = [(*_extent(place.tensor), row) for row, place in enumerate(found)]
    runs: list[tuple[int, int, list[int]]] = []
    for low, high, row in sorted(extents):
        if low == high:
            continue  # an empty tensor has no bytes
        if runs and low < runs[-1][1]:
            start, end, members = runs[-1]
            members.append(row)
            runs[-1] = (start, max(end, high), members)
        else:
            runs.append((low, high, [row]))
    return iter(sorted(runs, key=lambda run: min(run[2])))


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The first address of a tensor's elements and the end of the last, in bytes."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    last = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _bytes(members: list[torch.Tensor], low: int, high: int) -> torch.Tensor:
    """The bytes between two addresses, which these overlapping tensors cover."""
    for tensor in members:
        storage = tensor.untyped_storage()
        start = low - storage.data_ptr()
        if start >= 0 and start + high - low <= storage.nbytes():
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            return flat[start : start + high - low]
    # Overlapping storages, none of which holds it all: made over one piece of memory by torch.frombuffer.
    whole = (ctypes.c_ubyte * (high - low)).from_address(low)
    return torch.frombuffer(whole, dtype=torch.uint8)


def _kind(place: Place) -> int:
    if place.is_parameter:
        return KINDS.index("parameter")
    persistent = place.key not in place.module._non_persistent_buffers_set
    return KINDS.index("buffer" if persistent else "non_persistent_buffer")
