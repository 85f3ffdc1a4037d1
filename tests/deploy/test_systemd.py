"""The systemd units: their syntax, and that they keep the promises of the design."""

import configparser
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from weightcache.sdnotify import STORE_MAX

UNITS = sorted((Path(__file__).parents[2] / "deploy" / "systemd").glob("*.service"))


def read(unit: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=True, interpolation=None, delimiters=("=",), comment_prefixes=("#",))
    parser.optionxform = str  # type: ignore[assignment]  # names of settings have capitals
    parser.read_string(unit.read_text())
    return parser


def unit(name: str) -> configparser.SectionProxy:
    return read(next(path for path in UNITS if path.stem == name))["Service"]


def test_there_is_a_unit_for_each_part() -> None:
    assert [path.stem for path in UNITS] == ["readmit-cache", "readmit-engines", "readmit-gate"]


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_every_unit_is_restarted_for_ever_and_notifies(path: Path) -> None:
    sections = read(path)
    assert sections["Unit"]["StartLimitIntervalSec"] == "0"
    service = sections["Service"]
    assert (service["Type"], service["NotifyAccess"], service["Restart"]) == ("notify", "main", "always")
    assert (service["RuntimeDirectoryMode"], service["StateDirectoryMode"]) == ("0700", "0700")


def test_weights_survive_their_daemon_and_their_engines() -> None:
    cache, engines = unit("readmit-cache"), unit("readmit-engines")
    assert int(cache["FileDescriptorStoreMax"]) == STORE_MAX
    assert cache["OOMPolicy"] == engines["OOMPolicy"] == "continue"
    assert "engine" not in cache["ExecStart"]
    assert engines["KillMode"] == "process", "a keeper's death must not take its engines along"
    assert "Requires" not in read(UNITS[1])["Unit"]


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_who_stands_still_is_replaced(path: Path) -> None:
    assert int(read(path)["Service"]["WatchdogSec"]) > 0


def test_weights_outlast_a_stop_only_where_systemd_knows_how() -> None:
    assert "FileDescriptorStorePreserve" not in unit("readmit-cache")
    (drop_in,) = (UNITS[0].parent / "254").rglob("*.conf")
    assert drop_in.parent.name == "readmit-cache.service.d"
    assert dict(read(drop_in)["Service"]) == {"FileDescriptorStorePreserve": "yes"}


@pytest.mark.parametrize(
    ("path", "setting"),
    [*((path, "ExecStart") for path in UNITS), (UNITS[1], "ExecReload")],
    ids=lambda it: it if isinstance(it, str) else it.stem,
)
def test_the_commands_exist(path: Path, setting: str) -> None:
    program, *words = read(path)["Service"][setting].replace("$CACHE_OPTIONS", "").split()
    assert program == "/opt/readmit/bin/readmit"
    command = [word for word in words[:2] if word in ("up", "gate", "cache", "serve", "restart")]
    options = {word for word in words if word.startswith("--")}
    shown = subprocess.run(
        [sys.executable, "-m", "readmit.cli", *command, "--help"], check=True, capture_output=True, text=True
    ).stdout
    assert all(option in shown for option in options)


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_systemd_itself_takes_them_where_it_is_installed(path: Path, tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    copies = [tmp_path / other.name for other in UNITS]
    for other, copy in zip(UNITS, copies, strict=True):
        text = other.read_text().replace("/opt/readmit/bin/readmit", sys.executable)
        copy.write_text(text.replace("User=readmit", "User=root"))
    if analyze is not None:
        command = [analyze, "verify", "--man=no", "--recursive-errors=one", str(tmp_path / path.name)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (result.returncode, result.stderr) == (0, "")
