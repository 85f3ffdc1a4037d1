"""The keeper's control socket: what it does with what it should not get."""

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from weightcache.errors import ConfigError
from weightcache.keeper.control import ControlServer, ask
from weightcache.keeper.loop import Loop


def answer(request: dict[str, Any]) -> dict[str, Any]:
    if request == {"fail": True}:
        raise ValueError("it cannot be done")
    return {"echo": request}


@pytest.fixture
def runtime_dir(tmp_path: Path) -> Iterator[Path]:
    loop = Loop()
    server = ControlServer(loop, tmp_path / "keeper.sock", answer)
    thread = threading.Thread(target=loop.run)
    thread.start()
    yield tmp_path
    loop.stop()
    with socket.socket(socket.AF_UNIX) as wake:
        wake.connect(str(tmp_path / "keeper.sock"))
    thread.join(60)
    server.close()
    loop.close()
    assert not (tmp_path / "keeper.sock").exists()


def talk(runtime_dir: Path, *parts: bytes) -> list[dict[str, Any]]:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(runtime_dir / "keeper.sock"))
        for part in parts:
            client.sendall(part)
        client.shutdown(socket.SHUT_WR)
        with client.makefile("rb") as lines:
            return [json.loads(line) for line in lines]


def test_each_line_gets_an_answer_however_it_was_cut(runtime_dir: Path) -> None:
    assert talk(runtime_dir, b'{"a": 1}\n{"b"', b": 2}\n") == [{"echo": {"a": 1}}, {"echo": {"b": 2}}]


@pytest.mark.parametrize("line", [b"not json\n", b"[1]\n", b"\xff\xfe\n", b'{"fail": true}\n'])
def test_bad_requests_are_answered_and_hurt_nobody(runtime_dir: Path, line: bytes) -> None:
    (first, second) = talk(runtime_dir, line, b'{"a": 1}\n')
    assert "error" in first
    assert second == {"echo": {"a": 1}}


def test_a_line_without_end_is_hung_up_on(runtime_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(runtime_dir / "keeper.sock"))
        client.settimeout(60)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):  # noqa: PT012 - whichever send meets it
            while True:
                client.sendall(b"x" * 65536)
    assert ask(runtime_dir, {"a": 1}) == {"echo": {"a": 1}}


def test_a_refusal_and_an_absence_are_errors_with_reasons(runtime_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the keeper refused") as refused:
        ask(runtime_dir, {"fail": True})
    assert "it cannot be done" in str(refused.value)
    with pytest.raises(ConfigError) as absent:
        ask(tmp_path / "elsewhere", {"status": True})
    assert absent.value.reason == "no_keeper"
    assert "readmit up" in str(absent.value)
