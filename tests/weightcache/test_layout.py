"""Layouts: which bytes of a model go where, and that they come back from an arena with shape, stride and sharing."""

import ctypes
import os
from collections.abc import Callable

import pytest
import torch
from tests.weightcache.models import Tiny, config, contents, fill
from torch import nn

from weightcache import layout
from weightcache.arena import ALIGNMENT
from weightcache.arena.memfd import MemfdMapping
from weightcache.manifest import validate
from weightcache.publish import Packed, pack


class Holder(nn.Module):
    """A module with these parameters."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


def mapped(model: nn.Module) -> tuple[Packed, dict[str, torch.Tensor]]:
    """A model's tensors after a way through an arena, by their first names."""
    packed = pack(model, config(), origin="here")
    validate(packed.manifest)
    tensors = MemfdMapping(packed.descriptors[1], packed.manifest.size).views(packed.manifest)
    packed.close()
    return packed, dict(zip(packed.manifest.names, tensors, strict=True))


def base(rows: int = 6, columns: int = 10, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(rows * columns).reshape(rows, columns).to(dtype)


VIEWS: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": base,
    "transposed": lambda: base().t(),
    "column slice": lambda: base()[:, 2:5],
    "row slice": lambda: base()[2:4],
    "every second row": lambda: base()[::2],
    "scalar": lambda: torch.tensor(7.0),
    "empty": lambda: torch.empty(0, 3),
    "expanded": lambda: torch.arange(3.0).expand(4, 3),
    "complex": lambda: torch.view_as_complex(base(6, 2)),
    "bool": lambda: base() > 5,
    "fp8": lambda: base(dtype=torch.float8_e4m3fn),
    "fp8 scales": lambda: base().to(torch.float8_e8m0fnu),
    "uint64": lambda: base(dtype=torch.uint64),
}


@pytest.mark.parametrize("make", VIEWS.values(), ids=VIEWS)
def test_a_tensor_comes_back_as_it_was(make: Callable[[], torch.Tensor]) -> None:
    model = Holder(weight=make())
    _, tensors = mapped(model)
    there = Holder()
    there.register_parameter("weight", nn.Parameter(tensors["weight"], requires_grad=False))
    assert contents(there) == contents(model)


def test_fifty_tensors_of_mixed_types_at_odd_offsets_of_one_storage() -> None:
    storage = torch.arange(5000, dtype=torch.uint8)
    source = memoryview((ctypes.c_ubyte * 5000).from_address(storage.data_ptr()))
    dtypes = (torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.float8_e4m3fn)
    tensors, at = {}, 1
    for number in range(50):
        dtype = dtypes[number % len(dtypes)]
        at = -(-at // dtype.itemsize) * dtype.itemsize
        tensors[f"t{number}"] = torch.frombuffer(source, dtype=dtype, count=3 + number % 4, offset=at)
        at += tensors[f"t{number}"].nbytes + number % 3
    model = Holder(**tensors)
    _, found = mapped(model)
    assert contents(Holder(**found)) == contents(model)


def test_a_tied_tensor_is_stored_once_under_all_its_names() -> None:
    model = Tiny()
    fill(model)
    plan = layout.of(model)
    assert [row.name for row in plan.rows].count("embed.weight") == 1
    names = [row.name for row in plan.rows]
    assert {name: names[row] for name, row in plan.aliases.items()} == {"head.weight": "embed.weight"}


def test_views_of_one_storage_share_their_bytes_and_are_counted_once() -> None:
    whole = base()
    model = Holder(whole=whole, turned=whole.t(), columns=whole[:, 2:5], apart=base())
    packed, tensors = mapped(model)
    assert packed.manifest.shared == [[0, 1, 2]]
    assert packed.manifest.size < 4 * ALIGNMENT  # how much less depends on where malloc put the storage
    assert contents(Holder(**tensors)) == contents(model)
    tensors["turned"][3, 1] = 99.0
    assert tensors["whole"][1, 3] == tensors["columns"][1, 1] == 99.0
    assert not (tensors["apart"] == 99.0).any()


def test_overlapping_views_of_which_none_holds_all_bytes() -> None:
    whole = base(2, 64)
    memory = memoryview((ctypes.c_ubyte * whole.nbytes).from_address(whole.data_ptr()))
    front = torch.frombuffer(memory, dtype=torch.float32, count=80)
    back = torch.frombuffer(memory, dtype=torch.float32, count=80, offset=48 * 4)
    model = Holder(front=front, back=back)
    packed, tensors = mapped(model)
    assert packed.manifest.shared == [[0, 1]]
    assert contents(Holder(**tensors)) == contents(model)
    tensors["front"][48] = -1.0
    assert tensors["back"][0] == -1.0


def test_neighbours_in_one_storage_are_apart() -> None:
    """Disjoint parts of one allocation become tensors of their own, each aligned."""
    storage = torch.arange(64.0)
    packed, tensors = mapped(Holder(low=storage[:10], high=storage[10:20]))
    assert packed.manifest.shared == []
    assert all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors.values())


def test_tensors_start_aligned_and_kinds_are_kept() -> None:
    model = Tiny()
    plan = layout.of(model)
    assert all(row.offset % ALIGNMENT == 0 for row in plan.rows)
    kinds = {row.name: row.kind for row in plan.rows}
    assert (kinds["embed.weight"], kinds["seen"], kinds["inv_freq"]) == (0, 1, 2)


@pytest.mark.parametrize("model", [nn.Module(), Holder(nothing=torch.empty(0))], ids=["no tensors", "no bytes"])
def test_a_model_without_bytes_has_an_arena_all_the_same(model: nn.Module) -> None:
    packed, tensors = mapped(model)
    assert packed.manifest.size == ALIGNMENT
    assert contents(Holder(**tensors)) == contents(model)


def test_packing_leaves_no_descriptor_behind_when_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))

    def broken(*_: object) -> None:
        raise RuntimeError("out of luck")

    for place in ("weightcache.publish._manifest", "weightcache.publish.sealed_file", "weightcache.publish._write"):
        with monkeypatch.context() as patch:
            patch.setattr(place, broken)
            with pytest.raises(RuntimeError, match="out of luck"):
                pack(Tiny(), config(), origin="here")
    assert len(os.listdir("/proc/self/fd")) == before
