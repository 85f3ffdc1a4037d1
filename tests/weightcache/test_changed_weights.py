"""Resident weights and files no longer theirs: nothing attaches that is not proven equal (bug log B05, B18)."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.fixtures import checkpoints
from tests.fixtures.checkpoints import rewrite, rewrite_restoring_times
from tests.fixtures.daemon import running_daemon

from weightcache.errors import CacheMiss
from weightcache.integrations.transformers import from_pretrained
from weightcache.vocabulary import MISS_REASONS

FAIL = dict.fromkeys(MISS_REASONS, "fail")


@pytest.fixture
def socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The socket of a running weight cache daemon."""
    monkeypatch.setenv("READMIT_STATE", str(tmp_path / "state"))
    with running_daemon(tmp_path / "cache" / "cache.sock") as path:
        yield path


def publish(path: Path, socket: Path) -> str:
    _, outcome = from_pretrained(path, mode="client", socket=socket)
    assert outcome.generation is not None, outcome
    return outcome.generation


def attach(path: Path, socket: Path) -> str | None:
    _, outcome = from_pretrained(path, mode="client", socket=socket, policies=FAIL)
    assert outcome.path == "hit"
    return outcome.generation


def miss(path: Path, socket: Path) -> CacheMiss:
    with pytest.raises(CacheMiss) as caught:
        attach(path, socket)
    return caught.value


def replace_behind_link(link: Path) -> None:
    other = checkpoints.plain(link.parent / "other")
    rewrite(other)
    link.unlink()
    link.symlink_to(other)


@pytest.mark.parametrize("change", [rewrite, rewrite_restoring_times, replace_behind_link])
def test_changed_files_do_not_get_the_old_weights(tmp_path: Path, socket: Path, change: Callable[[Path], None]) -> None:
    folder = checkpoints.plain(tmp_path / "t")
    link = tmp_path / "link"
    link.symlink_to(folder)
    generation = publish(link, socket)
    assert attach(link, socket) == generation
    change(link)
    found = miss(link, socket)
    assert (found.reason, found.detail) == ("fingerprint", "checkpoint_digest")


def test_files_put_back_get_their_weights_again(tmp_path: Path, socket: Path) -> None:
    folder = checkpoints.plain(tmp_path / "t")
    generation = publish(folder, socket)
    rewrite(folder)
    miss(folder, socket)
    rewrite(folder)
    assert attach(folder, socket) == generation


def test_a_moved_copy_gets_the_same_weights(tmp_path: Path, socket: Path) -> None:
    generation = publish(checkpoints.plain(tmp_path / "t"), socket)
    assert attach(checkpoints.plain(tmp_path / "copy"), socket) == generation


def test_weights_outlive_the_files_they_came_from(tmp_path: Path, socket: Path) -> None:
    folder = checkpoints.plain(tmp_path / "t")
    generation = publish(folder, socket)
    for name in checkpoints.SHARDS:
        (folder / name).unlink()
    assert attach(folder, socket) == generation


def test_a_ref_that_moved_is_another_revision_and_the_old_weights_stay(tmp_path: Path, socket: Path) -> None:
    folder = checkpoints.plain(tmp_path / "t")
    repository = checkpoints.as_hub_cache(folder, tmp_path / "hub", "a" * 40)
    generation = publish(repository, socket)
    checkpoints.as_hub_cache(folder, tmp_path / "hub", "c" * 40)
    found = miss(repository, socket)
    assert (found.reason, found.detail) == ("fingerprint", "revision")
    assert attach(repository / "snapshots" / ("a" * 40), socket) == generation
