"""Tensors on an arena, whatever lies beside them: the right bytes, and a storage hardly longer than needed."""

from typing import Any
from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.weightcache.models import config

from weightcache.arena import align, cuda_views
from weightcache.manifest import Manifest, Publisher, validate

STORAGE = 4096
DTYPES = ["bfloat16", "float32", "uint8"]
ROW = st.tuples(
    st.integers(0, 2),  # dtype
    st.sampled_from([(), (0, 3), (5,), (16, 8), (7, 3), (64, 64)]),
    st.booleans(),  # transposed
    st.integers(1, 6),  # how many of them, side by side
    st.sampled_from([0, 0, 256, 4096]),  # what is left free before them
)


def manifest_of(rows: list[tuple[Any, ...]]) -> Manifest:
    dtype, shapes, strides, offsets, end = [], [], [], [], 0
    for code, shape, transposed, count, gap in rows:
        end += gap
        for _ in range(count):
            size = torch.Size(shape).numel() * getattr(torch, DTYPES[code]).itemsize
            dtype.append(code)
            shapes.append(shape)
            strides.append((1, shape[0]) if transposed and len(shape) == 2 and size else None)
            offsets.append(end)
            end = align(end + size)
    return Manifest(
        config=config(),
        publisher=Publisher(1, "python", "here", None, 0),
        arena="cuda_vmm",
        chunks=[align(max(end, 1), 512)],
        names=[f"t{row}" for row in range(len(dtype))],
        dtypes=DTYPES,
        dtype=dtype,
        shapes=shapes,
        strides=strides,
        offsets=offsets,
        kinds=bytes(len(dtype)),
        digest_algorithm="mix64",
        digest_size=8,
        digests=bytes(8 * len(dtype)),
    )


@settings(max_examples=80, deadline=None)
@given(st.lists(ROW, max_size=8))
def test_each_row_has_its_bytes_and_a_storage_of_its_neighbourhood(rows: list[tuple[Any, ...]]) -> None:
    manifest = manifest_of(rows)
    validate(manifest)
    arena = torch.randint(0, 256, (manifest.size,), dtype=torch.uint8)
    sizes = manifest.lengths
    with mock.patch.object(cuda_views, "STORAGE_BYTES", STORAGE), torch.no_grad():
        found = list(cuda_views.views(arena, manifest, sizes))
    assert len(found) == len(manifest)
    for row, view in enumerate(found):
        dtype = getattr(torch, DTYPES[manifest.dtype[row]])
        stride = manifest.strides[row] or torch.empty(manifest.shapes[row]).stride()
        assert (view.shape, view.stride(), view.dtype) == (manifest.shapes[row], stride, dtype)
        if sizes[row]:
            assert view.data_ptr() == arena.data_ptr() + manifest.offsets[row]
            assert view.untyped_storage().nbytes() <= max(STORAGE, sizes[row] + cuda_views.STORAGE_ALIGNMENT)
