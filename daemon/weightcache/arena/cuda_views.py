"""Tensors on an arena: how they are made quickly, and which of them share a storage."""

from collections.abc import Callable
from typing import Final

import torch

STORAGE_BYTES: Final = 32 << 20
"""What tensors share a storage at most; a larger tensor has one of its own. Saving a module writes no more than this
that is not its own, and 30,000 tensors need a tenth as many storages."""

STORAGE_ALIGNMENT: Final = 16

Maker = Callable[[torch.UntypedStorage, torch.dtype, tuple[int, ...], tuple[int, ...], int], torch.Tensor]


def maker(device: torch.device) -> Maker:
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


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor, as torch counts them."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def storage_of(offset: int, end: int, whole: int) -> tuple[int, int]:
    """First byte and end of the storage for a row and those after it.

    One for all would make `torch.save` of a single module write the whole arena; one a tensor would make binding slow.
    """
    low = offset // STORAGE_BYTES * STORAGE_BYTES
    if end <= low + STORAGE_BYTES:
        return low, min(low + STORAGE_BYTES, whole)
    return offset // STORAGE_ALIGNMENT * STORAGE_ALIGNMENT, end
