"""Parity: two copies of a model compared tensor by tensor, and what is concluded from it.

A census lists every tensor reachable from a model with kind, shape, dtype, stride, hash and shared names. If what is
resident equals what plain loading gives, the code that made the one lays weights out as the code that made the other,
and an upgrade between the two need not load again: that conclusion is recorded, and read by `resident_layout`.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from torch import nn

from weightcache.binding import walk
from weightcache.digest import tensor_digest
from weightcache.errors import ConfigError
from weightcache.fingerprint import CacheConfig, stable_hash
from weightcache.paths import private_dir, state_dir

_ALIKE_WHERE_EQUAL: Final = (
    "model_arch",
    "tp_size",
    "pp_size",
    "dp_size",
    "ep_size",
    "quant_method",
    "quant_config_hash",
    "dtype",
    "device_capability",
    "engine",
    "kernel_backend",
)
"""What decides a layout beside the code; a conclusion holds only where all of it is equal."""


class Item(NamedTuple):
    """One name in a model: ``parameter``, ``buffer``, ``non_persistent_buffer`` or ``attribute``.

    ``same_as`` is the first name of the same tensor, None for that first name itself. ``digest`` is blake3 in hex.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...]
    digest: str
    same_as: str | None


class Disparity(msgspec.Struct, frozen=True):
    """One property of one name in which two models differ; None stands for a name that one of them lacks."""

    name: str
    what: str
    expected: object
    found: object

    def __str__(self) -> str:
        return f"{self.name}: {self.what}: expected {self.expected}, found {self.found}"


Census = Mapping[str, Item]


class Report(msgspec.Struct):
    """What one version of an engine makes of a checkpoint.

    ``config`` has the fields of its `CacheConfig`, ``logits`` a digest, in hex, of what the model answers.
    """

    config: dict[str, Any]
    tensors: dict[str, Item]
    logits: str


def take_census(model: nn.Module) -> Census:
    """Every tensor reachable from a model, by name. Reads all bytes; tensors on a GPU are copied to be hashed."""
    found = walk(model)
    named = [
        (place.name, place.tensor, "parameter" if place.is_parameter else _buffer_kind(place.module, place.key))
        for place in found.places
    ]
    named += [(stray.name, stray.tensor, "attribute") for stray in found.strays]
    first: dict[int, str] = {}
    census: dict[str, Item] = {}
    for name, tensor, kind in named:
        owner = first.setdefault(id(tensor), name)
        if owner == name:
            digest = tensor_digest(tensor.detach().cpu()).hex()
            dtype = str(tensor.dtype).removeprefix("torch.")
            census[name] = Item(kind, tuple(tensor.shape), dtype, tensor.stride(), digest, None)
        else:
            census[name] = census[owner]._replace(kind=kind, same_as=owner)
    return census


def disparities(expected: Census, found: Census) -> list[Disparity]:
    """Where two models differ, by name."""
    differing: list[Disparity] = []
    for name in sorted({*expected, *found}):
        here, there = expected.get(name), found.get(name)
        if here is None or there is None:
            differing.append(Disparity(name, "presence", here and here.kind, there and there.kind))
            continue
        for what, wanted, got in zip(Item._fields, here, there, strict=True):
            if wanted != got:
                differing.append(Disparity(name, what, wanted, got))
    return differing


def record(config: CacheConfig, layout_id: str, *, state: Path | None = None) -> None:
    """Record that weights under `layout_id` are what `config`'s own code would have laid out.

    Raises:
        ConfigError: the state folder cannot be used.
    """
    place = _place(config, state)
    unfinished = place.with_name(f"{place.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(msgspec.json.encode({"layout_id": layout_id, "config": config.to_dict()}))
        unfinished.replace(place)
    except OSError as error:
        raise ConfigError(
            "path", f"the parity of {config.layout_id} and {layout_id} cannot be recorded: {error}", path=str(place)
        ) from error


def resident_layout(config: CacheConfig, *, state: Path | None = None) -> CacheConfig:
    """`config` as it should be asked for: under the layout that a recorded run found equal to its own, if there is one.

    Raises:
        ConfigError: the folder of records belongs to others, or can be entered by them.
    """
    try:
        if not (state or state_dir(create=False) / "parity").is_dir():
            return config  # an engine needs no state folder to attach
        known = msgspec.json.decode(_place(config, state).read_bytes(), type=_Recorded)
    except (OSError, msgspec.MsgspecError):  # unreadable is as good as none: a miss is never wrong
        return config
    return msgspec.structs.replace(config, layout_id=known.layout_id)


class _Recorded(msgspec.Struct):
    layout_id: str


def _place(config: CacheConfig, state: Path | None) -> Path:
    folder = private_dir(state if state is not None else state_dir() / "parity")
    decides = {field: getattr(config, field) for field in (*_ALIKE_WHERE_EQUAL, "layout_id")}
    return folder / f"{stable_hash(decides)[:32]}.json"


def _buffer_kind(module: nn.Module, key: str) -> str:
    return "non_persistent_buffer" if key in module._non_persistent_buffers_set else "buffer"
