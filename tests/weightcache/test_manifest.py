"""Manifests: what is written is read again, and what could lead outside the arena is refused before it is used."""

import os
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from tests.weightcache.models import config

from weightcache.arena.memfd import MemfdMapping
from weightcache.arena.seals import sealed_file
from weightcache.errors import ImportRejected
from weightcache.manifest import MAX_BYTES, Manifest, Publisher, decode, generation_of, read, read_head, validate


def manifest(**changes: Any) -> Manifest:
    """A bf16 matrix, its transposed view, a scalar, an empty tensor, and an alias."""
    columns: dict[str, Any] = {
        "config": config(),
        "publisher": Publisher(1, "/usr/bin/python3", "/models/tiny", None, 0),
        "arena": "memfd",
        "chunks": [1024],
        "names": ["a", "a_t", "scalar", "empty"],
        "dtypes": ["bfloat16", "int64"],
        "dtype": [0, 0, 1, 0],
        "shapes": [(4, 8), (8, 4), (), (0, 8)],
        "strides": [None, (1, 8), None, None],
        "offsets": [0, 0, 256, 0],
        "kinds": bytes([0, 0, 1, 0]),
        "aliases": {"tied": 0},
        "shared": [[0, 1]],
        "digest_algorithm": "blake3",
        "digest_size": 32,
        "digests": bytes(4 * 32),
    }
    return Manifest(**{**columns, **changes})


def plain(**changes: Any) -> bytes:
    """The manifest encoded with columns that may be of any type."""
    return msgspec.msgpack.encode({**msgspec.to_builtins(manifest(), builtin_types=(bytes,)), **changes})


def use(content: bytes) -> None:
    """Refuse a manifest as a client would, or build every tensor that it describes."""
    try:
        found = decode(content)
    except ImportRejected:
        return
    if found.arena != "memfd" or found.size > 1 << 20:
        return
    descriptor = sealed_file("arena", bytes(found.size))
    for row, tensor in enumerate(MemfdMapping(descriptor, found.size).views(found)):
        assert tuple(tensor.shape) == found.shapes[row]
        assert found.offsets[row] + tensor.untyped_storage().nbytes() <= found.size or not tensor.numel()
    os.close(descriptor)


def test_what_was_written_is_read() -> None:
    written = manifest(extras={"note": "kept"})
    assert decode(written.encode()) == written


def test_a_generation_is_named_by_its_manifest() -> None:
    written = manifest()
    descriptor = sealed_file("manifest", written.encode())
    name, found = read(descriptor)
    assert (name, found) == (generation_of(written.encode()), written)
    head = read_head(descriptor, name)
    assert (head.config, head.size, len(head), head.chunks) == (written.config, 1024, 4, [1024])
    for reading in (read, read_head):
        with pytest.raises(ImportRejected, match="not the one its generation names"):
            reading(descriptor, "0" * 32)
    os.close(descriptor)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"version": 2}, "another version"),
        ({"offsets": [0, 0, 256]}, "another length"),
        ({"kinds": bytes([0, 0, 1])}, "another length"),
        ({"digests": bytes(127)}, "digests"),
        ({"digest_size": 0, "digests": b""}, "digests"),
        ({"names": ["a", "a", "scalar", "empty"]}, "one name"),
        ({"aliases": {"tied": 4}}, "alias 'tied' points at row 4"),
        ({"aliases": {"tied": -1}}, "alias 'tied' points at row -1"),
        ({"aliases": {"scalar": 0}}, "takes a row's name"),
        ({"kinds": bytes([0, 0, 3, 0])}, "no known kind"),
        ({"arena": "shared_memory"}, "no known kind"),
        ({"chunks": []}, "no bytes"),
        ({"chunks": [1024, 0]}, "no bytes"),
        ({"chunks": [-1024]}, "no bytes"),
        ({"chunks": [512, 512]}, "in pieces"),
        ({"dtypes": ["bfloat16", "bfloat61"]}, "bfloat61"),
        ({"dtypes": ["bfloat16", "Tensor"]}, "Tensor"),
        ({"dtype": [0, 0, 2, 0]}, "dtype code 2"),
        ({"dtype": [0, 0, -1, 0]}, "dtype code -1"),
        ({"shapes": [(4, -8), (8, 4), (), (0, 8)]}, r"'a': shape \(4, -8\)"),
        ({"shapes": [(1,) * 65, (8, 4), (), (0, 8)]}, "'a': shape"),
        ({"shapes": [(4, 8), (8, 4), (), (0, 1 << 62)]}, "'empty': shape"),
        ({"strides": [None, (1, -8), None, None]}, r"'a_t': stride \(1, -8\)"),
        ({"strides": [None, (1,), None, None]}, "'a_t': stride"),
        ({"strides": [None, (1, 1 << 63), None, None]}, "'a_t': stride"),
        ({"shapes": [(4, 8), (1 << 40, 4), (), (0, 8)], "strides": [None, (0, 1), None, None]}, "'a_t': shape"),
        ({"strides": [None, (1, 800), None, None]}, "outside an arena"),
        ({"offsets": [0, 0, 1020, 0]}, "outside an arena"),
        ({"offsets": [-2, 0, 256, 0]}, "outside an arena"),
        ({"offsets": [0, 0, 1 << 63, 0]}, "outside an arena"),
        ({"offsets": [1, 0, 256, 0]}, "not a multiple"),
        ({"shared": []}, "'a_t': lies on the bytes of 'a'"),
        ({"shared": [[0], [1]]}, "'a_t': lies on the bytes of 'a'"),
        ({"offsets": [0, 32, 256, 0], "shared": []}, "'a_t': lies on the bytes of 'a'"),
        ({"offsets": [0, 0, 32, 0]}, "'scalar': lies on the bytes"),
        ({"shared": [[0, 1], [1, 2]]}, "in two groups"),
        ({"shared": [[0, 7]]}, "row 7"),
    ],
)
def test_what_does_not_hold_is_refused_with_its_name(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ImportRejected, match=text) as refused:
        decode(manifest(**changes).encode())
    assert refused.value.reason == "manifest_invalid"


def test_overlap_is_found_behind_a_longer_neighbour() -> None:
    """Rows sorted by where they begin: the third lies in the first, not in the second."""
    rows = {"names": ["long", "short", "late"], "dtype": [0, 0, 0], "kinds": bytes(3), "digests": bytes(3 * 32)}
    places = {"shapes": [(100,), (4,), (4,)], "strides": [None] * 3, "offsets": [0, 16, 64]}
    with pytest.raises(ImportRejected, match="'late': lies on the bytes of 'long'"):
        validate(manifest(**rows, **places, aliases={}, shared=[[0, 1]]))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: content[:-1],
        lambda content: content + b"\x00",
        lambda content: b"",
        lambda content: b"\xc1",
        lambda content: b"not a manifest",
        lambda content: plain(surprise=1),
        lambda content: plain(shapes=[["4"]] * 4),
        lambda content: content.replace(b"a_t", b"\xff\xfe\xfd"),
        lambda content: b"\x91" * 100_000,
    ],
)
def test_what_is_no_manifest_is_refused(spoil: Callable[[bytes], bytes]) -> None:
    with pytest.raises(ImportRejected) as refused:
        decode(spoil(manifest().encode()))
    assert refused.value.reason == "manifest_invalid"


def test_a_manifest_without_seals_or_beyond_the_limit_is_refused() -> None:
    descriptor = os.memfd_create("manifest", os.MFD_ALLOW_SEALING)
    os.write(descriptor, manifest().encode())
    with pytest.raises(ImportRejected, match="not sealed"):
        read(descriptor)
    os.ftruncate(descriptor, MAX_BYTES + 1)
    with pytest.raises(ImportRejected, match="too long"):
        read(descriptor)
    os.close(descriptor)


_numbers = st.one_of(st.integers(0, 8), st.integers(0, 64).map(lambda each: 8 * each), st.integers(-3, (1 << 64) - 1))
_shapes = st.lists(_numbers, max_size=3).map(tuple)


def _column(values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(values, min_size=4, max_size=4)


_columns = st.fixed_dictionaries(
    {},
    optional={
        "chunks": st.lists(_numbers, min_size=1, max_size=2),
        "dtypes": st.lists(st.sampled_from(["bfloat16", "int64", "float8_e4m3fn", "complex128"]), min_size=2),
        "dtype": _column(st.integers(0, 1) | st.integers(-1, 3)),
        "shapes": _column(_shapes),
        "strides": _column(st.none() | _shapes),
        "offsets": _column(_numbers),
        "kinds": _column(st.integers(0, 2)).map(bytes),
        "aliases": st.dictionaries(st.sampled_from(["a", "x", "y"]), st.integers(-1, 5)),
        "shared": st.just([[0, 1, 2, 3]]) | st.lists(st.lists(st.integers(-1, 5), max_size=4), max_size=3),
    },
)


@seed(20_261)
@settings(max_examples=600, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(_columns)
def test_a_manifest_is_valid_or_refused(columns: dict[str, Any]) -> None:
    use(plain(**columns))


@seed(20_261)
@settings(max_examples=1000, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_damaged_manifest_is_valid_or_refused(data: st.DataObject) -> None:
    content = bytearray(manifest().encode())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    use(bytes(content))
