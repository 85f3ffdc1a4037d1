"""The manifest: what lies where in an arena.

A manifest is stored by columns, one row a tensor, because 30,000 small objects cost more to decode than the weights
cost to map. It lives in a sealed memory file of its own; its SHA-256 names the generation, so a generation's name
proves its manifest. No torch here: the daemon validates manifests too.
"""

import hashlib
import itertools
import os
from collections.abc import Callable
from functools import cached_property
from math import prod
from operator import add, le, mod
from typing import Any, Final, TypeVar

import msgspec

from weightcache.arena.seals import require_sealed
from weightcache.errors import ImportRejected
from weightcache.fingerprint import CacheConfig

VERSION: Final = 1
MAX_BYTES: Final = 16 << 20
"""A manifest of 30,000 tensors takes 2.5 MiB; decoded, a hostile one takes thirty times its size."""
MAX_DIMENSIONS: Final = 64
"""torch's own limit for most operations; a shape of a million would keep us multiplying for hours."""
_MAX_EMPTY: Final = 1 << 48

ARENAS: Final = ("memfd", "cuda_vmm")
KINDS: Final = ("parameter", "buffer", "non_persistent_buffer")

ITEM_SIZES: Final = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "int16": 2,
    "uint16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
    "int64": 8,
    "uint64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes an element, by torch's name of the dtype."""


class Publisher(msgspec.Struct, frozen=True):
    """Who put the bytes there. Shown to operators; any admitted process can publish under any identity."""

    pid: int
    executable: str
    origin: str
    slot: str | None
    wall_ns: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """One generation's tensors, by columns.

    Args:
        config: the identity the bytes were loaded for.
        arena: ``memfd`` or ``cuda_vmm``.
        device: the GPU's UUID, None on CPU.
        chunks: bytes behind each descriptor, in order.
        names: a name each row.
        dtypes: the dtype names in use; ``dtype`` holds an index into it each row.
        shapes: dimensions each row.
        strides: elements each dimension, None for a contiguous tensor.
        offsets: bytes from the arena's start.
        kinds: an index into `KINDS` each row.
        aliases: further names of a row (tied weights).
        shared: groups of rows that overlap on purpose, because they are views of one storage.
        digests: the rows' digests, end to end, each ``digest_size`` bytes.
        extras: what an integration wants back, as text.
    """

    version: int = VERSION
    config: CacheConfig
    publisher: Publisher
    arena: str
    device: str | None = None
    chunks: list[int]
    names: list[str]
    dtypes: list[str]
    dtype: list[int]
    shapes: list[tuple[int, ...]]
    strides: list[tuple[int, ...] | None]
    offsets: list[int]
    kinds: bytes
    aliases: dict[str, int] = {}
    shared: list[list[int]] = []
    digest_algorithm: str
    digest_size: int
    digests: bytes
    extras: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self.names)

    @property
    def size(self) -> int:
        """Bytes of the arena."""
        return sum(self.chunks)

    @cached_property
    def lengths(self) -> list[int]:
        """Bytes from the first to the last element of each row; only valid rows have any."""
        return _Lengths(self, _length).of_rows()

    def digest(self, row: int) -> bytes:
        return self.digests[row * self.digest_size : (row + 1) * self.digest_size]

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)


class Head(msgspec.Struct, frozen=True):
    """What the daemon needs of a manifest that was validated when it was published: everything but the tensors."""

    config: CacheConfig
    publisher: Publisher
    arena: str
    chunks: list[int]
    kinds: bytes
    device: str | None = None

    def __len__(self) -> int:
        return len(self.kinds)

    @property
    def size(self) -> int:
        """Bytes of the arena."""
        return sum(self.chunks)


def decode(content: bytes | memoryview) -> Manifest:
    """Read and validate a manifest.

    Raises:
        ImportRejected: reason ``manifest_invalid``; says which row breaks which rule.
    """
    manifest = _decoded(_decoder, content)
    validate(manifest)
    return manifest


def read(descriptor: int, generation: str | None = None) -> tuple[str, Manifest]:
    """Read a manifest from its sealed memory file.

    Args:
        descriptor: the file.
        generation: the name it must prove; any if None.

    Returns:
        The generation's name and the validated manifest.

    Raises:
        ImportRejected: reason ``manifest_invalid``.
    """
    found, content = _content(descriptor)
    if generation is not None and found != generation:
        raise _invalid("the manifest is not the one its generation names", expected=generation, found=found)
    return found, decode(content)


def read_head(descriptor: int, generation: str) -> Head:
    """Read the head of a manifest that its generation's name proves to be the one that was validated once.

    Raises:
        ImportRejected: reason ``manifest_invalid``.
    """
    found, content = _content(descriptor)
    if found != generation:
        raise _invalid("the manifest is not the one its generation names", expected=generation, found=found)
    return _decoded(_head_decoder, content)


def _content(descriptor: int) -> tuple[str, bytes]:
    """The generation that a sealed manifest names, and its content."""
    size = os.fstat(descriptor).st_size
    if size > MAX_BYTES:
        raise _invalid("the manifest is too long", expected=f"at most {MAX_BYTES} bytes", found=f"{size} bytes")
    require_sealed(descriptor, size, "manifest")
    content = os.pread(descriptor, size, 0)
    return generation_of(content), content


_decoder = msgspec.msgpack.Decoder(Manifest)
_head_decoder = msgspec.msgpack.Decoder(Head)
T = TypeVar("T")


def _decoded(decoder: "msgspec.msgpack.Decoder[T]", content: bytes | memoryview) -> T:
    try:
        return decoder.decode(content)
    except msgspec.MsgspecError as error:
        raise _invalid(f"the manifest does not decode: {error}") from error


def generation_of(content: bytes | memoryview) -> str:
    """The name of the generation that this encoded manifest describes: 32 hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()[:32]


def validate(manifest: Manifest) -> None:
    """Check everything that binding relies on, before the first tensor is built.

    Columns of equal length, known dtypes and kinds, sane shapes and strides, every row inside the arena, no row on
    another's bytes unless declared shared, aliases that point at rows and take nobody's name.

    Raises:
        ImportRejected: reason ``manifest_invalid``.
    """
    count = len(manifest.names)
    if manifest.version != VERSION:
        raise _invalid("the manifest has another version", expected=VERSION, found=manifest.version)
    for column in ("dtype", "shapes", "strides", "offsets", "kinds"):
        if len(getattr(manifest, column)) != count:
            found = len(getattr(manifest, column))
            raise _invalid(f"column {column!r} has another length than the names", expected=count, found=found)
    if manifest.digest_size <= 0 or len(manifest.digests) != count * manifest.digest_size:
        expected = f"{count} x {manifest.digest_size} bytes"
        raise _invalid("the digests do not fit the rows", expected=expected, found=f"{len(manifest.digests)} bytes")
    names = set(manifest.names)
    if len(names) != count:
        raise _invalid("two rows have one name")
    for name, row in manifest.aliases.items():
        if not 0 <= row < count or name in names:
            raise _invalid(f"alias {name!r} points at row {row} of {count}, or takes a row's name")
    if manifest.kinds and max(manifest.kinds) >= len(KINDS):
        raise _invalid("a row is of no known kind", expected=KINDS, found=max(manifest.kinds))
    if manifest.arena not in ARENAS:
        raise _invalid("the arena is of no known kind", expected=ARENAS, found=manifest.arena)
    if not manifest.chunks or min(manifest.chunks) <= 0:
        raise _invalid("a chunk has no bytes", expected="chunks of 1 byte or more", found=manifest.chunks)
    if manifest.arena == "memfd" and len(manifest.chunks) != 1:
        raise _invalid("a memory file is in pieces", expected="1 chunk", found=len(manifest.chunks))
    manifest.__dict__["lengths"] = checked = _checked_lengths(manifest)
    _check_overlap(manifest, checked)


def span(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Elements from the first to the last of a strided tensor, both included; 0 for an empty one."""
    if 0 in shape:
        return 0
    return 1 + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))


_Kind = tuple[int, tuple[int, ...], tuple[int, ...] | None]
"""Dtype code, shape and stride of a row; thousands of rows have a handful of them."""


class _Lengths(dict[_Kind, int]):
    """Bytes from the first to the last element of each kind of row, counted once a kind."""

    def __init__(self, manifest: Manifest, count: Callable[[Manifest, _Kind], int]) -> None:
        self._manifest = manifest
        self._count = count

    def __missing__(self, kind: _Kind) -> int:
        length = self[kind] = self._count(self._manifest, kind)
        return length

    def of_rows(self) -> list[int]:
        """Of every row of the manifest."""
        columns = self._manifest
        return list(map(self.__getitem__, zip(columns.dtype, columns.shapes, columns.strides, strict=True)))


def _length(manifest: Manifest, kind: _Kind) -> int:
    code, shape, stride = kind
    return (prod(shape) if stride is None else span(shape, stride)) * ITEM_SIZES[manifest.dtypes[code]]


def _checked_lengths(manifest: Manifest) -> list[int]:
    """`Manifest.lengths`, each row checked by itself. Columns are compared whole: rows are looked at for a culprit."""
    size, offsets = manifest.size, manifest.offsets
    unknown = [name for name in manifest.dtypes if name not in ITEM_SIZES]
    if unknown:
        raise _invalid(f"dtype {unknown[0]!r} is not one that travels", expected=sorted(ITEM_SIZES), found=unknown)
    found = _Lengths(manifest, _checked).of_rows()
    if offsets and (min(offsets) < 0 or max(map(add, offsets, found)) > size):
        row = next(row for row, at in enumerate(offsets) if at < 0 or at + found[row] > size)
        where = f"bytes {offsets[row]} to {offsets[row] + found[row]}"
        raise _broken(manifest, row, f"{where} outside an arena of {size}")
    items = [ITEM_SIZES[name] for name in manifest.dtypes]
    if any(map(mod, offsets, map(items.__getitem__, manifest.dtype))):
        row = next(row for row, at in enumerate(offsets) if at % items[manifest.dtype[row]])
        item = items[manifest.dtype[row]]
        raise _broken(manifest, row, f"offset {offsets[row]} not a multiple of its {item}-byte elements")
    return found


def _checked(manifest: Manifest, kind: _Kind) -> int:
    """`_length`, after checking dtype, shape and strides."""
    code, shape, stride = kind
    size = manifest.size

    def broken(what: str) -> ImportRejected:
        kinds = zip(manifest.dtype, manifest.shapes, manifest.strides, strict=True)
        return _broken(manifest, next(row for row, other in enumerate(kinds) if other == kind), what)

    if not 0 <= code < len(manifest.dtypes):
        raise broken(f"dtype code {code} of {len(manifest.dtypes)}")
    if shape and (min(shape) < 0 or len(shape) > MAX_DIMENSIONS):
        raise broken(f"shape {_short(shape)}")
    if stride is not None and (
        len(stride) != len(shape) or (stride and not 0 <= min(stride) <= max(stride) < _MAX_EMPTY)
    ):
        raise broken(f"stride {_short(stride)} for shape {shape}")
    elements = prod(shape)
    if elements > size or (not elements and prod(filter(None, shape)) > _MAX_EMPTY):
        raise broken(f"shape {shape} for an arena of {size} bytes")
    return _length(manifest, kind)


def _check_overlap(manifest: Manifest, lengths: list[int]) -> None:
    offsets = manifest.offsets
    group_of: dict[int, int] = {}
    for number, group in enumerate(manifest.shared):
        for row in group:
            if not 0 <= row < len(manifest.names) or row in group_of:
                raise _invalid(f"shared group {number} names row {row}, which is no row or in two groups")
            group_of[row] = number
    if all(map(le, map(add, offsets, lengths), itertools.islice(offsets, 1, None))):
        return
    rows = zip(offsets, lengths, range(len(offsets)), strict=True)
    furthest, holder = 0, -1
    for start, end, row in sorted((offset, offset + length, row) for offset, length, row in rows if length):
        if start < furthest and (holder not in group_of or group_of.get(row) != group_of[holder]):
            other = manifest.names[holder]
            raise _broken(manifest, row, f"lies on the bytes of {other!r} without being declared shared")
        if end > furthest:
            furthest, holder = end, row


def _short(numbers: tuple[int, ...]) -> str:
    more = len(numbers) - MAX_DIMENSIONS
    return f"{numbers[:MAX_DIMENSIONS]}" + (f" and {more} more" if more > 0 else "")


def _broken(manifest: Manifest, row: int, what: str) -> ImportRejected:
    return _invalid(f"tensor {manifest.names[row]!r}: {what}", tensor=manifest.names[row])


def _invalid(message: str, **facts: Any) -> ImportRejected:
    return ImportRejected(
        "manifest_invalid", message, remedy="Release the generation and load the model again", **facts
    )
