"""A lock file is held by one process, says by whom, and outlives being removed."""

import os
from pathlib import Path

import pytest

from weightcache.lock_file import Held, hold


def test_a_second_holder_is_told_of_the_first_and_waits_for_nobody(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = hold(path, "a long name")
    with pytest.raises(Held, match=r"\Aa long name\Z"):
        hold(path, "another")
    os.close(first)
    second = hold(path, "short")
    assert path.read_text() == "short\n"
    with pytest.raises(Held, match=r"\Ashort\Z"):
        hold(path, "a third")
    os.close(second)


def test_nobody_holds_a_file_that_was_removed_before_it_was_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock"
    opened = os.open

    def open_and_lose(*arguments: object) -> int:
        monkeypatch.undo()
        descriptor = opened(*arguments)  # type: ignore[arg-type]
        path.unlink()
        return descriptor

    monkeypatch.setattr(os, "open", open_and_lose)
    descriptor = hold(path, "us")
    assert os.fstat(descriptor).st_ino == path.stat().st_ino
    os.close(descriptor)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        hold(tmp_path / "lock", "us")
    assert not (tmp_path / "elsewhere").exists()
