"""Binding: putting an arena's tensors into a model that was built on the meta device.

All or nothing: everything is checked before the first tensor is placed, so that after a failure the model is what it
was. Parameters become read-only views of the arena; buffers become private copies, because engines write into them.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from weightcache.errors import ImportRejected
from weightcache.manifest import KINDS, Manifest

_PARAMETER: Final = KINDS.index("parameter")
_LISTED: Final = 10
"""Mismatches that an error lists by name; more would hide the first."""
_MODULE_FIELDS: Final = frozenset(nn.Module().__dict__) - {"training"}
"""What every module carries; tensors elsewhere in a module's attributes are the model's own."""


class Place(NamedTuple):
    """Where a tensor hangs in a model: ``holder[key]`` (a module's own dict of parameters or buffers)."""

    name: str
    module: nn.Module
    holder: dict[str, Any]
    key: str
    tensor: torch.Tensor
    is_parameter: bool


def places(model: nn.Module) -> Iterator[Place]:
    """Every parameter and buffer of a model under every name it has, each module visited once."""
    seen: set[int] = set()
    stack: list[tuple[str, nn.Module]] = [("", model)]
    while stack:
        prefix, module = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        for key, parameter in module._parameters.items():
            if parameter is not None:
                yield Place(prefix + key, module, module._parameters, key, parameter, True)
        for key, buffer in module._buffers.items():
            if buffer is not None:
                yield Place(prefix + key, module, module._buffers, key, buffer, False)
        for key, child in reversed(module._modules.items()):
            if child is not None:
                stack.append((f"{prefix}{key}.", child))


class Binding:
    """A checked plan for putting an arena's tensors into a model; nothing is placed until it is carried out.

    Args:
        model: any device; what the manifest does not name must not be on meta.
        manifest: validated.
        tensors: one each row of the manifest, on the arena's bytes.

    Raises:
        ImportRejected: ``import_mismatch`` (a tensor is missing, left over, or of another shape or dtype) or
            ``state_unrestorable`` (a buffer or attribute that the cache does not hold). The model is unchanged.
    """

    def __init__(self, model: nn.Module, manifest: Manifest, tensors: list[torch.Tensor]) -> None:
        self._model = model
        self._tensors = tensors
        self._parameters: list[tuple[Place, int]] = []
        self._buffers: list[tuple[Place, int]] = []
        rows = {name: row for row, name in enumerate(manifest.names)}
        rows.update(manifest.aliases)
        missing = len(rows)
        wrong: list[str] = []
        homeless: list[str] = []
        for place in places(model):
            row = rows.get(place.name)
            if row is None:
                if place.tensor.is_meta:
                    (wrong if place.is_parameter else homeless).append(f"{place.name} is not in the cache")
                continue
            missing -= 1
            theirs, ours = tensors[row], place.tensor
            if theirs.shape != ours.shape or theirs.dtype != ours.dtype:
                expected = f"{ours.dtype} {tuple(ours.shape)}"
                wrong.append(f"{place.name}: expected {expected}, found {theirs.dtype} {tuple(theirs.shape)}")
            elif place.is_parameter != (manifest.kinds[row] == _PARAMETER):
                wrong.append(f"{place.name} is a {KINDS[manifest.kinds[row]]} in the cache")
            (self._parameters if place.is_parameter else self._buffers).append((place, row))
        if missing:
            have = {place.name for place, _ in self._parameters + self._buffers}
            wrong += [f"{name} is in the cache and not in the model" for name in rows if name not in have]
        if wrong:
            raise _rejected("import_mismatch", "the resident tensors do not fit the model", wrong)
        planned = {id(place.tensor) for place, _ in self._parameters + self._buffers}
        homeless += [name for name, tensor in stray_tensors(model) if tensor.is_meta and id(tensor) not in planned]
        if homeless:
            raise _rejected("state_unrestorable", "the model holds state that the cache cannot restore", homeless)

    def place_parameters(self) -> int:
        """Bind every parameter, aliases to one object; returns how many names were bound."""
        make, parameter_type = torch.Tensor._make_subclass, nn.Parameter
        made: dict[int, torch.Tensor] = {}
        with _garbage_collection_off():  # collecting in the middle walks every object made here, several times over
            for place, row in self._parameters:
                tensor = made.get(row)
                if tensor is None:
                    if type(place.tensor) is parameter_type:
                        tensor = make(parameter_type, self._tensors[row], False)
                    else:  # an engine's own kind of parameter keeps its class and what hangs on it
                        tensor = make(type(place.tensor), self._tensors[row], False)
                        tensor.__dict__.update(place.tensor.__dict__)
                    made[row] = tensor
                place.holder[place.key] = tensor
        return len(self._parameters)

    def place_buffers(self) -> int:
        """Give every buffer a private copy, then let attributes follow and set the model to evaluation."""
        made: dict[int, torch.Tensor] = {}
        for place, row in self._buffers:
            if row not in made:
                made[row] = self._tensors[row].clone()
            place.holder[place.key] = made[row]
        successors = {id(place.tensor): place.holder[place.key] for place, _ in self._parameters + self._buffers}
        for holder, key, tensor in _attribute_tensors(self._model):
            if id(tensor) in successors:
                holder[key] = successors[id(tensor)]
        self._model.eval()
        return len(self._buffers)


def stray_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Tensors reachable through a model's plain attributes, helper objects and containers, with a name for each."""
    names = {id(module.__dict__): name for name, module in model.named_modules()}
    return [(f"{names.get(id(holder), '?')}.{key}", tensor) for holder, key, tensor in _attribute_tensors(model)]


def _attribute_tensors(model: nn.Module) -> Iterator[tuple[Any, Any, torch.Tensor]]:
    """Each (container, key, tensor) below the attributes of every module, containers and plain objects followed."""
    seen: set[int] = set()
    stack: list[Any] = []
    for module in model.modules():
        own = module.__dict__
        seen.add(id(own))
        for key in own.keys() - _MODULE_FIELDS:
            value = own[key]
            if isinstance(value, torch.Tensor):
                yield own, key, value
            elif not isinstance(value, _LEAVES):
                stack.append(value)
    while stack:
        value = stack.pop()
        if id(value) in seen or isinstance(value, _LEAVES):
            continue
        seen.add(id(value))
        for holder, key, item in _items(value):
            if isinstance(item, torch.Tensor):
                yield holder, key, item
            elif not isinstance(item, _LEAVES):
                stack.append(item)


_LEAVES: Final = (
    nn.Module,
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
    type,
    torch.dtype,
    torch.device,
    torch.Size,
    type(gc),
    type(lambda: None),
    type(len),
)
"""What holds no tensors, or (a module) is walked on its own."""


def _items(value: Any) -> Iterator[tuple[Any, Any, Any]]:
    if isinstance(value, dict):
        yield from ((value, key, item) for key, item in list(value.items()))
    elif isinstance(value, list | tuple):
        yield from ((value, index, item) for index, item in enumerate(value))
    else:
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict):
            yield from ((own, key, item) for key, item in list(own.items()))


def require_no_meta(model: nn.Module) -> None:
    """Check that a model can run: nothing reachable from it is on the meta device.

    Raises:
        ImportRejected: ``state_unrestorable``, naming what is.
    """
    left = [place.name for place in places(model) if place.tensor.is_meta]
    left += [name for name, tensor in stray_tensors(model) if tensor.is_meta]
    if left:
        raise _rejected("state_unrestorable", "the model was left without values", left)


def _rejected(reason: str, message: str, items: list[str]) -> ImportRejected:
    more = f", and {len(items) - _LISTED} more" if len(items) > _LISTED else ""
    return ImportRejected(
        reason,
        f"{message} ({len(items)}): {'; '.join(items[:_LISTED])}{more}",
        remedy="Release the generation and load again; if it persists, report the model's architecture",
        tensors=items,
    )


@contextmanager
def _garbage_collection_off() -> Iterator[None]:
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
