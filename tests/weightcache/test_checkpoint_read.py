"""Reading a checkpoint: once, into private memory, with its digest on the way; and files that change meanwhile."""

import os
from pathlib import Path

import pytest
import torch
from tests.fixtures import checkpoints

from weightcache.checkpoint import Checkpoint, reader
from weightcache.checkpoint.reader import CHUNK_BYTES, hash_files
from weightcache.digest import TensorDigest, checkpoint_digest, tensor_digest
from weightcache.errors import CheckpointError

SHARD = checkpoints.SHARDS[1]


def digest(folder: Path) -> str:
    return hash_files(Checkpoint.open(folder))


def test_the_digest_is_known_after_the_last_tensor_only(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(checkpoints.plain(tmp_path / "t"))
    tensors = checkpoint.read()
    for _ in range(len(checkpoint.tensors)):
        assert checkpoint.digest is None
        next(tensors)
    assert next(tensors, None) is None
    assert checkpoint.digest is not None


def test_loading_hashing_and_the_tensors_alone_give_one_digest(tmp_path: Path) -> None:
    folder = checkpoints.fp8(tmp_path / "t")
    loading = Checkpoint.open(folder)
    tensors = dict(loading.read())
    alone = (
        TensorDigest(name, info.dtype, info.shape, tensor_digest(tensors[name]))
        for name, info in reversed(loading.tensors.items())
    )
    assert loading.digest == digest(folder) == checkpoint_digest(alone)


def test_the_digest_is_of_the_contents_not_of_the_files(tmp_path: Path) -> None:
    shards = checkpoints.decoder()
    everything = {name: tensor for tensors in shards.values() for name, tensor in reversed(tensors.items())}
    one = checkpoints.write(tmp_path / "one", {"model.safetensors": everything}, checkpoints.config(), index=False)
    assert digest(one) == digest(checkpoints.plain(tmp_path / "two"))


@pytest.mark.parametrize("what", ["name", "dtype", "shape", "bytes", "fewer"])
def test_every_part_of_a_tensor_counts(tmp_path: Path, what: str) -> None:
    shards = checkpoints.decoder()
    tensors = shards[SHARD]
    head = tensors.pop("lm_head.weight")
    if what == "name":
        tensors["lm_head2.weight"] = head
    elif what == "dtype":
        tensors["lm_head.weight"] = head._replace(dtype="F16")
    elif what == "shape":
        tensors["lm_head.weight"] = head._replace(shape=(256, 512))
    elif what == "fewer":
        tensors["lm_head.weight"] = head
        del tensors["model.norm.weight"]
    elif what == "bytes":
        tensors["lm_head.weight"] = head._replace(data=head.data[:-1] + bytes([head.data[-1] ^ 1]))
    assert digest(checkpoints.write(tmp_path / "other", shards, checkpoints.config())) != digest(
        checkpoints.plain(tmp_path / "t")
    )


def test_swapped_tensors_count(tmp_path: Path) -> None:
    shards = checkpoints.decoder()
    q, k = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"
    shards[SHARD][q], shards[SHARD][k] = shards[SHARD][k], shards[SHARD][q]
    assert digest(checkpoints.write(tmp_path / "other", shards, checkpoints.config())) != digest(
        checkpoints.plain(tmp_path / "t")
    )


def test_a_tensor_longer_than_a_chunk_is_read_whole(tmp_path: Path) -> None:
    shape = (3, CHUNK_BYTES // 2 + 5)
    generator = torch.Generator().manual_seed(checkpoints.SEED)
    expected = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    large = checkpoints.Tensor("U8", shape, expected.numpy().tobytes())
    folder = checkpoints.write(tmp_path / "t", {"model.safetensors": {"a": large}}, checkpoints.config(), index=False)
    checkpoint = Checkpoint.open(folder)
    ((_, tensor),) = checkpoint.read()
    assert tensor.equal(expected)
    assert checkpoint.digest == digest(folder)


def test_tensors_are_private_and_outlive_the_files(tmp_path: Path) -> None:
    folder = checkpoints.plain(tmp_path / "t")
    tensors = dict(Checkpoint.open(folder).read())
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    assert len(storages) == len(tensors)
    before = tensors["lm_head.weight"].clone()
    (folder / SHARD).write_bytes(bytes((folder / SHARD).stat().st_size))
    assert tensors["lm_head.weight"].equal(before)


def test_a_file_replaced_after_the_preflight_is_refused(tmp_path: Path) -> None:
    folder = checkpoints.plain(tmp_path / "t")
    checkpoint = Checkpoint.open(folder)
    stamps = os.stat(folder / SHARD)
    (folder / SHARD).write_bytes((folder / SHARD).read_bytes())
    os.utime(folder / SHARD, ns=(stamps.st_atime_ns, stamps.st_mtime_ns))
    with pytest.raises(CheckpointError) as caught:
        list(checkpoint.read())
    assert caught.value.reason == "changed"
    assert checkpoint.digest is None


@pytest.mark.parametrize(("keep", "reason"), [(1000, "truncated"), (None, "changed")])
def test_a_file_written_during_the_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int | None, reason: str
) -> None:
    monkeypatch.setattr(reader, "AHEAD_BYTES", 0)
    folder = checkpoints.plain(tmp_path / "t")
    checkpoint = Checkpoint.open(folder)
    reading = checkpoint.read()
    while checkpoint.tensors[next(reading)[0]].file != SHARD:
        pass
    with open(folder / SHARD, "r+b") as shard:
        if keep is None:
            shard.write(b"\0")
        else:
            shard.truncate(keep)
    with pytest.raises(CheckpointError) as caught:
        list(reading)
    assert caught.value.reason == reason
    assert SHARD in str(caught.value)


def test_a_file_that_vanishes_is_refused(tmp_path: Path) -> None:
    folder = checkpoints.plain(tmp_path / "t")
    checkpoint = Checkpoint.open(folder)
    (folder / SHARD).unlink()
    with pytest.raises(CheckpointError) as caught:
        list(checkpoint.read())
    assert caught.value.reason == "unreadable"


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    folder = checkpoints.plain(tmp_path / "t")
    before = len(os.listdir("/proc/self/fd"))
    checkpoint = Checkpoint.open(folder)
    half = checkpoint.read()
    next(half)
    half.close()
    (folder / SHARD).write_bytes(b"short")
    with pytest.raises(CheckpointError):
        Checkpoint.open(folder)
    with pytest.raises(CheckpointError):
        list(checkpoint.read())
    assert len(os.listdir("/proc/self/fd")) == before


def test_progress_is_in_bytes_and_ends_at_all_of_them(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(checkpoints.plain(tmp_path / "t"))
    seen: list[int] = []
    hash_files(checkpoint, seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == checkpoint.total_bytes


def test_a_preflight_imports_neither_torch_nor_the_library(tmp_path: Path) -> None:
    folder = checkpoints.plain(tmp_path / "t")
    program = (
        "import sys; from weightcache.checkpoint import Checkpoint;"
        f"Checkpoint.open({str(folder)!r}); print(sorted({{'torch', 'safetensors', 'blake3'}} & set(sys.modules)))"
    )
    assert os.popen(f'{__import__("sys").executable} -c "{program}"').read().strip() == "[]"
