"""Tensors on an arena: how they are made quickly, and which of them share a storage."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch

from weightcache.arena import align
from weightcache.manifest import Manifest

STORAGE_BYTES: Final = 32 << 20
"""What tensors share a storage at most; a larger tensor has one of its own. Saving a module writes no more than this
that is not its own, and 30,000 tensors need a tenth as many storages."""

STORAGE_ALIGNMENT: Final = 16

_Run = tuple[int, tuple[int, ...], tuple[int, ...] | None, int, int, int, int]
"""Rows that are alike: dtype code, shape, stride, first byte, end, bytes from one to the next, how many."""

_Maker = Callable[[torch.UntypedStorage, torch.dtype, tuple[int, ...], tuple[int, ...], int], torch.Tensor]


def views(arena: torch.Tensor, manifest: Manifest, lengths: Sequence[int]) -> Iterator[torch.Tensor]:
    """One tensor for each row, on the arena's bytes.

    Rows share a storage with those behind them as far as `STORAGE_BYTES` reach: one for all would make `torch.save` of
    a single module write the whole arena, one a tensor would make binding slow.

    Args:
        arena: uint8, one dimension.
        manifest: validated; of this arena.
        lengths: bytes of each row.
    """
    whole, size, make = arena.untyped_storage(), arena.numel(), _maker(arena.device)
    dtypes = [getattr(torch, name) for name in manifest.dtypes]
    known: dict[tuple[int, ...], tuple[int, ...]] = {}
    low, high, storage = 0, -1, whole
    typed: dict[int, torch.Tensor] = {}
    for code, shape, stride, start, end, step, count in _runs(manifest, lengths):
        if start < low or end > high:
            low = start // STORAGE_ALIGNMENT * STORAGE_ALIGNMENT
            high = max(end, min(low + STORAGE_BYTES, size))
            storage, typed = whole[low:high], {}
        item = dtypes[code].itemsize
        sizes, strides = shape, stride or known.get(shape) or known.setdefault(shape, _contiguous(shape))
        if count > 1:
            sizes, strides = (count, *shape), (step // item, *strides)
        if (made := typed.get(code)) is None:
            made = typed[code] = make(storage, dtypes[code], sizes, strides, (start - low) // item)
        else:
            made = made.as_strided(sizes, strides, (start - low) // item)
        if count > 1:
            yield from made.unbind()
        else:
            yield made


def _runs(manifest: Manifest, lengths: Sequence[int]) -> Iterator[_Run]:
    """The rows in runs, none longer than a storage: neighbours that are alike, as experts are, are made by one call."""
    code, start, end, step, count = -1, 0, 0, 0, 0
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] | None = None
    following = low = 0
    columns = zip(manifest.dtype, manifest.shapes, manifest.strides, manifest.offsets, lengths, strict=True)
    for its_code, its_shape, its_stride, offset, length in columns:
        if offset + length > low + STORAGE_BYTES or offset < low:
            low = offset  # here `views` begins a storage
        elif offset == following and its_code == code and its_shape == shape and its_stride == stride:
            following, end, count = offset + step, offset + length, count + 1
            continue
        if count:
            yield code, shape, stride, start, end, step, count
        code, shape, stride, start, end, count = its_code, its_shape, its_stride, offset, offset + length, 1
        step = align(length)
        following = offset + step
    if count:
        yield code, shape, stride, start, end, step, count


def _maker(device: torch.device) -> _Maker:
    """What makes a tensor of a storage, a dtype, a shape, strides and an offset in elements."""
    # What torch's own CUDA graph trees use. It is private, and does in 2.6 us what takes the public way 6.6.
    construct = getattr(torch._C, "_construct_CUDA_Tensor_From_Storage_And_Metadata", None)
    if construct is None or device.type != "cuda":
        return lambda storage, dtype, shape, stride, offset: torch.empty(0, dtype=dtype, device=device).set_(
            storage, offset, shape, stride
        )
    return lambda storage, dtype, shape, stride, offset: construct(
        {"dtype": dtype, "size": shape, "stride": stride, "storage_offset": offset}, storage
    )


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor, as torch counts them."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))
