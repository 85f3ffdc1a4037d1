"""Where an engine's model lies, and whether its files stayed as they were."""

from pathlib import Path

import pytest
from tests.fixtures import checkpoints

from weightcache.errors import CheckpointError
from weightcache.integrations.model_folder import digest_before, model_folder, require_unchanged


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("READMIT_STATE", str(tmp_path / "state"))


def nobody() -> None:
    raise AssertionError("a folder is downloaded by nobody")


def test_a_folder_is_itself_whatever_revision_is_asked_for(tmp_path: Path) -> None:
    model = checkpoints.plain(tmp_path / "model")
    assert model_folder(str(model), "v2", None, nobody).root == str(model)


@pytest.mark.parametrize(("revision", "commit"), [(None, "a" * 40), ("b" * 40, "b" * 40), ("v2", "b" * 40)])
def test_a_name_is_the_snapshot_of_its_revision_once_it_is_downloaded(
    tmp_path: Path, revision: str | None, commit: str
) -> None:
    repository = tmp_path / "hub" / "models--org--tiny"

    def download() -> None:
        for each in ("a" * 40, "b" * 40):
            checkpoints.plain(repository / "snapshots" / each)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("a" * 40)
        (repository / "refs" / "v2").write_text("b" * 40)

    folder = model_folder("org/tiny", revision, str(tmp_path / "hub"), download)
    assert (folder.root, folder.revision) == (str(repository / "snapshots" / commit), commit)


def test_files_that_change_meanwhile_are_an_error_and_what_nobody_knew_is_none(tmp_path: Path) -> None:
    model = checkpoints.plain(tmp_path / "model")
    folder = model_folder(str(model), None, None, nobody)
    before = digest_before(folder, shared=True)
    require_unchanged(folder, before)
    shard = model / checkpoints.SHARDS[0]
    data = shard.read_bytes()
    shard.write_bytes(data[:-2] + b"\x11\x22")
    with pytest.raises(CheckpointError) as refused:
        require_unchanged(folder, before)
    assert refused.value.reason == "changed"
    require_unchanged(folder, None)
