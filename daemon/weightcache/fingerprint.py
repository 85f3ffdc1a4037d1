"""The fingerprint: which weights an engine needs, field by field.

Two engines may share weights when every field is equal. The comparison gives a list of differences, never just "no".
"""

import hashlib
import json
from typing import Any

import msgspec

Value = str | int | None


class Difference(msgspec.Struct, frozen=True):
    """One field on which two configurations disagree."""

    field: str
    expected: Value
    found: Value

    def __str__(self) -> str:
        return f"{self.field}: expected {self.expected!r}, found {self.found!r}"


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that decides the bytes of one rank's weights. The order of the fields is the order of reporting.

    ``checkpoint_digest`` is content identity: blake3 over every tensor's name, dtype, shape and bytes (see
    `weightcache.checkpoint`). ``layout_id`` stands for the code that lays out and post-processes weights.
    """

    model_path: str
    model_arch: str
    revision: str | None = None
    checkpoint_digest: str | None = None
    tp_size: int = 1
    tp_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0
    dp_size: int = 1
    ep_size: int = 1
    ep_rank: int = 0
    quant_method: str = "none"
    quant_config_hash: str | None = None
    dtype: str
    device_capability: str | None = None
    torch_version: str
    engine: str
    layout_id: str
    kernel_backend: str | None = None

    def __post_init__(self) -> None:
        for field in FIELDS:  # torch's version is a string that compares by number, not by text
            value = getattr(self, field)
            if isinstance(value, str) and type(value) is not str:
                msgspec.structs.force_setattr(self, field, str.__str__(value))

    def differences(self, resident: "CacheConfig") -> list[Difference]:
        """Fields on which the resident weights differ from what is wanted here, in reporting order.

        ``model_path`` counts only while content equality is unproven: when both sides carry a
        ``checkpoint_digest`` and the digests are equal, a moved copy matches. A digest that one side lacks is a
        difference, since nothing proves that the bytes are the same.
        """
        proven = self.checkpoint_digest is not None and self.checkpoint_digest == resident.checkpoint_digest
        differing = []
        for field in FIELDS:
            wanted, there = getattr(self, field), getattr(resident, field)
            if field == "model_path" and (proven or normalize_path(wanted) == normalize_path(there)):
                continue
            if wanted != there or (field == "checkpoint_digest" and not proven):
                differing.append(Difference(field, wanted, there))
        return differing

    def key(self) -> str:
        """A short name for this identity: equal for equal meaning, over processes and hash seeds."""
        path = normalize_path(self.model_path) if self.checkpoint_digest is None else None
        fields = {**self.to_dict(), "model_path": path}
        return stable_hash(fields)[:16]

    def to_dict(self) -> dict[str, Value]:
        """The fields as plain data, in reporting order."""
        return {field: getattr(self, field) for field in FIELDS}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "CacheConfig":
        """Build from plain data.

        Raises:
            msgspec.ValidationError: a field is unknown, missing or of the wrong type.
        """
        return msgspec.convert(fields, cls)


FIELDS: tuple[str, ...] = CacheConfig.__struct_fields__


def normalize_path(path: str) -> str:
    """The path without what does not change its meaning: trailing and doubled slashes, ``.`` components."""
    head = "/" if path.startswith("/") else ""
    return head + "/".join(part for part in path.split("/") if part not in ("", "."))


def stable_hash(value: Any) -> str:
    """SHA-256 over canonical JSON: equal meaning (key order, tuple or list) gives an equal hash.

    The value itself is never changed by hashing it.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=_as_json)
    return hashlib.sha256(text.encode()).hexdigest()


def _as_json(value: object) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"a configuration value of type {type(value).__name__} has no canonical form: {value!r}")
