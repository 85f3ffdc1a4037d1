"""Which folder a path means: hub caches, dangling links, a ref that moved (bug log B05), and folders that are none."""

import json
from pathlib import Path

import pytest
from tests.fixtures import checkpoints

from weightcache import identity
from weightcache.checkpoint import Checkpoint
from weightcache.errors import CheckpointError
from weightcache.fingerprint import CacheConfig

COMPLETE, EMPTY = "a" * 40, "b" * 40


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A hub cache with two commits, one complete, one with its config only; ``refs/main`` names the second."""
    folder = checkpoints.plain(tmp_path / "t")
    repository = checkpoints.as_hub_cache(folder, tmp_path / "hub", COMPLETE)
    snapshot = repository / "snapshots" / EMPTY
    snapshot.mkdir()
    (snapshot / "config.json").symlink_to(Path("..", "..", "blobs", f"{COMPLETE}-config.json"))
    (repository / "refs" / "main").write_text(EMPTY)
    return repository


def refused(folder: Path | str, reason: str, revision: str | None = None) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder, revision)
    assert caught.value.reason == reason, str(caught.value)
    return caught.value


def fingerprint(checkpoint: Checkpoint) -> CacheConfig:
    for _ in checkpoint.read():
        pass
    own = {"engine": "e", "layout_id": "1", "dtype": "bfloat16", "torch_version": "2"}
    return CacheConfig.from_dict({**identity.fields_of(checkpoint, checkpoint.digest), **own})


def test_a_commit_opens_and_is_the_revision(repository: Path) -> None:
    assert Checkpoint.open(repository, COMPLETE).revision == COMPLETE
    assert Checkpoint.open(repository / "snapshots" / COMPLETE).revision == COMPLETE


def test_a_ref_opens_the_snapshot_it_names_and_the_commit_is_the_revision(repository: Path) -> None:
    (repository / "refs" / "pr").mkdir()
    (repository / "refs" / "pr" / "1").write_text(f"{COMPLETE}\n")
    assert Checkpoint.open(repository, "pr/1").revision == COMPLETE


@pytest.mark.parametrize("revision", [None, "main", EMPTY])
def test_a_snapshot_without_weights_is_not_replaced_by_another(repository: Path, revision: str | None) -> None:
    assert EMPTY in str(refused(repository, "revision_missing", revision))


@pytest.mark.parametrize("revision", ["v2", "c" * 40, "../../etc", "/etc"])
def test_an_unknown_revision_is_refused_and_the_known_are_listed(repository: Path, revision: str) -> None:
    error = refused(repository, "revision_missing", revision)
    assert revision in str(error)
    assert COMPLETE in str(error)


def test_a_ref_that_leaves_the_cache_is_refused(repository: Path) -> None:
    (repository / "refs" / "main").write_text("../../../t")
    refused(repository, "revision_missing")


def test_a_snapshot_is_not_passed_off_as_another_revision(repository: Path) -> None:
    snapshot = repository / "snapshots" / COMPLETE
    assert Checkpoint.open(snapshot, COMPLETE).revision == COMPLETE
    refused(snapshot, "revision_missing", "main")


def test_a_plain_folder_has_no_revision(tmp_path: Path) -> None:
    folder = checkpoints.plain(tmp_path / "t")
    assert Checkpoint.open(folder).revision is None
    refused(folder, "revision_missing", "main")


def test_a_folder_that_happens_to_lie_below_snapshots_has_none_either(tmp_path: Path) -> None:
    assert Checkpoint.open(checkpoints.plain(tmp_path / "snapshots" / "t")).revision is None


def test_a_dangling_link_is_named_with_its_target(repository: Path) -> None:
    blob = repository / "blobs" / f"{COMPLETE}-{checkpoints.SHARDS[1]}"
    blob.unlink()
    error = refused(repository, "link_dangling", COMPLETE)
    assert checkpoints.SHARDS[1] in str(error)
    assert blob.name in str(error)


@pytest.mark.parametrize("name", ["config.json", checkpoints.INDEX])
def test_a_dangling_settings_file_is_named(repository: Path, name: str) -> None:
    (repository / "blobs" / f"{COMPLETE}-{name}").unlink()
    assert name in str(refused(repository, "link_dangling", COMPLETE))


def test_a_copy_of_the_cache_without_blobs_says_so(repository: Path) -> None:
    for blob in (repository / "blobs").iterdir():
        if blob.name.endswith(".safetensors"):
            blob.unlink()
    error = refused(repository, "link_dangling", COMPLETE)
    assert all(name in error.data["links"] for name in checkpoints.SHARDS)


def test_a_second_link_gives_the_same_fingerprint(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "x").symlink_to(repository / "snapshots" / COMPLETE)
    direct, linked = (
        fingerprint(Checkpoint.open(repository, COMPLETE)), fingerprint(Checkpoint.open(tmp_path / "x"))
    )  # fmt: skip
    assert linked.revision == COMPLETE
    assert linked.differences(direct) == []
    assert linked.key() == direct.key()


def test_a_moved_ref_is_another_revision(repository: Path, tmp_path: Path) -> None:
    (repository / "refs" / "main").write_text(COMPLETE)
    resident = fingerprint(Checkpoint.open(repository, "main"))
    checkpoints.as_hub_cache(tmp_path / "t", tmp_path / "hub", "c" * 40)  # the same files, committed again
    wanted = fingerprint(Checkpoint.open(repository, "main"))
    assert [difference.field for difference in wanted.differences(resident)] == ["revision"]


def test_a_link_moved_during_use_does_not_mix_two_models(tmp_path: Path) -> None:
    one = checkpoints.plain(tmp_path / "one")
    two = checkpoints.write(tmp_path / "two", checkpoints.decoder(prefix="other"), checkpoints.config())
    link = tmp_path / "link"
    link.symlink_to(one)
    checkpoint = Checkpoint.open(link)
    link.unlink()
    link.symlink_to(two)
    assert {name for name, _ in checkpoint.read()} == set(Checkpoint.open(one).tensors)


def test_a_repository_is_found_by_name(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(repository.parent))
    assert Checkpoint.open("org/decoder", COMPLETE).revision == COMPLETE
    refused("org/other", "folder_missing")


def test_no_folder(tmp_path: Path) -> None:
    refused(tmp_path / "none", "folder_missing")
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "folder_missing")
    refused(f"{tmp_path}/a\0b", "folder_missing")
    (tmp_path / "link").symlink_to(tmp_path / "none")
    assert str(tmp_path / "none") in str(refused(tmp_path / "link", "link_dangling"))
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    refused(tmp_path / "loop", "link_dangling")


def test_no_config(tmp_path: Path) -> None:
    folder = checkpoints.plain(tmp_path / "t")
    (folder / "config.json").unlink()
    refused(folder, "config_missing")
    (folder / "config.json").mkdir()
    refused(folder, "config_missing")


@pytest.mark.parametrize("text", ["", "[]", "null", "{", '{"a": 1, "a": 2}', '{"a":' * 5000, "[" * 100_000])
def test_a_config_that_is_none(tmp_path: Path, text: str) -> None:
    folder = checkpoints.plain(tmp_path / "t")
    (folder / "config.json").write_text(text)
    refused(folder, "config_invalid")


def test_a_config_nested_too_deeply(tmp_path: Path) -> None:
    folder = checkpoints.plain(tmp_path / "t")
    (folder / "config.json").write_text('{"a":' * 200 + "1" + "}" * 200)
    refused(folder, "config_invalid")


def test_no_weights(tmp_path: Path) -> None:
    folder = tmp_path / "t"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(checkpoints.config()))
    refused(folder, "shard_missing")


@pytest.mark.parametrize("name", [checkpoints.SHARDS[0], checkpoints.INDEX, "config.json"])
def test_a_link_to_itself_leads_nowhere(tmp_path: Path, name: str) -> None:
    folder = checkpoints.plain(tmp_path / "t")
    (folder / name).unlink()
    (folder / name).symlink_to(name)
    assert name in str(refused(folder, "link_dangling"))


def test_what_the_system_refuses_is_said_in_its_words(tmp_path: Path) -> None:
    folder = checkpoints.plain(tmp_path / "t")
    (folder / checkpoints.SHARDS[0]).unlink()
    (folder / checkpoints.SHARDS[0]).symlink_to("/proc/self/mem")  # a file, to whoever does not read it
    assert "Input/output error" in str(refused(folder, "unreadable"))
