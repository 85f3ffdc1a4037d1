"""Who an engine is, whether it lives, and whether it is the one that listens."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from tests.readmit.gate.harness import ScriptedEngine, ending, until

from readmit.gate.process import Engine, listener


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "1000"])
    yield process
    process.kill()
    process.wait()


def engine_of(pid: int) -> Engine:
    engine = Engine.of(pid)
    assert engine is not None
    return engine


def test_a_process_is_its_pid_and_its_start_time(sleeper: subprocess.Popen[bytes]) -> None:
    engine = engine_of(sleeper.pid)
    assert engine.alive
    assert not engine._replace(start_ticks=engine.start_ticks + 1).alive


def test_a_process_that_nobody_has_reaped_is_dead(sleeper: subprocess.Popen[bytes]) -> None:
    engine = engine_of(sleeper.pid)
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert not engine.alive
    assert Engine.of(sleeper.pid) is None


async def test_a_watch_tells_of_the_end(sleeper: subprocess.Popen[bytes]) -> None:
    gone = asyncio.Event()
    with engine_of(sleeper.pid).watched(gone.set):
        await asyncio.sleep(0.05)
        assert not gone.is_set()
        sleeper.send_signal(signal.SIGKILL)
        await asyncio.wait_for(gone.wait(), 30)


async def test_a_watch_of_a_dead_process_tells_at_once(sleeper: subprocess.Popen[bytes]) -> None:
    engine = engine_of(sleeper.pid)
    sleeper.kill()
    sleeper.wait()
    gone = asyncio.Event()
    with engine.watched(gone.set):
        await asyncio.wait_for(gone.wait(), 30)


async def test_a_watch_of_another_process_with_that_pid_tells_at_once(sleeper: subprocess.Popen[bytes]) -> None:
    before = engine_of(sleeper.pid)._replace(start_ticks=1)
    gone = asyncio.Event()
    with before.watched(gone.set):
        await asyncio.wait_for(gone.wait(), 30)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_the_listener_is_told_from_a_bystander(sleeper: subprocess.Popen[bytes], host: str) -> None:
    engine = ScriptedEngine()
    with ending(engine):
        assert engine_of(engine.pid).listens("127.0.0.1" if host == "0.0.0.0" else host, engine.port) is True
        assert engine_of(sleeper.pid).listens("127.0.0.1", engine.port) is False
        assert listener("127.0.0.1", engine.port) == engine_of(engine.pid)


def test_a_port_where_nobody_listens_says_nothing(sleeper: subprocess.Popen[bytes]) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        assert engine_of(sleeper.pid).listens("127.0.0.1", port) is None
        assert listener("127.0.0.1", port) is None


def test_a_child_listens_for_its_parent() -> None:
    script = (
        "import os, socket, sys, time\n"
        "listener = socket.create_server(('127.0.0.1', 0))\n"
        "if os.fork():\n"
        "    listener.close(); time.sleep(1000)\n"
        "print(listener.getsockname()[1], os.getpid(), flush=True); time.sleep(1000)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    port, child = map(int, parent.stdout.readline().split())
    try:
        assert until(lambda: engine_of(parent.pid).listens("127.0.0.1", port), "the parent to close its socket")
        assert engine_of(child).listens("127.0.0.1", port) is True
    finally:
        os.kill(child, signal.SIGKILL)
        parent.kill()
        parent.wait()
        parent.stdout.close()


def test_one_of_two_that_share_a_port_is_not_the_listener() -> None:
    with socket.socket() as ours:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        ours.bind(("127.0.0.1", 0))
        ours.listen()
        port = ours.getsockname()[1]
        script = (
            "import socket, sys, time\n"
            "s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)\n"
            f"s.bind(('127.0.0.1', {port})); s.listen(); print('up', flush=True); time.sleep(1000)\n"
        )
        other = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        assert other.stdout is not None
        try:
            assert other.stdout.readline() == "up\n"
            assert engine_of(other.pid).listens("127.0.0.1", port) is False
        finally:
            other.kill()
            other.wait()
            other.stdout.close()
