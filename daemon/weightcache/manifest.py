"""The manifest: what lies where in an arena.

A manifest is stored by columns, one row a tensor, because 30,000 small objects cost more to decode than the weights
cost to map. It lives in a sealed memory file of its own; its SHA-256 names the generation, so a generation's name
proves its manifest. No torch here: the daemon validates manifests too.
"""

import hashlib
import itertools
import os
from math import prod
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


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
    _check_overlap(manifest, _extents(manifest))


def span(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Elements from the first to the last of a strided tensor, both included; 0 for an empty one."""
    if 0 in shape:
        return 0
    return 1 + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))


def _extents(manifest: Manifest) -> list[tuple[int, int, int]]:
    """Each row's first byte, end and number, after checking the row itself; rows without bytes left out."""
    size = manifest.size
    unknown = [name for name in manifest.dtypes if name not in ITEM_SIZES]
    if unknown:
        raise _invalid(f"dtype {unknown[0]!r} is not one that travels", expected=sorted(ITEM_SIZES), found=unknown)
    items = [ITEM_SIZES[name] for name in manifest.dtypes]
    known: dict[tuple[int, tuple[int, ...], tuple[int, ...] | None], tuple[int, int]] = {}
    extents = []
    kinds = zip(manifest.dtype, manifest.shapes, manifest.strides, strict=True)
    for row, (kind, offset) in enumerate(zip(kinds, manifest.offsets, strict=True)):
        found = known.get(kind)
        if found is None:  # thousands of tensors have a handful of shapes
            found = known[kind] = _checked(manifest, row, items)
        length, item = found
        end = offset + length
        if offset < 0 or end > size:
            raise _broken(manifest, row, f"bytes {offset} to {end} outside an arena of {size}")
        if offset % item:
            raise _broken(manifest, row, f"offset {offset} not a multiple of its {item}-byte elements")
        if length:
            extents.append((offset, end, row))
    return extents


def _checked(manifest: Manifest, row: int, items: list[int]) -> tuple[int, int]:
    """Bytes from the first to the last element of a row, and of an element, after checking dtype, shape and strides."""
    code, shape, stride, size = manifest.dtype[row], manifest.shapes[row], manifest.strides[row], manifest.size
    if not 0 <= code < len(items):
        raise _broken(manifest, row, f"dtype code {code} of {len(items)}")
    if shape and (min(shape) < 0 or len(shape) > MAX_DIMENSIONS):
        raise _broken(manifest, row, f"shape {_short(shape)}")
    count = elements = prod(shape)
    if stride is not None:
        if len(stride) != len(shape) or (stride and not 0 <= min(stride) <= max(stride) < _MAX_EMPTY):
            raise _broken(manifest, row, f"stride {_short(stride)} for shape {shape}")
        count = span(shape, stride)
    if elements > size or (not elements and prod(filter(None, shape)) > _MAX_EMPTY):
        raise _broken(manifest, row, f"shape {shape} for an arena of {size} bytes")
    return count * items[code], items[code]


def _check_overlap(manifest: Manifest, extents: list[tuple[int, int, int]]) -> None:
    group_of: dict[int, int] = {}
    for number, group in enumerate(manifest.shared):
        for row in group:
            if not 0 <= row < len(manifest.names) or row in group_of:
                raise _invalid(f"shared group {number} names row {row}, which is no row or in two groups")
            group_of[row] = number
    extents.sort()
    if all(end <= start for (_, end, _), (start, _, _) in itertools.pairwise(extents)):
        return
    furthest, holder = 0, -1
    for start, end, row in extents:
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
