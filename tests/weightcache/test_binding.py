"""Binding: all or nothing, sharing kept, buffers private, attributes following, nothing left without a value."""

import re
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.weightcache.models import Tiny, config, contents, fill, skeleton
from torch import nn

from weightcache.arena.memfd import MemfdMapping
from weightcache.binding import Binding, require_no_meta, walk
from weightcache.errors import ImportRejected, ResourceError
from weightcache.publish import pack


def bind(model: nn.Module, source: nn.Module) -> None:
    """Bind a model to what a loaded one holds, as an attach does."""
    packed = pack(source, config(), origin="here")
    tensors = MemfdMapping(packed.descriptors[1], packed.manifest.size).views(packed.manifest)
    packed.close()
    binding = Binding(model, packed.manifest, tensors)
    binding.copy_buffers()
    binding.place_parameters()
    binding.place_buffers()


def loaded(seed: int = 0) -> Tiny:
    model = Tiny()
    fill(model, seed)
    return model


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def refusal(model: nn.Module, source: nn.Module) -> ImportRejected:
    """Why a model is not bound; it must be what it was before."""
    before = {place.name: place.tensor for place in walk(model).places}
    with pytest.raises(ImportRejected) as refused:
        bind(model, source)
    after = {place.name: place.tensor for place in walk(model).places}
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)
    return refused.value


def test_a_bound_model_holds_what_was_loaded() -> None:
    source, model = loaded(), skeleton()
    bind(model, source)
    assert contents(model) == contents(source)
    assert model.inv_freq[0] == 1.0
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    require_no_meta(model)


def test_tied_names_are_one_parameter_and_attributes_follow() -> None:
    model = skeleton()
    bind(model, loaded())
    assert model.head.weight is model.embed.weight
    assert model.by_name["embedding"] is model.embed.weight
    model.embed.weight.data[0, 0] = 5.0
    assert model.head.weight[0, 0] == 5.0


def test_names_that_the_checkpoint_does_not_tie_come_apart() -> None:
    source = loaded()
    source.head.weight = nn.Parameter(source.embed.weight.data + 1)
    model = skeleton()
    bind(model, source)
    assert model.head.weight is not model.embed.weight
    assert torch.equal(model.head.weight, source.head.weight)


def test_names_that_the_skeleton_does_not_tie_share_all_the_same() -> None:
    model = skeleton()
    with torch.device("meta"):
        model.head.weight = nn.Parameter(torch.empty(8, 16, dtype=torch.bfloat16))
    bind(model, loaded())
    assert model.head.weight is model.embed.weight


def test_buffers_are_private_and_shared_buffers_stay_one() -> None:
    def make() -> nn.Module:
        module = nn.Module()
        module.register_buffer("one", torch.arange(4.0))
        module.register_buffer("other", module.one, persistent=False)
        return module

    source, first, second = make(), on_meta(make), on_meta(make)
    packed = pack(source, config(), origin="here")
    tensors = MemfdMapping(packed.descriptors[1], packed.manifest.size).views(packed.manifest)
    packed.close()
    for model in (first, second):
        binding = Binding(model, packed.manifest, tensors)
        binding.copy_buffers()
        binding.place_buffers()
    assert first.one is first.other
    first.one.zero_()
    assert torch.equal(second.one, torch.arange(4.0))
    assert torch.equal(tensors[0], torch.arange(4.0))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: m.register_parameter("extra", nn.Parameter(torch.empty(1))), "extra is not in the cache"),
        (lambda m: delattr(m, "empty"), "empty is in the cache and not in the model"),
        (lambda m: setattr(m, "empty", nn.Parameter(torch.empty(0, 17))), r"empty: expected .*\(0, 17\), found"),
        (lambda m: setattr(m.layers[0], "scale", nn.Parameter(torch.empty((), dtype=torch.float16))), "float16"),
        (lambda m: (delattr(m, "empty"), m.register_buffer("empty", torch.empty(0, 16))), "empty is a parameter"),
        (lambda m: (delattr(m, "seen"), setattr(m, "seen", nn.Parameter(torch.empty(())))), "seen"),
    ],
)
def test_a_model_of_another_shape_is_refused_and_unchanged(change: Callable[[Tiny], Any], text: str) -> None:
    model = skeleton()
    with torch.device("meta"):
        change(model)
    refused = refusal(model, loaded())
    assert refused.reason == "import_mismatch"
    assert re.search(text, str(refused))


def test_a_parameter_that_is_in_no_cache_is_refused_even_if_it_has_values() -> None:
    model = skeleton()
    model.register_parameter("fresh", nn.Parameter(torch.rand(3)))
    assert refusal(model, loaded()).reason == "import_mismatch"


def test_all_mismatches_are_listed_and_the_first_are_named() -> None:
    refused = refusal(on_meta(lambda: Tiny(width=8)), loaded())
    assert len(refused.data["tensors"]) >= 8
    assert "embed.weight: expected torch.bfloat16 (8, 8), found torch.bfloat16 (8, 16)" in str(refused)


class _Helper:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.table = [tensor]


class _Slotted:
    __slots__ = ("later", "table")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.table = tensor


def _strays() -> dict[str, Callable[[nn.Module], None]]:
    """Ways in which a model can hold a tensor that no cache restores, by the name it is found under."""

    def stray() -> torch.Tensor:
        return torch.empty(2)

    return {
        "mask": lambda model: setattr(model, "mask", stray()),
        "layers.0.mask": lambda model: setattr(model.layers[0], "mask", stray()),  # type: ignore[index]
        "cos_sin.0.table": lambda model: setattr(model, "cos_sin", [{"table": stray()}]),
        "pair.1": lambda model: setattr(model, "pair", (1, stray())),
        "helper.table.0": lambda model: setattr(model, "helper", _Helper(stray())),
        "space.a.b": lambda model: setattr(model, "space", types.SimpleNamespace(a=OrderedDict(b=stray()))),
        "slotted.table": lambda model: setattr(model, "slotted", _Slotted(stray())),
        "ring.0": lambda model: setattr(model, "ring", deque([stray()])),
        "kinds.0": lambda model: setattr(model, "kinds", {stray()}),
        "later.keywords.bias": lambda model: setattr(model, "later", partial(torch.add, bias=stray())),
        "helpers.0.0.weight": lambda model: setattr(model, "helpers", [nn.Sequential(nn.Linear(2, 2, bias=False))]),
        "late": lambda model: model.register_buffer("late", stray(), persistent=False),
    }


@pytest.mark.parametrize("name", _strays())
def test_a_tensor_that_cannot_be_restored_is_named(name: str) -> None:
    model = skeleton()
    with torch.device("meta"):
        _strays()[name](model)
    refused = refusal(model, loaded())
    assert refused.reason == "state_unrestorable"
    assert name in str(refused)
    with pytest.raises(ImportRejected) as left:
        require_no_meta(model)
    assert name in left.value.data["tensors"]


def test_real_attributes_stay_as_they_are() -> None:
    model = skeleton()
    model.table = torch.arange(3.0)  # type: ignore[assignment]
    model.others = [torch.ones(2)]  # type: ignore[assignment]
    bind(model, loaded())
    assert torch.equal(model.table, torch.arange(3.0))
    assert torch.equal(model.others[0], torch.ones(2))


def test_a_parameter_in_a_tuple_cannot_follow_and_is_refused() -> None:
    model = skeleton()
    model.pair = (model.embed.weight, 1)  # type: ignore[assignment]
    refused = refusal(model, loaded())
    assert refused.reason == "state_unrestorable"
    assert "pair.0" in str(refused)


@pytest.mark.parametrize("hold", [lambda it: (it, 1), lambda it: {it}], ids=["tuple", "set"])
def test_a_parameter_in_what_cannot_be_changed_is_refused(hold: Callable[[torch.Tensor], Any]) -> None:
    model = skeleton()
    model.held = hold(model.embed.weight)
    assert "cannot be changed" in str(refusal(model, loaded()))


def test_a_parameter_in_slots_or_a_ring_follows() -> None:
    model = skeleton()
    model.slotted, model.ring = _Slotted(model.embed.weight), deque([model.embed.weight])  # type: ignore[assignment]
    bind(model, loaded())
    assert model.slotted.table is model.ring[0] is model.embed.weight  # type: ignore[comparison-overlap]


def test_a_module_that_is_nobodys_child_is_walked_and_one_that_is_is_walked_once() -> None:
    model = skeleton()
    model.helpers = [nn.Linear(2, 2), model.layers[0]]  # type: ignore[assignment]
    bind(model, loaded())
    assert [stray.name for stray in walk(model).strays] == ["by_name.embedding", "helpers.0.weight", "helpers.0.bias"]


def test_cycles_and_shared_modules_are_walked_once() -> None:
    model = skeleton()
    ring: dict[str, Any] = {}
    ring["self"] = ring
    model.ring = ring  # type: ignore[assignment]
    model.again = model.layers[0]
    model.layers[0].__dict__["parent"] = model
    bind(model, loaded())
    assert model.again.packed is model.layers[0].packed  # type: ignore[union-attr]


class EngineParameter(nn.Parameter):
    """An engine's own kind of parameter, with what its loader needs."""

    output_dim: int


def test_an_engines_own_parameters_keep_their_kind_and_what_hangs_on_them() -> None:
    model = skeleton()
    with torch.device("meta"):
        special = EngineParameter(torch.empty(0, 16), requires_grad=False)
    special.output_dim = 1
    model.empty = special
    model.embed.weight.weight_loader = "kept"  # type: ignore[attr-defined]
    bind(model, loaded())
    assert type(model.empty) is EngineParameter
    assert model.empty.output_dim == 1
    assert type(model.embed.weight) is nn.Parameter
    assert model.embed.weight.weight_loader == "kept"  # type: ignore[attr-defined]


def test_a_model_that_has_values_takes_those_of_the_cache() -> None:
    source, model = loaded(seed=1), loaded(seed=2)
    model.seen += 3
    bind(model, source)
    assert contents(model) == contents(source)


def test_lack_of_memory_for_buffers_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = skeleton()
    before = {place.name: place.tensor for place in walk(model).places}

    def full(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch.Tensor, "clone", full)
    with pytest.raises(ResourceError, match="private copies"):
        bind(model, loaded())
    assert all(before[place.name] is place.tensor for place in walk(model).places)


def test_uninitialised_memory_never_shows() -> None:
    """Memory is poisoned, so that a buffer that nobody fills would show it; twenty times over."""
    source = loaded()
    for _ in range(20):
        poison = [torch.full((4096,), 1e30) for _ in range(64)]
        del poison
        model = skeleton()
        bind(model, source)
        assert model.inv_freq[0] == 1.0
        assert contents(model) == contents(source)
