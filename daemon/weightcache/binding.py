"""Binding: putting an arena's tensors into a model that was built on the meta device.

All or nothing: everything is checked before the first tensor is placed, so that after a failure the model is what it
was. Parameters become read-only views of the arena; buffers become private copies, because engines write into them.
"""

import gc
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from weightcache.errors import ImportRejected, ResourceError
from weightcache.manifest import KINDS, Manifest

_PARAMETER: Final = KINDS.index("parameter")
_LISTED: Final = 10
"""Mismatches that an error lists by name; more would hide the first."""
_MODULE_FIELDS: Final = frozenset(nn.Module().__dict__)
"""What every module carries; tensors elsewhere in a module's attributes are the model's own."""


class Place(NamedTuple):
    """Where a tensor hangs in a model: ``holder[key]`` (a module's own dict of parameters or buffers)."""

    name: str
    module: nn.Module
    holder: dict[str, Any]
    key: str
    tensor: torch.Tensor
    is_parameter: bool


class Stray(NamedTuple):
    """A tensor that hangs elsewhere: a plain attribute of a module, or in a container or helper object below one.

    ``holder[key]`` is where it hangs, as far as that can be changed; a set and a tuple cannot.
    """

    name: str
    holder: Any
    key: Any
    tensor: torch.Tensor


class Walk(NamedTuple):
    """What one walk over a model finds: parameters and buffers under every name they have, strays, modules."""

    places: list[Place]
    strays: list[Stray]
    modules: list[nn.Module]


def walk(model: nn.Module) -> Walk:
    """Visit each module of a model once."""
    places: list[Place] = []
    strays: list[Stray] = []
    modules: list[nn.Module] = []
    followed: set[int] = set()
    seen: set[int] = set()
    loose: list[tuple[str, nn.Module]] = []
    stack: list[tuple[str, nn.Module]] = [("", model)]
    new = tuple.__new__  # a third of what Place(...) takes, 30,000 times
    while stack:
        prefix, module = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        modules.append(module)
        own = module.__dict__
        parameters, buffers = own["_parameters"], own["_buffers"]
        for key, tensor in parameters.items():
            if tensor is not None:
                places.append(new(Place, (prefix + key, module, parameters, key, tensor, True)))
        for key, tensor in buffers.items():
            if tensor is not None:
                places.append(new(Place, (prefix + key, module, buffers, key, tensor, False)))
        if len(own) > len(_MODULE_FIELDS):  # most modules carry nothing of their own, and there may be 30,000
            _follow(prefix, own, strays, loose, followed)
        if children := own["_modules"]:
            for key, child in reversed(children.items()):
                if child is not None:
                    stack.append((f"{prefix}{key}.", child))
    while loose:
        prefix, module = loose.pop()
        if id(module) not in seen:  # nobody's child: no state_dict has what it holds
            seen.add(id(module))
            own = module.__dict__
            for holder in (own["_parameters"], own["_buffers"]):
                strays += [Stray(f"{prefix}.{key}", holder, key, it) for key, it in holder.items() if it is not None]
            loose += [(f"{prefix}.{key}", child) for key, child in own["_modules"].items() if child is not None]
            _follow(f"{prefix}.", own, strays, loose, followed)
    return Walk(places, strays, modules)


def _follow(
    prefix: str,
    own: dict[str, Any],
    strays: list[Stray],
    loose: list[tuple[str, nn.Module]],
    followed: set[int],
) -> None:
    """Add the strays below a module's attributes, through containers and plain objects, and the modules met there."""
    stack: list[tuple[str, Any, Any, Any]] = [
        (prefix + key, own, key, value) for key, value in own.items() if key not in _MODULE_FIELDS
    ]
    while stack:
        name, holder, key, value = stack.pop()
        if isinstance(value, torch.Tensor):
            strays.append(Stray(name, holder, key, value))
        elif isinstance(value, nn.Module):
            loose.append((name, value))
        elif not isinstance(value, _LEAVES) and id(value) not in followed:
            followed.add(id(value))
            stack.extend((f"{name}.{inner}", container, inner, item) for container, inner, item in _items(value))


class Binding:
    """A checked plan for putting an arena's tensors into a model; nothing is placed until it is carried out.

    Args:
        model: any device; what the manifest does not name must be a buffer or attribute that is not on meta.
        manifest: validated.
        tensors: one each row of the manifest, on the arena's bytes.

    Raises:
        ImportRejected: ``import_mismatch`` (a tensor is missing, left over, or of another shape or dtype) or
            ``state_unrestorable`` (a buffer or attribute that the cache does not hold). The model is unchanged.
    """

    def __init__(self, model: nn.Module, manifest: Manifest, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self._copies: dict[int, torch.Tensor] = {}
        self._made: dict[int, torch.Tensor] = {}
        self._parameters: list[tuple[Place, int]] = []
        self._buffers: list[tuple[Place, int]] = []
        found, self._strays, self._modules = walk(model)
        rows = {name: row for row, name in enumerate(manifest.names)}
        rows.update(manifest.aliases)
        dtypes = [getattr(torch, name) for name in manifest.dtypes]
        codes, shapes, kinds = manifest.dtype, manifest.shapes, manifest.kinds
        wrong: list[str] = []
        homeless: list[str] = []
        for place in found:
            name, _, _, _, ours, is_parameter = place
            row = rows.get(name)
            if row is None:
                if is_parameter:
                    wrong.append(f"{name} is not in the cache")
                elif ours.is_meta:
                    homeless.append(f"{name} is not in the cache")
                continue
            if ours.shape != shapes[row] or ours.dtype != dtypes[codes[row]]:
                theirs = f"{dtypes[codes[row]]} {shapes[row]}"
                wrong.append(f"{name}: expected {ours.dtype} {tuple(ours.shape)}, found {theirs}")
            elif is_parameter != (kinds[row] == _PARAMETER):
                wrong.append(f"{name} is a {KINDS[kinds[row]]} in the cache")
            (self._parameters if is_parameter else self._buffers).append((place, row))
        if len(self._parameters) + len(self._buffers) != len(rows):
            have = {place.name for place in found}
            wrong += [f"{name} is in the cache and not in the model" for name in rows if name not in have]
        if wrong:
            raise _rejected("import_mismatch", "the resident tensors do not fit the model", wrong)
        if self._strays:
            planned = {id(place.tensor) for place, _ in self._parameters + self._buffers}
            for stray in self._strays:
                if id(stray.tensor) in planned:
                    if not isinstance(stray.holder, _CHANGEABLE):
                        what = type(stray.holder).__name__
                        homeless.append(f"{stray.name} is in a {what}, which cannot be changed")
                elif stray.tensor.is_meta:
                    homeless.append(stray.name)
        if homeless:
            raise _rejected("state_unrestorable", "the model holds state that the cache cannot restore", homeless)

    def copy_buffers(self) -> None:
        """Make every buffer's private copy.

        Raises:
            ResourceError: there is no memory for them.
        """
        rows = {row for _, row in self._buffers}
        try:
            self._copies = {row: self._tensors[row].clone() for row in rows}
        except RuntimeError as error:  # how torch says that memory is out
            raise ResourceError(
                "no memory for the private copies of the model's buffers",
                needed=sum(self._tensors[row].nbytes for row in rows),
                found=str(error),
            ) from error

    def make_parameters(self) -> None:
        """Make what `place_parameters` will place, while a GPU still verifies it; aliases become one object."""
        tensors, made = self._tensors, self._made
        make = torch.Tensor._make_subclass
        for (_, _, _, _, ours, _), row in self._parameters:
            if row not in made:
                tensor = tensors[row]
                if type(ours) is nn.Parameter:
                    # As torch's own lazy parameters become real ones. Making another tensor takes ten times as long.
                    tensor.__class__ = nn.Parameter
                else:
                    tensor = make(type(ours), tensor, False)
                made[row] = tensor
                if ours.__dict__:  # engines hang loaders and layouts on their parameters
                    tensor.__dict__.update(ours.__dict__)

    def place_parameters(self) -> int:
        """Bind every parameter; returns how many names were bound."""
        if not self._made:
            self.make_parameters()
        made = self._made
        for (_, _, holder, key, _, _), row in self._parameters:
            holder[key] = made[row]
        return len(self._parameters)

    def place_buffers(self) -> int:
        """Place the buffers' copies, then let attributes follow and set the model to evaluation."""
        for place, row in self._buffers:
            place.holder[place.key] = self._copies[row]
        if self._strays:
            successors = {id(place.tensor): place.holder[place.key] for place, _ in self._parameters + self._buffers}
            for stray in self._strays:
                if id(stray.tensor) in successors:
                    stray.holder[stray.key] = successors[id(stray.tensor)]
        for module in self._modules:
            module.__dict__["training"] = False  # what eval() does, without nn.Module's slow __setattr__
        return len(self._buffers)


class _Slots:
    """An object's slots, to be set as a container's items are."""

    def __init__(self, owner: object) -> None:
        self._owner = owner

    def __setitem__(self, key: str, value: object) -> None:
        setattr(self._owner, key, value)


_CHANGEABLE: Final = (dict, list, deque, _Slots)
_LEAVES: Final = (
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
    ModuleType,
    FunctionType,
    BuiltinFunctionType,
)
"""What holds no tensors."""


def _items(value: Any) -> Iterator[tuple[Any, Any, Any]]:
    """What a container or an object holds: where it hangs, under which key, and it itself."""
    if isinstance(value, dict):
        yield from ((value, key, item) for key, item in value.items())
    elif isinstance(value, list | tuple | deque | set | frozenset):
        yield from ((value, index, item) for index, item in enumerate(value))
    elif isinstance(value, partial):
        yield from ((value.args, "args", value.args), (value.args, "keywords", value.keywords))
    else:
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict):
            yield from ((own, key, item) for key, item in own.items())
        for kind in type(value).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            for key in (slots,) if isinstance(slots, str) else slots:
                if hasattr(value, key):
                    yield _Slots(value), key, getattr(value, key)


def require_no_meta(model: nn.Module) -> None:
    """Check that a model can run: nothing reachable from it is on the meta device.

    Raises:
        ImportRejected: ``state_unrestorable``, naming what is.
    """
    places, strays, _ = walk(model)
    left = [place.name for place in places if place.tensor.is_meta]
    left += [stray.name for stray in strays if stray.tensor.is_meta]
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
def garbage_collection_off() -> Iterator[None]:
    """No collection inside the block, which would walk every object made there several times, nor right after it."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            if gc.get_freeze_count() == 0:
                # To the oldest generation with all that was made: the next object would start a walk over it.
                gc.freeze()
                gc.unfreeze()
            gc.enable()
