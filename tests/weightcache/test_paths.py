"""Where things live, and that nobody else can have put theirs there."""

import os
from pathlib import Path

import pytest

from weightcache import paths
from weightcache.errors import ConfigError


def test_folders_by_the_environment_and_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(**environ: str) -> tuple[str, str, str, str]:
        runtime, state = paths.runtime_dir(environ, create=False), paths.state_dir(environ, create=False)
        return str(runtime), str(state), str(paths.socket_path(environ)), str(paths.journal_path(environ))

    monkeypatch.setenv("HOME", "/home/me")
    default = f"/tmp/readmit-{os.geteuid()}"
    state = "/home/me/.local/state/readmit"
    assert found() == (default, state, f"{default}/cache.sock", f"{state}/journal.sqlite3")
    assert found(XDG_RUNTIME_DIR="/run/user/7")[0] == "/run/user/7/readmit"
    assert found(XDG_RUNTIME_DIR="/run/user/7", READMIT_RUNTIME="/r")[0] == "/r"
    assert found(XDG_STATE_HOME="/x")[1] == "/x/readmit"
    assert found(READMIT_STATE="/s")[3] == "/s/journal.sqlite3"
    assert found(WEIGHTCACHE_SOCKET="/c.sock", READMIT_JOURNAL="/j")[2:] == ("/c.sock", "/j")


def test_a_folder_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = paths.runtime_dir({"READMIT_RUNTIME": str(tmp_path / "a" / "b")})
    finally:
        os.umask(before)
    assert made.stat().st_mode & 0o777 == 0o700
    assert paths.private_dir(made) == made


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o701, 0o777])
def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(ConfigError) as caught:
        paths.private_dir(tmp_path)
    assert caught.value.reason == "not_private"
    assert f"expected mode 0700, found mode {mode:04o}" in str(caught.value)


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    with pytest.raises(ConfigError) as caught:
        paths.private_dir(tmp_path)
    assert caught.value.reason == "not_private"
    assert f"expected owner uid {mine + 1}, found uid {mine}" in str(caught.value)


def test_a_place_where_no_folder_can_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as caught:
        paths.private_dir(tmp_path / "file" / "r")
    assert caught.value.reason == "path"
    assert str(tmp_path / "file" / "r") in str(caught.value)


def test_the_kernel_takes_107_bytes_of_a_sockets_path() -> None:
    longest = Path("/" + "x" * 106)
    assert paths.checked_socket_path(longest) == longest
    with pytest.raises(ConfigError) as caught:
        paths.checked_socket_path(Path("/" + "ü" * 54))
    assert (caught.value.reason, caught.value.data["length"], caught.value.data["limit"]) == ("path_too_long", 109, 107)
