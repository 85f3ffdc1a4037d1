"""Files against their headers: truncated, overlapping, foreign (bug log B01) and odd dtypes (B04)."""

import json
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tests.fixtures import checkpoints

from weightcache.checkpoint import DTYPES, Checkpoint
from weightcache.errors import CheckpointError

SECOND = checkpoints.SHARDS[1]


def refused(folder: Path, reason: str) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    assert caught.value.reason == reason, str(caught.value)
    return caught.value


def single(folder: Path, header: Any, data: bytes) -> Path:
    """A checkpoint of one file with this header."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(checkpoints.config()))
    checkpoints.write_raw(folder / "model.safetensors", header, data)
    return folder


def entry(dtype: str, shape: list[Any], begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("cut", [1, 4097])
def test_a_shortened_shard_is_refused_with_both_sizes(tmp_path: Path, cut: int) -> None:
    folder = checkpoints.plain(tmp_path / "t")
    shard = folder / SECOND
    whole = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[:-cut])
    error = refused(folder, "truncated")
    assert SECOND in str(error)
    assert f"{whole} bytes" in str(error)
    assert f"{whole - cut} bytes" in str(error)


def test_a_shard_cut_to_its_header_is_truncated(tmp_path: Path) -> None:
    folder = checkpoints.plain(tmp_path / "t")
    header, _ = checkpoints.read_raw(folder / SECOND)
    checkpoints.write_raw(folder / SECOND, header, b"")
    assert SECOND in str(refused(folder, "truncated"))


@pytest.mark.parametrize("length", [0, 5, 7, 8, 60])
def test_a_shard_cut_within_its_header_is_truncated(tmp_path: Path, length: int) -> None:
    folder = checkpoints.plain(tmp_path / "t")
    shard = folder / SECOND
    shard.write_bytes(shard.read_bytes()[:length])
    assert f"{length} bytes" in str(refused(folder, "truncated"))


@pytest.mark.parametrize("length", [2**40, 100_000_001, 2**64 - 1])
def test_a_header_longer_than_the_format_allows_is_refused_before_it_is_read(tmp_path: Path, length: int) -> None:
    folder = checkpoints.plain(tmp_path / "t")
    shard = folder / SECOND
    shard.write_bytes(struct.pack("<Q", length) + shard.read_bytes()[8:])
    error = refused(folder, "not_safetensors")
    assert "100000000 bytes" in str(error)
    assert str(length) in str(error)
    assert str(shard.stat().st_size) in str(error)


def test_a_header_longer_than_the_format_allows_is_refused_in_a_file_that_could_hold_it(tmp_path: Path) -> None:
    folder = checkpoints.plain(tmp_path / "t")
    with open(folder / SECOND, "wb") as file:
        file.write(struct.pack("<Q", 100_000_001) + b"{")
        file.truncate(200_000_000)
    assert "100000000 bytes" in str(refused(folder, "not_safetensors"))


def test_a_range_shorter_than_its_shape_is_refused(tmp_path: Path) -> None:
    folder = checkpoints.plain(tmp_path / "t")
    header, data = checkpoints.read_raw(folder / SECOND)
    header["lm_head.weight"]["data_offsets"][1] -= 2
    checkpoints.write_raw(folder / SECOND, header, data)
    error = refused(folder, "geometry")
    assert error.data["tensor"] == "lm_head.weight"
    assert error.data["file"].endswith(SECOND)


def test_two_tensors_on_one_range_are_refused(tmp_path: Path) -> None:
    folder = checkpoints.plain(tmp_path / "t")
    header, data = checkpoints.read_raw(folder / SECOND)
    q, k = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"
    header[k]["data_offsets"] = header[q]["data_offsets"]
    checkpoints.write_raw(folder / SECOND, header, data)
    assert "overlap" in str(refused(folder, "geometry"))


GEOMETRY = {
    "a hole before the first": {"a": entry("U8", [4], 4, 8)},
    "a hole between": {"a": entry("U8", [3], 0, 3), "b": entry("U8", [4], 4, 8)},
    "a partial overlap": {"a": entry("U8", [5], 0, 5), "b": entry("U8", [4], 4, 8)},
    "data behind the last": {"a": entry("U8", [4], 0, 4)},
    "a range backwards": {"a": entry("U8", [8], 8, 0)},
    "a huge shape": {"a": entry("U8", [2**62, 2**62], 0, 8)},
    "a scalar of the wrong size": {"a": entry("F32", [], 0, 8)},
    "too many dimensions": {"a": entry("U8", [1] * 64 + [8], 0, 8)},
    "an odd number of half bytes": {"a": entry("F4", [3], 0, 2), "b": entry("U8", [6], 2, 8)},
    "half bytes over two rows": {"a": entry("F4", [2, 3], 0, 3), "b": entry("U8", [5], 3, 8)},
    "an empty tensor out of bounds": {"a": entry("U8", [8], 0, 8), "b": entry("U8", [0], 9, 9)},
}


@pytest.mark.parametrize("header", GEOMETRY.values(), ids=GEOMETRY.keys())
def test_bad_geometry_is_refused(tmp_path: Path, header: dict[str, Any]) -> None:
    error = refused(single(tmp_path / "t", header, bytes(8)), "geometry")
    assert "model.safetensors" in str(error)


NOT_SAFETENSORS: dict[str, Any] = {
    "no JSON": b"{not json",
    "an array": b"[1, 2]",
    "a bare number": b"17",
    "not UTF-8": b'{"\xff": 1}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "nested without end": b'{"a":' * 20_000,
    "a number without end": b'{"a":' + b"9" * 10_000 + b"}",
    "metadata that is no object": {"__metadata__": 3},
    "metadata that is no text": {"__metadata__": {"a": 1}},
    "an entry that is text": {"a": "b"},
    "an entry that is null": {"a": None},
    "no dtype": {"a": {"shape": [8], "data_offsets": [0, 8]}},
    "no shape": {"a": {"dtype": "U8", "data_offsets": [0, 8]}},
    "no offsets": {"a": {"dtype": "U8", "shape": [8]}},
    "a negative dimension": {"a": entry("U8", [-8], 0, 8)},
    "a fraction as dimension": {"a": entry("U8", [8.0], 0, 8)},
    "a truth as dimension": {"a": entry("U8", [True, 8], 0, 8)},
    "a shape that is a number": {"a": {"dtype": "U8", "shape": 8, "data_offsets": [0, 8]}},
    "three offsets": {"a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 4, 8]}},
    "offsets as text": {"a": entry("U8", [8], "0", "8")},
    "a lone surrogate as name": b'{"\\ud800": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}}',
}


@pytest.mark.parametrize("header", NOT_SAFETENSORS.values(), ids=NOT_SAFETENSORS.keys())
def test_a_header_that_is_none_is_refused(tmp_path: Path, header: Any) -> None:
    assert "model.safetensors" in str(refused(single(tmp_path / "t", header, bytes(8)), "not_safetensors"))


def test_a_name_twice_in_one_header_is_refused(tmp_path: Path) -> None:
    one = json.dumps(entry("U8", [8], 0, 8))
    two = json.dumps(entry("I8", [8], 0, 8))
    folder = single(tmp_path / "t", f'{{"a": {one}, "a": {two}}}'.encode(), bytes(8))
    assert refused(folder, "duplicate_tensor").data["tensor"] == "a"


def test_a_zip_archive_is_refused_by_name(tmp_path: Path) -> None:
    folder = checkpoints.plain(tmp_path / "t")
    with zipfile.ZipFile(folder / SECOND, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + bytes(5000))
    assert "zip" in str(refused(folder, "not_safetensors"))


def test_a_git_lfs_pointer_is_refused_by_name(tmp_path: Path) -> None:
    folder = checkpoints.plain(tmp_path / "t")
    (folder / SECOND).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4000000\n")
    assert "Git LFS" in str(refused(folder, "not_safetensors"))


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_a_shard_that_is_no_file_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    folder = checkpoints.plain(tmp_path / "t")
    (folder / SECOND).unlink()
    make(folder / SECOND)
    assert SECOND in str(refused(folder, "not_safetensors"))


def test_scalars_and_empty_tensors_are_read(tmp_path: Path) -> None:
    header = {
        "scalar": entry("F32", [], 0, 4),
        "first empty": entry("BF16", [0, 3], 0, 0),
        "last empty": entry("I64", [2, 0], 4, 4),
    }
    checkpoint = Checkpoint.open(single(tmp_path / "t", header, struct.pack("<f", 1.5)))
    tensors = dict(checkpoint.read())
    assert tensors["scalar"].shape == ()
    assert tensors["scalar"].item() == 1.5
    assert tensors["first empty"].shape == (0, 3)
    assert tensors["last empty"].shape == (2, 0)


@pytest.mark.parametrize("dtype", ["BF61", "bf16", "F6_E2M3", "F6_E3M2", "C128", "I4", "", 7, None])
def test_an_unknown_dtype_is_refused_with_tensor_file_and_string(tmp_path: Path, dtype: Any) -> None:
    folder = single(tmp_path / "t", {"w": entry(dtype, [4, 2], 0, 16)}, bytes(16))
    error = refused(folder, "dtype")
    assert error.data["tensor"] == "w"
    assert repr(dtype) in str(error)
    assert "model.safetensors" in str(error)


NAMES = [*DTYPES, "F6_E2M3", "F6_E3M2", "C128", "BF61", "bf16"]


@pytest.mark.parametrize("dtype", NAMES)
def test_the_table_is_that_of_the_library_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    bits = DTYPES[dtype].bits if dtype in DTYPES else 6 if dtype.startswith("F6") else 16
    data = bytes(at % 251 for at in range(4 * bits))
    if dtype == "BOOL":
        data = bytes(byte % 2 for byte in data)
    folder = single(tmp_path / "t", {"w": entry(dtype, [8, 4], 0, 4 * bits)}, data)
    if dtype not in DTYPES:
        refused(folder, "dtype")
        with pytest.raises(SafetensorError):
            load_file(folder / "model.safetensors")
        return
    ((name, ours),) = Checkpoint.open(folder).read()
    theirs = load_file(folder / "model.safetensors")[name]
    assert ours.dtype == theirs.dtype == getattr(torch, DTYPES[dtype].torch)
    assert ours.shape == theirs.shape
    assert bytes(ours.view(torch.uint8).flatten().tolist()) == data
