"""Binding: putting an arena's tensors into a model that was built on the meta device.

All or nothing: everything is checked before the first tensor is placed, so that after a failure the model is what it
was. Parameters become read-only views of the arena; buffers become private copies, because engines write into them.
"""

import gc
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from weightcache.errors import ImportRejected, ResourceError
from weightcache.manifest import KINDS, Manifest

heap_is_frozen = False
"""Set where it is known; counting what is frozen takes 35 ms in a forked engine."""

_PARAMETER: Final = KINDS.index("parameter")
_LISTED: Final = 10
"""Mismatches that an error lists by name; more would hide the first."""
_Hold = tuple[dict[str, Any], str, int]
"""A module's own dict, the key in it, and the row that belongs there."""
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
    strays: list[Stray] = []
    modules: list[nn.Module] = []
    return Walk(list(_places(model, strays, modules)), strays, modules)


def _places(model: nn.Module, strays: list[Stray], modules: list[nn.Module]) -> Iterator[Place]:
    """What `walk` finds, place by place, while each is in the processor's cache; the rest goes to the lists given."""
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
                yield new(Place, (prefix + key, module, parameters, key, tensor, True))
        for key, tensor in buffers.items():
            if tensor is not None:
                yield new(Place, (prefix + key, module, buffers, key, tensor, False))
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
        tensors: one each row of the manifest, on the arena's bytes. Made here, one by one, if they come from an
            iterator: whatever is done with a tensor costs a third while it is in the processor's cache.

    Raises:
        ImportRejected: ``import_mismatch`` (a tensor is missing, left over, or of another shape or dtype) or
            ``state_unrestorable`` (a buffer or attribute that the cache does not hold). The model is unchanged.
    """

    def __init__(self, model: nn.Module, manifest: Manifest, tensors: Iterable[torch.Tensor]) -> None:
        self._copies: dict[int, torch.Tensor] = {}
        self._parameters: list[_Hold] = []
        self._buffers: list[_Hold] = []
        self._following: list[tuple[Stray, _Hold]] = []
        self._modules: list[nn.Module] = []
        self._special: dict[int, torch.Tensor] = {}
        self._plan(model, manifest)
        self._tensors = self._made(manifest.kinds, tensors)

    def _plan(self, model: nn.Module, manifest: Manifest) -> None:
        """Find every row's place in the model, and check that they fit each other."""
        strays: list[Stray] = []
        rows = {name: row for row, name in enumerate(manifest.names)}
        rows.update(manifest.aliases)
        dtypes = [getattr(torch, name) for name in manifest.dtypes]
        codes, shapes, kinds = manifest.dtype, manifest.shapes, manifest.kinds
        wrong: list[str] = []
        homeless: list[str] = []
        for name, _, holder, key, ours, is_parameter in _places(model, strays, self._modules):
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
            if is_parameter:
                self._parameters.append((holder, key, row))
                if type(ours) is not nn.Parameter or ours.__dict__:
                    self._special.setdefault(row, ours)
            else:
                self._buffers.append((holder, key, row))
        if len(self._parameters) + len(self._buffers) != len(rows):
            have = {place.name for place in walk(model).places}
            wrong += [f"{name} is in the cache and not in the model" for name in rows if name not in have]
        if wrong:
            raise _rejected("import_mismatch", "the resident tensors do not fit the model", wrong)
        planned = {id(hold[0][hold[1]]): hold for hold in self._parameters + self._buffers} if strays else {}
        for stray in strays:
            hold = planned.get(id(stray.tensor))
            if hold is None:
                if stray.tensor.is_meta:
                    homeless.append(stray.name)
            elif isinstance(stray.holder, _CHANGEABLE):
                self._following.append((stray, hold))
            else:
                homeless.append(f"{stray.name} is in a {type(stray.holder).__name__}, which cannot be changed")
        if homeless:
            raise _rejected("state_unrestorable", "the model holds state that the cache cannot restore", homeless)

    def _made(self, kinds: bytes, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """The rows' tensors, those of parameters as what the model has in their place."""
        made = []
        with torch.no_grad():  # which also spares each view the record of what it is a view of
            for row, (kind, tensor) in enumerate(zip(kinds, tensors, strict=True)):
                if row in self._special:
                    made.append(_as(self._special[row], tensor))
                    continue
                if kind == _PARAMETER:
                    # As torch's own lazy parameters become real ones. Making another tensor takes ten times as long.
                    tensor.__class__ = nn.Parameter
                made.append(tensor)
        return made

    def copy_buffers(self) -> None:
        """Make every buffer's private copy.

        Raises:
            ResourceError: there is no memory for them.
        """
        rows = {row for _, _, row in self._buffers}
        try:
            self._copies = {row: self._tensors[row].clone() for row in rows}
        except RuntimeError as error:  # how torch says that memory is out
            raise ResourceError(
                "no memory for the private copies of the model's buffers",
                needed=sum(self._tensors[row].nbytes for row in rows),
                found=str(error),
            ) from error

    def place_parameters(self) -> None:
        """Bind every parameter; aliases become one object. What hung there, 30,000 parameters on meta, goes with it."""
        made = self._tensors
        for holder, key, row in self._parameters:
            holder[key] = made[row]

    def place_buffers(self) -> None:
        """Place the buffers' copies, then let attributes follow and set the model to evaluation."""
        for holder, key, row in self._buffers:
            holder[key] = self._copies[row]
        for stray, (holder, key, _) in self._following:
            stray.holder[stray.key] = holder[key]
        for module in self._modules:
            module.__dict__["training"] = False  # what eval() does, without nn.Module's slow __setattr__


def _as(ours: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as a parameter of an engine's own class, or with what engines hang on theirs: loaders and layouts."""
    made = torch.Tensor._make_subclass(type(ours), tensor, False)
    made.__dict__.update(ours.__dict__)
    return made


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
            if not heap_is_frozen and gc.get_freeze_count() == 0:
                # To the oldest generation with all that was made: the next object would start a walk over it.
                gc.freeze()
                gc.unfreeze()
            gc.enable()
