"""The daemon as a process: it owns its socket or leaves it alone, and ends as it should."""

import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.weightcache import clients
from tests.weightcache.caches import Cache, wait_for
from tests.weightcache.models import config

from weightcache import messages
from weightcache.daemon import count_descriptors
from weightcache.errors import CacheMiss


def ended(process: "subprocess.Popen[str]", status: int = 2) -> str:
    """What a process said that ended with this status."""
    said, _ = process.communicate(timeout=120)
    assert process.returncode == status, said
    assert "Traceback" not in said
    return str(said)


def test_it_serves_privately_and_leaves_nothing_but_its_lock(cache: Cache) -> None:
    daemon = cache.start()
    assert stat.S_IMODE(cache.runtime_dir.stat().st_mode) == 0o700
    assert stat.S_IMODE(cache.socket.stat().st_mode) == 0o600
    assert stat.S_IMODE(Path(f"{cache.socket}.lock").stat().st_mode) == 0o600
    wait_for(lambda: cache.events("WHERE kind = 'process' AND name = 'started'"), "the daemon's own event")
    daemon.terminate()
    ended(daemon, 0)
    assert [entry.name for entry in cache.runtime_dir.iterdir()] == ["cache.sock.lock"]
    last = cache.events()[-1]
    assert (last.kind, last.name, last.attributes["exit_code"]) == ("process", "exited", 0)


@pytest.mark.parametrize("signals", [[signal.SIGTERM, signal.SIGTERM], [signal.SIGINT]])
def test_one_signal_or_two_end_it_the_same_way(cache: Cache, signals: list[signal.Signals]) -> None:
    daemon = cache.start()
    for number in signals:
        daemon.send_signal(number)
    ended(daemon, 0)
    assert not cache.socket.exists()


def test_a_killed_daemons_socket_is_taken_over_at_once(cache: Cache) -> None:
    for _ in range(3):
        daemon = cache.start()
        daemon.kill()
        daemon.wait()
        assert cache.socket.exists()
    cache.start()


def test_a_second_daemon_leaves_the_first_alone(cache: Cache) -> None:
    first = cache.start()
    before = cache.socket.stat().st_ino
    said = ended(cache.launch())
    assert f"pid {first.pid}" in said
    assert cache.socket.stat().st_ino == before
    assert cache.pid() == first.pid


def test_an_old_owner_that_exits_late_leaves_its_successors_socket(cache: Cache) -> None:
    """Somebody swept the folder, lock and all, so that both daemons own the name."""
    old = cache.start()
    for path in list(cache.runtime_dir.iterdir()):
        path.unlink()
    new = cache.start("--metrics", "127.0.0.1:0")
    old.terminate()
    ended(old, 0)
    assert cache.pid() == new.pid


def test_a_stopped_daemon_is_not_dead(cache: Cache) -> None:
    first = cache.start()
    first.send_signal(signal.SIGSTOP)
    ended(cache.launch())
    first.send_signal(signal.SIGCONT)
    assert cache.pid() == first.pid


def test_twenty_daemons_at_once_are_one(cache: Cache) -> None:
    racing = [cache.launch() for _ in range(20)]
    wait_for(lambda: sum(each.poll() is None for each in racing) == 1, "nineteen to give up")
    owner = next(each for each in racing if each.poll() is None)
    wait_for(lambda: cache.pid() == owner.pid, "the owner to answer")
    assert {each.returncode for each in racing if each is not owner} == {2}
    assert len(cache.events("WHERE kind = 'process' AND name = 'started'")) == 1


def _file(path: Path) -> None:
    path.write_text("precious")


def _folder(path: Path) -> None:
    path.mkdir()


def _link(path: Path) -> None:
    path.symlink_to("/dev/null")


def _others_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
    os.chown(path, 12_345, 12_345)


@pytest.mark.parametrize(
    ("make", "what"),
    [(_file, "-rw"), (_folder, "drwx"), (_link, "lrwx"), (_others_socket, "uid 12345")],
    ids=["a file", "a folder", "a link", "a socket of somebody else"],
)
def test_what_is_in_the_way_is_named_and_left(cache: Cache, make: Callable[[Path], None], what: str) -> None:
    if make is _others_socket and os.getuid() != 0:
        pytest.fail("giving a file to somebody else takes root")
    cache.runtime_dir.mkdir(mode=0o700)
    make(cache.socket)
    before = cache.socket.lstat()
    said = ended(cache.launch())
    assert what in said
    assert (cache.socket.lstat().st_ino, cache.socket.lstat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_folder_that_others_can_enter_is_refused(cache: Cache) -> None:
    cache.runtime_dir.mkdir(mode=0o755)
    cache.runtime_dir.chmod(0o755)
    assert "mode 0755" in ended(cache.launch())
    assert list(cache.runtime_dir.iterdir()) == []


def test_a_path_too_long_for_a_socket_is_refused_first(cache: Cache) -> None:
    cache.socket = cache.folder / ("d" * 100) / "cache.sock"
    cache.command[4] = str(cache.socket)
    assert "107" in ended(cache.launch())
    assert not cache.socket.parent.exists()


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--metrics", "nowhere"], "on nowhere: expected HOST:PORT that nobody uses, found none"),
        (["--metrics", "127.0.0.1:99999"], "metrics cannot be served"),
        (["--until-pid", "4194303"], "there is no process 4194303"),
        (["--capacity", "much"], "is not a size"),
        (["--capacity", "-1GiB"], "expected one argument"),
        (["--capacity", "inf"], "is not a size"),
        (["--until-pid", "-1"], "is not a number"),
        (["--until-pid", "0"], "is not a number"),
        (["--allow-uid", "-1"], "is not a number"),
        (["--allow-uid", "65534"], "unknown to a user namespace"),
        (["--journal", "/"], "is not the name of a file"),
        (["--journal-days", "nan"], "is not a number of days"),
    ],
)
def test_a_setting_that_cannot_work_stops_it_before_it_touches_anything(
    cache: Cache, options: list[str], what: str
) -> None:
    assert what in ended(cache.launch(*options))
    assert not cache.socket.exists()


def test_it_ends_with_the_process_it_belongs_to(cache: Cache) -> None:
    engine = cache.run([sys.executable, "-c", "import time; time.sleep(1000)"])
    daemon = cache.start("--until-pid", str(engine.pid))
    engine.kill()
    engine.wait()
    ended(daemon, 0)


def test_no_moment_of_a_start_is_open_to_others(cache: Cache) -> None:
    """With a umask of 0 and somebody who looks as often as he can."""
    seen: set[tuple[str, int]] = set()
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            for path in (cache.runtime_dir, cache.socket, Path(f"{cache.socket}.lock"), cache.journal_path):
                try:
                    seen.add((path.name, stat.S_IMODE(path.lstat().st_mode) & 0o077))
                except FileNotFoundError:
                    continue

    watcher = threading.Thread(target=watch)
    watcher.start()
    before = os.umask(0)
    try:
        for _ in range(5):
            daemon = cache.start()
            daemon.kill()
            daemon.wait()
    finally:
        os.umask(before)
        stop.set()
        watcher.join()
    assert {name for name, _ in seen} >= {"r", "cache.sock", "cache.sock.lock"}
    assert {bits for name, bits in seen if name != cache.journal_path.name} == {0}


def test_a_client_of_another_user_is_refused_before_it_is_heard(served: Cache) -> None:
    if os.getuid() != 0:
        pytest.fail("becoming another user takes root")
    for folder in (served.folder, served.runtime_dir, served.socket):
        folder.chmod(0o777)  # as a container might mount it: the kernel lets the stranger through, we do not
    with clients.client(clients.attach_as, served.socket, "tiny", 12_345) as stranger:
        missed = stranger.hear()
    assert missed["reason"] == "peer_refused"
    assert "uid 12345 may not use this weight cache" in missed["message"]
    assert wait_for(lambda: served.status()["refused"].get("peer_refused")) == 1
    assert served.pid()


def test_a_user_who_is_allowed_is_served_but_runs_no_commands(cache: Cache) -> None:
    if os.getuid() != 0:
        pytest.fail("becoming another user takes root")
    cache.start("--allow-uid", "12345")
    for folder in (cache.folder, cache.runtime_dir, cache.socket):
        folder.chmod(0o777)
    with clients.client(clients.load_as, cache.socket, 12_345) as stranger:
        attached, loaded = stranger.hear()
    assert attached["reason"] == "absent"
    assert loaded["reason"] == "peer_refused"
    assert not (cache.folder / "marker").exists()


@pytest.fixture
def stranger_socket(cache: Cache) -> Iterator[socket.socket]:
    """Somebody else's socket where the daemon's should be."""
    cache.runtime_dir.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(cache.socket))
        server.listen()
        yield server


def test_a_client_believes_no_socket_of_somebody_else(cache: Cache, stranger_socket: socket.socket) -> None:
    if os.getuid() != 0:
        pytest.fail("giving a file to somebody else takes root")
    os.chown(cache.socket, 12_345, 12_345)
    with pytest.raises(CacheMiss, match="belongs to uid 12345") as refused:
        cache.connect()
    assert refused.value.reason == "peer_refused"


def test_two_daemons_for_two_models_serve_their_own(cache: Cache) -> None:
    other = Cache()
    try:
        cache.start()
        other.start()
        for each, name in ((cache, "one"), (other, "two")):
            each.ask(messages.Status())
            with clients.client(clients.hold, each.socket, name) as client:
                client.hear()
                assert [it["config"]["model_path"] for it in each.generations()] == [f"/models/{name}"]
        explained = cache.ask(messages.Explain(config=config("two").to_dict())).data
        assert (explained["would_hit"], explained["reason"]) == (False, "absent")
    finally:
        other.close()


def test_a_load_worker_that_fails_says_how(served: Cache) -> None:
    cases = {
        "exit status 3": [sys.executable, "-c", "import sys; print('last words'); sys.exit(3)"],
        "signal SIGKILL": [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"],
        "No such file": ["/no/such/engine"],
        "null byte": ["nul\0"],
    }
    for what, argv in cases.items():
        with pytest.raises(CacheMiss, match=what) as failed:
            served.load(argv)
        assert failed.value.reason == "absent"
        if "last words" in argv[-1]:
            assert failed.value.data["output"] == ["last words"]


def test_a_load_worker_ends_with_its_time_its_client_or_its_daemon(served: Cache) -> None:
    pids = served.folder / "pids"
    endless = [
        sys.executable,
        "-c",
        f"import os, time; open({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n'); time.sleep(9999)",
    ]

    def worker(count: int) -> int:
        wait_for(lambda: pids.exists() and len(pids.read_text().split()) == count, "the worker to run")
        return int(pids.read_text().split()[-1])

    with pytest.raises(CacheMiss, match="did not finish") as late:
        served.load(endless, wait_s=3)
    assert late.value.reason == "timeout"
    wait_for(lambda: not Path(f"/proc/{worker(1)}").exists(), "the first worker to end")
    connection = served.connect()
    next(connection.ask_for_all(messages.Load(argv=endless, wait_s=600)))
    second = worker(2)
    connection.close()
    wait_for(lambda: not Path(f"/proc/{second}").exists(), "the second worker to end")
    connection = served.connect()
    next(connection.ask_for_all(messages.Load(argv=endless, wait_s=600)))
    third = worker(3)
    served.processes[0].terminate()
    ended(served.processes[0], 0)
    assert not Path(f"/proc/{third}").exists()
    connection.close()


def _limit_descriptors(pid: int, soft: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


def test_a_request_that_fails_inside_is_answered_and_the_next_is_served(served: Cache) -> None:
    """No descriptor is left to look at its own descriptors with."""
    daemon = served.processes[0]
    connection = served.connect()
    _limit_descriptors(daemon.pid, 3)
    with pytest.raises(CacheMiss, match="the daemon failed at a Status: OSError") as failed:
        connection.ask(messages.Status(), messages.Done)
    assert (failed.value.reason, failed.value.detail) == ("resource", "descriptors")
    _limit_descriptors(daemon.pid, 1000)
    assert connection.ask(messages.Status(), messages.Done)[0].data["pid"] == daemon.pid
    connection.close()


def test_out_of_descriptors_it_waits_for_some_and_does_not_spin(served: Cache) -> None:
    daemon = served.processes[0]
    _limit_descriptors(daemon.pid, 3)
    with served.raw():
        before = _cpu_s(daemon.pid)
        time.sleep(2.0)
        assert _cpu_s(daemon.pid) - before < 1.0
        _limit_descriptors(daemon.pid, 1000)
        assert served.pid() == daemon.pid


def test_descriptors_are_counted_against_their_limits_before_they_are_too_many(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level("INFO", "weightcache.daemon"):
        count_descriptors(3000)
        assert "3000 of 4096 descriptors are in keeping" in caplog.text
        count_descriptors(3100)
        assert "3100 descriptors are in keeping: beyond 4096" in caplog.text
        monkeypatch.setenv("FDSTORE", "20")
        count_descriptors(16)
        assert "16 descriptors are in keeping: beyond 20" in caplog.text
        monkeypatch.setenv("FDSTORE", "many")
        count_descriptors(3001)
        assert "3001 of 4096 descriptors are in keeping" in caplog.text


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
