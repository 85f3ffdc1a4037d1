"""The skip list: layers that a quantised checkpoint leaves unquantised, under whatever names it lists them.

The same layers go by several names: ``modules_to_not_convert`` or ``ignored_layers``; full names, a part of a name
(``self_attn``), the fused name that an engine uses (``qkv_proj``), with or without a multimodal model's prefix. Entries
are normalised to dotted names below the language model, fused ones spelt out; ``*.`` marks one that may match anywhere.
"""

import re
from collections.abc import Mapping
from functools import cache
from itertools import product
from typing import Any, Final

from weightcache.checkpoint import TensorInfo
from weightcache.checkpoint.refusal import refusal
from weightcache.errors import CheckpointError

KEYS: Final = ("modules_to_not_convert", "ignored_layers")

FUSED: Final = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""Names that engines give to projections they run as one, and the names in the files."""

_FUSED_NAME: Final = {part: name for name, parts in FUSED.items() for part in parts}
_NUMBER: Final = re.compile(r"(?<![^.])[0-9]+(?![^.])")
_PREFIXES: Final = frozenset({"model", "language_model", "text_model"})
_ANYWHERE: Final = "*"
_MODEL: Final = "model"
"""The normalised entry that stands for all layers below the model's root; no other one begins with a prefix."""

Parts = tuple[str, ...]


class SkipList:
    """A normalised skip list.

    Attributes:
        entries: its names, sorted, without doubles: equal lists, however spelt, have equal entries.
    """

    def __init__(self, listed: list[str]) -> None:
        self.entries = tuple(sorted({name for entry in listed for name in normalize(entry)}))
        split = [() if entry == _MODEL else tuple(entry.split(".")) for entry in self.entries]
        self._from_root = {parts for parts in split if parts[:1] != (_ANYWHERE,)}
        self._anywhere = {parts[1:] for parts in split if parts[:1] == (_ANYWHERE,)}
        self._root_lengths = {len(parts) for parts in self._from_root}
        self._lengths = {len(parts) for parts in self._anywhere}

    def __repr__(self) -> str:
        return f"SkipList({list(self.entries)})"

    @classmethod
    def of(cls, config: Mapping[str, Any], where: str) -> "SkipList":
        """The skip list of a quantisation config, which stands at the key `where`.

        Raises:
            CheckpointError: ``config_invalid``, if it is not a list of text.
        """
        listed: list[str] = []
        for key in KEYS:
            names = config.get(key)
            if names is None:
                continue
            if not isinstance(names, list) or not all(isinstance(name, str) and name.strip(".") for name in names):
                raise refusal(
                    "config_invalid",
                    f"{where}.{key} is not a list of names",
                    expected="a list of text, none of it empty: engines differ in what that would match",
                    found=ascii(names)[:200],
                    remedy="Correct config.json",
                    file="config.json",
                    key=f"{where}.{key}",
                )
            listed += names
        return cls(listed)

    def covering(self, layer: str) -> tuple[str, ...]:
        """The entries that cover `layer`, or nothing. A fused layer is covered only if all its parts are."""
        covering: list[str] = []
        below_root, name = _below_model(layer)
        for parts in _spelt_out(name):
            found = self._matching(parts, below_root)
            if not found:
                return ()
            covering += found
        return tuple(covering)

    def _matching(self, parts: Parts, below_root: bool) -> list[str]:
        found = [
            ".".join(parts[:length]) or _MODEL
            for length in self._root_lengths
            if parts[:length] in self._from_root and (length or below_root)
        ]
        for length in self._lengths:
            pieces = (parts[start : start + length] for start in range(len(parts) - length + 1))
            found += [f"{_ANYWHERE}.{'.'.join(piece)}" for piece in pieces if piece in self._anywhere]
        return found


def check_skip_list(skipped: SkipList, tensors: Mapping[str, TensorInfo]) -> tuple[str, ...]:
    """Check that a list agrees with the stored dtypes, which decide. Returns notes on entries that match nothing.

    An engine quantises layers by their kind. One stored plain, where others of its kind are FP8, must be listed, and
    one stored in FP8 must not be. Kinds that are plain everywhere (embeddings, norms, routers) need no entry.

    Raises:
        CheckpointError: ``quant_conflict``, naming layer and entry.
    """
    used: set[str] = set()
    quantized_roles: set[str] = set()
    plain: list[tuple[str, TensorInfo]] = []
    for name, info in tensors.items():
        layer = name.removesuffix(".weight")
        covering = skipped.covering(layer)
        used.update(covering)
        if info.dtype == "F8_E4M3":
            if covering:
                raise _conflict(name, info, f"a plain dtype, as skip list entry {covering[0]} says", covering[0])
            quantized_roles.add(role(layer))
        elif not covering and len(info.shape) > 1:
            plain.append((name, info))
    for name, info in plain:
        if role(name.removesuffix(".weight")) in quantized_roles:
            raise _conflict(name, info, "F8_E4M3 like others of its kind, or an entry in the skip list", None)
    return tuple(f"skip list entry {entry} matches no layer" for entry in skipped.entries if entry not in used)


def normalize(entry: str) -> list[str]:
    """The names that an entry of a skip list stands for.

    >>> normalize("model.language_model.layers.0.self_attn.qkv_proj")[0]
    'layers.0.self_attn.q_proj'
    >>> normalize("self_attn")
    ['*.self_attn']
    >>> normalize("model.language_model")
    ['model']
    """
    from_root, parts = _below_model(entry.removesuffix(".weight"))
    if not parts:
        return [_MODEL]
    return [".".join(spelt if from_root else (_ANYWHERE, *spelt)) for spelt in _spelt_out(parts)]


def role(layer: str) -> str:
    """What kind of layer it is: its name without numbers, and the fused name that an engine would run it under.

    >>> role("model.layers.3.self_attn.k_proj")
    'layers.*.self_attn.qkv_proj'
    """
    return _role(_NUMBER.sub(_ANYWHERE, layer))


@cache
def _role(pattern: str) -> str:
    _, parts = _below_model(pattern)
    return ".".join(_FUSED_NAME.get(part, part) for part in parts)


def _below_model(name: str) -> tuple[bool, Parts]:
    """Whether a name starts at the model's root, and its parts below that."""
    parts = [part for part in name.split(".") if part]
    start = 0
    while start < len(parts) and parts[start] in _PREFIXES:
        start += 1
    return start > 0, tuple(parts[start:])


def _spelt_out(parts: Parts) -> list[Parts]:
    """The names in files for a name that may have fused parts."""
    if FUSED.keys().isdisjoint(parts):
        return [parts]
    return list(product(*(FUSED.get(part, (part,)) for part in parts)))


def _conflict(name: str, info: TensorInfo, expected: str, entry: str | None) -> CheckpointError:
    return refusal(
        "quant_conflict",
        f"{name} in {info.file} is stored otherwise than the config says",
        expected=expected,
        found=info.dtype,
        remedy=f"Correct {' or '.join(KEYS)} in config.json, or download config and weights again, of one revision",
        file=info.file,
        tensor=name,
        entry=entry,
    )
