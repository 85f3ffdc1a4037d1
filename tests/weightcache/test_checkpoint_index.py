"""The index against the files, both ways (bug log B02), and copies of one tensor (B03)."""

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.fixtures import checkpoints

from weightcache.checkpoint import Checkpoint
from weightcache.errors import CheckpointError

FIRST, SECOND = checkpoints.SHARDS
HEAD = "lm_head.weight"
MAKERS = [checkpoints.plain, checkpoints.fp8]


def refused(folder: Path, reason: str) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    assert caught.value.reason == reason, str(caught.value)
    return caught.value


def redirect(folder: Path, name: Any) -> None:
    """Let the index say that the head is in the file called `name`."""
    index = json.loads((folder / checkpoints.INDEX).read_text())
    checkpoints.write_index(folder, {**index["weight_map"], HEAD: name})


def read(folder: Path) -> str:
    """Read a checkpoint as a whole; returns its digest."""
    checkpoint = Checkpoint.open(folder)
    for _ in checkpoint.read():
        pass
    assert checkpoint.digest is not None
    return checkpoint.digest


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("gone", [[SECOND], [FIRST, SECOND]])
def test_all_missing_shards_are_listed(tmp_path: Path, make: Any, gone: list[str]) -> None:
    folder = make(tmp_path / "t")
    for name in gone:
        (folder / name).unlink()
    error = refused(folder, "shard_missing")
    assert error.data["files"] == gone
    assert all(name in str(error) for name in gone)


def test_a_part_missing_from_a_series_without_index_is_noticed(tmp_path: Path) -> None:
    folder = checkpoints.plain(tmp_path / "t")
    (folder / checkpoints.INDEX).unlink()
    (folder / FIRST).unlink()
    assert refused(folder, "shard_missing").data["files"] == [FIRST]


@pytest.mark.parametrize(
    "name",
    [
        *("../x.safetensors", "sub/../../x.safetensors", "/etc/x.safetensors", "", "a\0b", ".."),
        *("..\\x.safetensors", "sub\\..\\..\\x.safetensors", "\\x.safetensors"),
    ],
)
def test_a_name_that_leaves_the_folder_is_never_opened(tmp_path: Path, name: str) -> None:
    folder = checkpoints.plain(tmp_path / "t")
    outside = tmp_path / "x.safetensors"
    os.mkfifo(outside)  # opening it would block for ever
    redirect(folder, name)
    error = refused(folder, "path_escape")
    assert ascii(name) in str(error)
    assert error.data["tensor"] in json.loads((folder / checkpoints.INDEX).read_text())["weight_map"]


def test_an_absolute_name_is_refused_even_if_it_is_inside(tmp_path: Path) -> None:
    folder = checkpoints.plain(tmp_path / "t")
    redirect(folder, str(folder / SECOND))
    refused(folder, "path_escape")


def test_a_lone_surrogate_as_name_is_refused(tmp_path: Path) -> None:
    folder = checkpoints.plain(tmp_path / "t")
    redirect(folder, "\ud800.safetensors")
    refused(folder, "path_escape")


def test_a_shard_in_a_folder_below_is_accepted(tmp_path: Path) -> None:
    folder = checkpoints.plain(tmp_path / "t")
    expected = read(folder)
    (folder / "parts").mkdir()
    (folder / SECOND).rename(folder / "parts" / SECOND)
    index = json.loads((folder / checkpoints.INDEX).read_text())["weight_map"]
    moved = {tensor: f"./parts//{name}" if name == SECOND else name for tensor, name in index.items()}
    checkpoints.write_index(folder, moved)
    assert read(folder) == expected


def test_two_spellings_of_one_name_are_one_file(tmp_path: Path) -> None:
    folder = checkpoints.plain(tmp_path / "t")
    redirect(folder, f"./{SECOND}")
    assert [file.name for file in Checkpoint.open(folder).files] == [FIRST, SECOND]


@pytest.mark.parametrize(
    "index",
    [
        b"",
        b"[]",
        b"{}",
        b'{"weight_map": []}',
        b'{"weight_map": {"a": 1}}',
        b'{"weight_map": {"a": null}}',
        b"\xff\xfe{}",
    ],
)
def test_an_index_that_is_none_is_refused(tmp_path: Path, index: bytes) -> None:
    folder = checkpoints.plain(tmp_path / "t")
    (folder / checkpoints.INDEX).write_bytes(index)
    refused(folder, "index_invalid")


def test_an_index_that_names_a_tensor_twice_is_refused(tmp_path: Path) -> None:
    folder = checkpoints.plain(tmp_path / "t")
    text = (folder / checkpoints.INDEX).read_text()
    doubled = text.replace('"weight_map": {', f'"weight_map": {{"{HEAD}": "{FIRST}", ')
    (folder / checkpoints.INDEX).write_text(doubled)
    assert refused(folder, "duplicate_tensor").data["tensor"] == HEAD


def test_an_empty_index_is_refused(tmp_path: Path) -> None:
    folder = checkpoints.plain(tmp_path / "t")
    checkpoints.write_index(folder, {})
    refused(folder, "shard_missing")


def test_two_indices_are_refused_unless_one_has_the_usual_name(tmp_path: Path) -> None:
    folder = checkpoints.plain(tmp_path / "t")
    text = (folder / checkpoints.INDEX).read_text()
    (folder / "consolidated.safetensors.index.json").write_text(text)
    Checkpoint.open(folder)
    (folder / checkpoints.INDEX).rename(folder / "other.safetensors.index.json")
    refused(folder, "index_ambiguous")


def test_a_tensor_that_its_file_does_not_hold_is_named(tmp_path: Path) -> None:
    folder = checkpoints.plain(tmp_path / "t")
    redirect(folder, FIRST)
    error = refused(folder, "tensor_missing")
    assert error.data["tensor"] == HEAD
    assert FIRST in str(error)
    assert SECOND in str(error)


def test_a_tensor_outside_the_index_is_read_and_noted(tmp_path: Path) -> None:
    folder = checkpoints.plain(tmp_path / "t")
    index = json.loads((folder / checkpoints.INDEX).read_text())["weight_map"]
    del index[HEAD]
    checkpoints.write_index(folder, index)
    checkpoint = Checkpoint.open(folder)
    assert HEAD in checkpoint.tensors
    assert [HEAD in note for note in checkpoint.notes] == [True]


def test_a_checkpoint_without_a_tensor_is_refused(tmp_path: Path) -> None:
    folder = checkpoints.write(tmp_path / "t", {"model.safetensors": {}}, checkpoints.config(), index=False)
    refused(folder, "empty")


@pytest.mark.parametrize("make", MAKERS)
def test_files_outside_the_index_are_listed_once_and_change_nothing(
    tmp_path: Path, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make(tmp_path / "t")
    expected = read(folder)
    shards = checkpoints.decoder(quantized=make is checkpoints.fp8)
    everything = {name: tensor for tensors in shards.values() for name, tensor in tensors.items()}
    names = ["consolidated.safetensors", "model-00001-of-00001.safetensors"]
    for name in names:
        checkpoints.write_file(folder / name, {**everything, HEAD: checkpoints.tensor("other", "BF16", 512, 256)})
    os.mkfifo(folder / "zzz.safetensors")  # never opened
    with caplog.at_level(logging.WARNING, "weightcache.checkpoint"):
        assert read(folder) == expected
    assert len(caplog.records) == 1
    assert all(name in caplog.text for name in names)


def test_copies_with_other_bytes_are_refused_with_both_files(tmp_path: Path) -> None:
    shards = checkpoints.decoder()
    shards[FIRST][HEAD] = checkpoints.tensor("other", "BF16", 512, 256)
    folder = checkpoints.write(tmp_path / "t", shards, checkpoints.config())  # the index says the second
    error = refused(folder, "duplicate_tensor")
    assert error.data["files"] == [FIRST, SECOND]
    assert error.data["tensor"] == HEAD


def test_copies_with_another_shape_are_refused(tmp_path: Path) -> None:
    shards = checkpoints.decoder()
    shards[FIRST][HEAD] = shards[SECOND][HEAD]._replace(shape=(256, 512))
    refused(checkpoints.write(tmp_path / "t", shards, checkpoints.config()), "duplicate_tensor")


@pytest.mark.parametrize("owner", checkpoints.SHARDS)
def test_equal_copies_load_and_the_index_says_which(tmp_path: Path, owner: str) -> None:
    expected = read(checkpoints.plain(tmp_path / "once"))
    shards = checkpoints.decoder()
    shards[FIRST][HEAD] = shards[SECOND][HEAD]
    folder = checkpoints.write(tmp_path / "t", shards, checkpoints.config())
    redirect(folder, owner)
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.tensors[HEAD].file == owner
    assert [name for name, _ in checkpoint.read()].count(HEAD) == 1
    assert checkpoint.digest == expected


@pytest.mark.parametrize("equal", [True, False])
def test_copies_without_an_index_are_refused(tmp_path: Path, equal: bool) -> None:
    tensor = checkpoints.tensor("a", "BF16", 4, 4)
    other = tensor if equal else checkpoints.tensor("b", "BF16", 4, 4)
    shards = {"one.safetensors": {"a": tensor}, "two.safetensors": {"a": other}}
    folder = checkpoints.write(tmp_path / "t", shards, checkpoints.config(), index=False)
    assert refused(folder, "duplicate_tensor").data["files"] == ["one.safetensors", "two.safetensors"]


def test_the_order_of_the_folder_and_of_the_index_changes_nothing(tmp_path: Path) -> None:
    folder = checkpoints.plain(tmp_path / "t")
    shuffled = tmp_path / "shuffled"
    shuffled.mkdir()
    for name in (SECOND, FIRST, "config.json"):
        (shuffled / name).write_bytes((folder / name).read_bytes())
    index = json.loads((folder / checkpoints.INDEX).read_text())["weight_map"]
    checkpoints.write_index(shuffled, dict(reversed(index.items())))
    assert list(Checkpoint.open(shuffled).tensors) == list(Checkpoint.open(folder).tensors)
    assert read(shuffled) == read(folder)


def test_reading_gives_what_the_library_gives(tmp_path: Path) -> None:
    folder = checkpoints.plain(tmp_path / "t")
    expected = load_file(folder / FIRST) | load_file(folder / SECOND)
    found = dict(Checkpoint.open(folder).read())
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype
        assert tensor.equal(expected[name])
