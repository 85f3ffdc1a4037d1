"""The remembered digest: when it holds, and what ends it (bug log B18, i to iii)."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.fixtures import checkpoints
from tests.fixtures.checkpoints import rewrite, rewrite_restoring_times

from weightcache import identity
from weightcache.checkpoint import Checkpoint
from weightcache.checkpoint.reader import hash_files
from weightcache.errors import CheckpointError, ConfigError
from weightcache.identity import Identity, digest_of

SHARD = checkpoints.SHARDS[1]


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "identities"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoints.plain(tmp_path / "t")


@pytest.fixture
def digest(folder: Path, state: Path) -> str:
    """The digest of the checkpoint, remembered."""
    return identity.prove(Checkpoint.open(folder), state=state)


def cheaply(path: Path, state: Path) -> Identity:
    """What can be said about a checkpoint too large to hash now."""
    return digest_of(path, hash_limit_bytes=0, state=state)


UNPROVEN = Identity(None, "unproven")


def test_an_unknown_small_checkpoint_is_hashed_once(folder: Path, state: Path) -> None:
    expected = hash_files(Checkpoint.open(folder))
    assert digest_of(folder, state=state) == (expected, "hashed")
    assert digest_of(folder, state=state) == (expected, "remembered")


def test_an_unknown_large_one_is_not(folder: Path, state: Path) -> None:
    size = sum(file.size for file in Checkpoint.open(folder).files)
    assert digest_of(folder, hash_limit_bytes=size - 1, state=state) == UNPROVEN
    assert digest_of(folder, hash_limit_bytes=size, state=state).status == "hashed"


def test_a_digest_from_loading_is_kept(folder: Path, state: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    for _ in checkpoint.read():
        pass
    assert checkpoint.digest is not None
    assert digest_of(checkpoint, hash_limit_bytes=0, state=state) == (checkpoint.digest, "proven")
    assert identity.remember(checkpoint, checkpoint.digest, state=state)
    assert cheaply(folder, state) == (checkpoint.digest, "remembered")
    assert identity.lookup(Checkpoint.open(folder), state=state) == checkpoint.digest


def test_a_remembered_digest_opens_no_weight_file(folder: Path, digest: str, state: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from weightcache.identity import digest_of;"
        "print(digest_of(sys.argv[1], state=Path(sys.argv[2])))"
    )
    traced = subprocess.run(
        ["strace", "-f", "-e", "trace=open,openat", sys.executable, "-c", program, folder, state],
        capture_output=True,
        text=True,
        check=True,
    )
    assert digest in traced.stdout
    assert "config.json" in traced.stderr
    assert ".safetensors" not in traced.stderr


def replace(folder: Path) -> None:
    before = os.stat(folder / SHARD)
    rewrite(folder)
    other = folder / "other"
    other.write_bytes((folder / SHARD).read_bytes())
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.rename(folder / SHARD)


def swap(folder: Path) -> None:
    """The two shards change places."""
    one, two, between = folder / checkpoints.SHARDS[0], folder / SHARD, folder / "between"
    one.rename(between)
    two.rename(one)
    between.rename(two)


def point_index_elsewhere(folder: Path) -> None:
    shards = checkpoints.decoder()
    shards[SHARD]["lm_head.weight"] = checkpoints.tensor("other", "BF16", 512, 256)
    checkpoints.write_file(folder / "other.safetensors", shards[SHARD])
    index = json.loads((folder / checkpoints.INDEX).read_text())["weight_map"]
    other = {tensor: "other.safetensors" if name == SHARD else name for tensor, name in index.items()}
    checkpoints.write_index(folder, other)


CHANGES = [rewrite, rewrite_restoring_times, replace, point_index_elsewhere]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed(folder: Path, digest: str, state: Path, change: Callable[[Path], None]) -> None:
    opened = Checkpoint.open(folder)
    change(folder)
    assert cheaply(folder, state) == UNPROVEN
    again = digest_of(folder, state=state)
    assert again.status == "hashed"
    assert again.digest != digest
    if change is not point_index_elsewhere:  # which leaves the files themselves as they were
        assert identity.lookup(opened, state=state) is None


def test_swapped_shards_are_noticed(folder: Path, digest: str, state: Path) -> None:
    swap(folder)
    assert cheaply(folder, state) == UNPROVEN
    with pytest.raises(CheckpointError) as caught:
        digest_of(folder, state=state)
    assert caught.value.reason == "tensor_missing"


def test_a_folder_replaced_behind_a_link_is_noticed(tmp_path: Path, folder: Path, digest: str, state: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert cheaply(link, state) == (digest, "remembered")
    other = checkpoints.plain(tmp_path / "other")
    rewrite(other)
    link.unlink()
    link.symlink_to(other)
    assert cheaply(link, state) == UNPROVEN
    assert digest_of(link, state=state).digest != digest


def test_a_link_within_the_folder_that_moves_is_noticed(tmp_path: Path, state: Path) -> None:
    folder = checkpoints.plain(tmp_path / "t")
    repository = checkpoints.as_hub_cache(folder, tmp_path / "hub", "a" * 40)
    known = digest_of(repository, state=state)
    rewrite(folder)
    other = tmp_path / "blob"
    other.write_bytes((folder / SHARD).read_bytes())
    link = repository / "snapshots" / ("a" * 40) / SHARD
    link.unlink()
    link.symlink_to(other)
    assert cheaply(repository, state) == UNPROVEN
    assert digest_of(repository, state=state).digest != known.digest


def test_a_new_file_beside_one_without_index_is_noticed(tmp_path: Path, state: Path) -> None:
    tensors = {"model.safetensors": {"a": checkpoints.tensor("a", "BF16", 4, 4)}}
    folder = checkpoints.write(tmp_path / "t", tensors, checkpoints.config(), index=False)
    digest_of(folder, state=state)
    assert cheaply(folder, state).status == "remembered"
    checkpoints.write_file(folder / "more.safetensors", {"b": checkpoints.tensor("b", "BF16", 4, 4)})
    assert cheaply(folder, state) == UNPROVEN


@pytest.mark.parametrize("alone", [True, False])
def test_a_moved_folder_is_known_by_its_files(
    tmp_path: Path, folder: Path, digest: str, state: Path, alone: bool
) -> None:
    moved = folder.rename(tmp_path / "moved")
    if not alone:  # the old place has another model now, which is remembered in its stead
        other = checkpoints.plain(folder)
        rewrite(other)
        assert digest_of(other, state=state).digest != digest
        assert digest_of(moved, state=state).digest == digest
    else:
        assert cheaply(moved, state) == (digest, "remembered")


def test_a_copy_is_not_known_but_has_the_same_digest(tmp_path: Path, digest: str, state: Path) -> None:
    copy = checkpoints.plain(tmp_path / "copy")
    assert cheaply(copy, state) == UNPROVEN
    assert digest_of(copy, state=state) == (digest, "hashed")


def test_absent_files_have_the_last_digest_of_their_folder(folder: Path, digest: str, state: Path) -> None:
    for name in checkpoints.SHARDS:
        (folder / name).unlink()
    assert digest_of(folder, state=state) == (digest, "absent")


def test_an_absent_single_file_too(tmp_path: Path, state: Path) -> None:
    tensors = {"model.safetensors": {"a": checkpoints.tensor("a", "BF16", 4, 4)}}
    folder = checkpoints.write(tmp_path / "t", tensors, checkpoints.config(), index=False)
    known = digest_of(folder, state=state)
    (folder / "model.safetensors").unlink()
    assert digest_of(folder, state=state) == (known.digest, "absent")


@pytest.mark.parametrize("what", ["config", "index", "some left", "elsewhere", "never seen"])
def test_absent_files_have_none_if_anything_contradicts(
    tmp_path: Path, folder: Path, digest: str, state: Path, what: str
) -> None:
    for name in checkpoints.SHARDS:
        (folder / name).unlink()
    if what == "config":
        (folder / "config.json").write_text(json.dumps(checkpoints.config(architectures=["Other"])))
    elif what == "index":
        checkpoints.write_index(folder, {"other": SHARD})
    elif what == "some left":
        checkpoints.write_file(folder / SHARD, checkpoints.decoder()[SHARD])
    elif what == "elsewhere":
        folder = folder.rename(tmp_path / "moved")
    else:
        state = tmp_path / "another"
    assert digest_of(folder, state=state) == UNPROVEN


def test_a_file_that_changed_since_the_preflight_is_not_remembered(folder: Path, state: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    digest = hash_files(checkpoint)
    rewrite(folder)
    assert not identity.remember(checkpoint, digest, state=state)
    assert cheaply(folder, state) == UNPROVEN


def test_a_young_file_is_let_settle_so_that_no_later_write_goes_unseen(folder: Path, state: Path) -> None:
    for _ in range(20):
        rewrite(folder)
        checkpoint = Checkpoint.open(folder)
        assert checkpoint.settled
        digest = identity.prove(checkpoint, state=state)
        assert cheaply(folder, state) == (digest, "remembered")
        rewrite_restoring_times(folder)
        assert cheaply(folder, state) == UNPROVEN


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"digest": 1}', b"\xff" * 100])
def test_a_damaged_memory_is_as_none(folder: Path, digest: str, state: Path, content: bytes) -> None:
    for record in state.iterdir():
        record.write_bytes(content)
    assert cheaply(folder, state) == UNPROVEN
    assert digest_of(folder, state=state) == (digest, "hashed")
    assert cheaply(folder, state) == (digest, "remembered")


def test_memory_does_not_grow_with_every_change(folder: Path, state: Path) -> None:
    for _ in range(5):
        rewrite(folder)
        identity.prove(Checkpoint.open(folder), state=state)
    assert len(list(state.iterdir())) == 2


def test_a_memory_that_others_can_enter_is_refused(folder: Path, digest: str, state: Path) -> None:
    state.chmod(0o755)
    with pytest.raises(ConfigError):
        cheaply(folder, state)


def test_a_memory_that_cannot_be_written_costs_a_hash_and_nothing_else(folder: Path, state: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    state.mkdir(0o700)
    digest = hash_files(checkpoint)
    for name in ("folder", "files"):  # neither can be replaced by a file
        for record in list(state.glob(f"{name}-*")):
            record.unlink()
    identity.remember(checkpoint, digest, state=state)
    for record in list(state.iterdir()):
        record.unlink()
        (record / "in the way").mkdir(parents=True)
    assert not identity.remember(checkpoint, digest, state=state)
    assert digest_of(folder, state=state) == (digest, "hashed")


def test_several_processes_remember_at_once(tmp_path: Path, folder: Path, state: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from weightcache import identity;"
        "[identity.prove(identity.Checkpoint.open(sys.argv[1]), state=Path(sys.argv[2])) for _ in range(20)]"
    )
    state.mkdir(0o700)
    children = [subprocess.Popen([sys.executable, "-c", program, folder, state]) for _ in range(3)]
    seen = {
        cheaply(folder, state).status for _ in itertools.takewhile(lambda _: any_alive(children), itertools.count())
    }
    assert [child.wait() for child in children] == [0, 0, 0]
    assert seen <= {"unproven", "remembered"}
    assert cheaply(folder, state).status == "remembered"


def any_alive(children: list["subprocess.Popen[bytes]"]) -> bool:
    return any(child.poll() is None for child in children)


def test_the_state_folder_is_where_digests_are_kept(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("READMIT_STATE", str(tmp_path / "state"))
    known = digest_of(folder)
    assert known.status == "hashed"
    assert digest_of(folder) == (known.digest, "remembered")
    assert list((tmp_path / "state" / "identities").iterdir())


def test_what_cannot_be_kept_leaves_nothing_unfinished(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(checkpoints.plain(tmp_path / "t"))
    state = tmp_path / "s"
    assert identity.remember(checkpoint, "d", state=state)
    for record in list(state.iterdir()):
        record.unlink()
        record.mkdir()
    before = sorted(state.iterdir())
    assert not identity.remember(checkpoint, "d", state=state)
    assert sorted(state.iterdir()) == before
