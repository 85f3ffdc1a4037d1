"""Shared memory and sockets that killed engines leave behind: what is removed, and everything that is not."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from tests.weightcache.keeper import harness
from tests.weightcache.keeper.harness import PATIENCE_S, Node, wait_for

from weightcache.keeper.litter import FOLDER, Litter
from weightcache.keeper.loop import Loop
from weightcache.keeper.segment_watch import SegmentWatch

HOLDER = """
import mmap, os, sys
for path in sys.argv[1:]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(descriptor, 4096)
    globals()[path] = mmap.mmap(descriptor, 4096)
print("mapped", flush=True)
input()
"""

BINDER = """
import socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("bound", flush=True)
input()
"""

MAKER = """
import multiprocessing
lock = multiprocessing.get_context("spawn").Lock()
print(lock._semlock.name, flush=True)
input()
"""

WITHOUT_TICKS = """
import sys
import weightcache.keeper.keeper as keeper
from weightcache.keeper.__main__ import main
keeper.TICK_S = 1e6
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose name leaves room for a socket's: its path has 107 characters at most."""
    with tempfile.TemporaryDirectory(prefix="litter-") as folder:
        yield Path(folder)


@pytest.fixture
def names() -> Iterator[list[Path]]:
    token = os.urandom(4).hex()
    paths = [FOLDER / f"psm_{token}", FOLDER / f"vllm_{token}-[0-1]-cpushm-0", FOLDER / f"somebodys-{token}"]
    yield paths
    for path in paths:
        path.unlink(missing_ok=True)


def hold(*paths: Path) -> subprocess.Popen[str]:
    """A process in a session of its own that maps files."""
    command = [sys.executable, "-c", HOLDER, *map(str, paths)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "mapped\n"
    return holder


def bind(path: Path, **options: Any) -> subprocess.Popen[str]:
    """A process in a session of its own that listens on a socket."""
    command = [sys.executable, "-c", BINDER, str(path)]
    streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    binder = subprocess.Popen(command, start_new_session=True, **streams, **options)
    assert binder.stdout is not None
    assert binder.stdout.readline() == "bound\n"
    return binder


def end(holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.communicate()


def test_what_the_dead_mapped_is_removed_and_what_only_looks_like_it_is_not(names: list[Path]) -> None:
    stranger = FOLDER / f"psm_{os.urandom(4).hex()}"
    stranger.touch()
    litter = Litter()
    holder = hold(*names)
    litter.note(holder.pid)
    end(holder)
    assert litter.clear() == sorted(path.name for path in names[:2])
    assert [path.exists() for path in (*names, stranger)] == [False, False, True, True]
    stranger.unlink()


def test_what_somebody_else_maps_stays(names: list[Path]) -> None:
    litter = Litter()
    holder, other = hold(*names), hold(names[0])
    litter.note(holder.pid)
    end(holder)
    try:
        assert litter.clear() == [names[1].name]
        assert names[0].exists()
    finally:
        end(other)


def test_another_file_of_the_same_name_stays(names: list[Path]) -> None:
    litter = Litter()
    holder = hold(names[0])
    litter.note(holder.pid)
    end(holder)
    names[0].rename(names[1])  # keeps the inode from being given to the next file
    names[0].touch()
    assert litter.clear() == []
    assert names[0].exists()


def test_a_semaphore_is_found_though_its_maker_maps_it_under_another_name() -> None:
    maker = subprocess.Popen(
        [sys.executable, "-c", MAKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert maker.stdout is not None
    name = "sem." + maker.stdout.readline().strip().lstrip("/")
    assert (FOLDER / name).exists()
    litter = Litter()
    litter.note(maker.pid)
    os.killpg(maker.pid, signal.SIGKILL)  # with its resource tracker, as a keeper clears a session
    maker.communicate()
    assert litter.clear() == [name]
    assert not (FOLDER / name).exists()


def test_what_nobody_noted_stays(names: list[Path]) -> None:
    holder = hold(*names)
    end(holder)
    assert Litter().clear() == []
    assert names[0].exists()


def test_a_socket_of_the_dead_is_removed_and_no_other(short: Path) -> None:
    ours, theirs, unnoted = (short / str(uuid4()) for _ in range(3))
    named = short / "api.sock"
    litter = Litter()
    binder, other, strange = bind(ours), bind(theirs), bind(named)
    for holder in (binder, strange):
        litter.note(holder.pid)
    end(bind(unnoted))
    for holder in (binder, strange):
        end(holder)
    assert litter.clear() == [str(ours)]
    assert sorted(short.iterdir()) == sorted([theirs, unnoted, named])
    end(other)


def test_a_socket_that_somebody_else_has_as_well_stays(short: Path) -> None:
    path = short / str(uuid4())
    litter = Litter()
    binder = bind(path)
    litter.note(binder.pid)
    with socket.socket(socket.AF_UNIX) as theirs:
        pidfd = os.pidfd_open(binder.pid)
        listening = next(int(fd) for fd in os.listdir(f"/proc/{binder.pid}/fd") if int(fd) > 2)
        libc = ctypes.CDLL(None, use_errno=True)
        taken = libc.syscall(438, pidfd, listening, 0)  # pidfd_getfd(2)
        assert taken >= 0, os.strerror(ctypes.get_errno())
        os.close(pidfd)
        end(binder)
        assert litter.clear() == []
        theirs.connect(str(path))
        os.close(taken)


def test_another_socket_of_the_same_name_stays(short: Path) -> None:
    path = short / str(uuid4())
    litter = Litter()
    binder = bind(path)
    litter.note(binder.pid)
    end(binder)
    path.rename(short / "first")  # keeps the inode from being given to the next file
    end(bind(path))
    assert litter.clear() == []
    assert path.is_socket()


def test_a_keeper_clears_up_after_a_killed_engine(node: Node, names: list[Path]) -> None:
    path = node.folder / str(uuid4())
    both = BINDER.replace("input()", "") + HOLDER.replace("sys.argv[1:]", "sys.argv[2:]")
    worker = [sys.executable, "-c", both.replace("input()", "import time; time.sleep(3600)"), str(path), str(names[0])]
    leader = f"import subprocess; subprocess.run({worker!r})"
    node.children.append({"name": "a", "role": "engine", "argv": [sys.executable, "-c", leader], "limit": 1})
    keeper = node.start()
    wait_for(lambda: node.child("a").get("segments") == 2, "the keeper has noted both")
    node.kill(node.child("a")["pid"])
    wait_for(lambda: not names[0].exists(), "the keeper has removed it")
    assert f"removed what a left behind: {path}, {names[0].name}" in node.stop(keeper)[1]
    assert not path.exists()


def test_who_maps_and_is_killed_at_once_leaves_nothing(names: list[Path]) -> None:
    """In a loop without any tick: only what the kernel tells."""
    loop, litter, holders = Loop(), Litter(), list[subprocess.Popen[str]]()

    def look() -> None:
        litter.note(holders[0].pid)
        loop.stop()

    watch = SegmentWatch(loop, look)
    loop.after(0, lambda: holders.append(hold(*names)))
    loop.after(PATIENCE_S, loop.stop)
    loop.run()
    end(holders[0])
    watch.close()
    loop.close()
    assert litter.clear() == sorted(path.name for path in names[:2])


def test_a_worker_that_is_killed_before_any_tick_leaves_nothing(
    node: Node, names: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engine ends when it does, so when the keeper hears of it nobody is left whose maps could be read."""
    monkeypatch.setattr(harness, "keeper_command", lambda spec: [sys.executable, "-c", WITHOUT_TICKS, str(spec)])
    worker = [sys.executable, "-c", HOLDER.replace("input()", "import time; time.sleep(3600)"), str(names[0])]
    leader = f"import subprocess; worker = subprocess.Popen({worker!r}); print(worker.pid, flush=True); worker.wait()"
    node.children.append({"name": "a", "role": "engine", "argv": [sys.executable, "-c", leader], "limit": 1})
    keeper = node.start()
    wait_for(lambda: node.child("a").get("segments") == 1, "the keeper has noted it")
    node.kill(int(Path(node.child("a")["output"]).read_text().split()[0]))
    wait_for(lambda: not names[0].exists(), "the keeper has removed it")
    assert f"removed what a left behind: {names[0].name}" in node.stop(keeper)[1]
