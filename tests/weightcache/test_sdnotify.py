"""The client half of systemd's protocol, against a manager's socket."""

import array
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from weightcache.errors import ConfigError
from weightcache.frames import close_all
from weightcache.sdnotify import FDS_PER_MESSAGE, Notifier, listen_fds


class Manager:
    """Receives datagrams as a service manager does."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address)
        self.socket.settimeout(30)

    def receive(self) -> tuple[list[str], list[int]]:
        data, ancillary, flags, _ = self.socket.recvmsg(4096, socket.CMSG_SPACE(4 * FDS_PER_MESSAGE))
        assert not flags & socket.MSG_CTRUNC
        fds = array.array("i")
        for level, kind, payload in ancillary:
            assert (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
            fds.frombytes(payload)
        return data.decode().split("\n"), fds.tolist()


@pytest.fixture
def address(tmp_path: Path) -> str:
    return str(tmp_path / "n")


@pytest.fixture
def manager(address: str) -> Iterator[Manager]:
    manager = Manager(address)
    yield manager
    manager.socket.close()


def test_ready_status_and_stopping_are_the_documented_lines(manager: Manager, address: str) -> None:
    notifier = Notifier.from_environment({"NOTIFY_SOCKET": address})
    assert notifier.ready("serving 3\ngenerations", main_pid=77, insists=False)
    assert notifier.status("busy")
    assert notifier.stopping()
    assert manager.receive() == (["READY=1", "STATUS=serving 3 generations", "MAINPID=77"], [])
    assert manager.receive() == (["STATUS=busy"], [])
    assert manager.receive() == (["STOPPING=1"], [])


def test_an_abstract_address_works() -> None:
    name = f"readmit-test-{os.getpid()}"
    manager = Manager(f"\0{name}")
    assert Notifier(f"@{name}").ready(insists=False)
    assert manager.receive() == (["READY=1"], [])
    manager.socket.close()


def test_stored_descriptors_arrive_as_duplicates_of_the_same_file(manager: Manager, address: str) -> None:
    memory = os.memfd_create("weights")
    os.write(memory, b"weights")
    assert Notifier(address).store("arena-1-0", memory)
    fields, (copy,) = manager.receive()
    assert fields == ["FDSTORE=1", "FDNAME=arena-1-0", "FDPOLL=0"]
    os.close(memory)
    assert os.pread(copy, 100, 0) == b"weights"


def test_a_polled_descriptor_is_sent_as_systemd_polls_by_default(manager: Manager, address: str) -> None:
    with socket.socket() as lease:
        Notifier(address).store("lease-1-1", lease.fileno(), poll=True)
    assert manager.receive()[0] == ["FDSTORE=1", "FDNAME=lease-1-1"]


def test_more_descriptors_than_the_kernel_passes_at_once_go_in_several_messages(manager: Manager, address: str) -> None:
    with open(os.devnull) as file:
        copies = [os.dup(file.fileno()) for _ in range(FDS_PER_MESSAGE + 7)]
        assert Notifier(address).store("many", *copies)
    received = [manager.receive()[1] for _ in range(2)]
    assert [len(descriptors) for descriptors in received] == [FDS_PER_MESSAGE, 7]
    close_all([*copies, *received[0], *received[1]])


def test_remove_names_what_to_close(manager: Manager, address: str) -> None:
    Notifier(address).remove("arena-1-0")
    assert manager.receive() == (["FDSTOREREMOVE=1", "FDNAME=arena-1-0"], [])


def test_barrier_waits_until_the_manager_has_closed_the_pipe(manager: Manager, address: str) -> None:
    notifier = Notifier(address)
    notifier.status("before")
    result: list[bool] = []
    waiting = threading.Thread(target=lambda: result.append(notifier.barrier(30)))
    waiting.start()
    assert manager.receive()[0] == ["STATUS=before"]
    fields, (pipe,) = manager.receive()
    assert fields == ["BARRIER=1"]
    assert waiting.is_alive()
    os.close(pipe)
    waiting.join(30)
    assert result == [True]


def test_barrier_does_not_take_a_dead_manager_for_a_finished_one(manager: Manager, address: str) -> None:
    result: list[bool] = []
    waiting = threading.Thread(target=lambda: result.append(Notifier(address).barrier(30)))
    waiting.start()
    _, fds = manager.receive()
    manager.socket.close()
    for fd in fds:
        os.close(fd)
    waiting.join(30)
    assert result == [False]


def test_barrier_gives_up_on_a_silent_manager(manager: Manager, address: str) -> None:
    assert Notifier(address).barrier(0.05) is False


def test_a_manager_that_is_back_learns_who_is_ready(manager: Manager, address: str) -> None:
    manager.socket.close()
    assert not Notifier(address).ready("serving")
    os.unlink(address)
    successor = Manager(address)
    assert successor.receive() == (["READY=1", "STATUS=serving"], [])
    successor.socket.close()


def test_what_a_manager_had_not_read_when_it_died_its_successor_is_told(manager: Manager, address: str) -> None:
    assert Notifier(address).ready("serving")
    manager.socket.close()  # with what waits in its queue
    os.unlink(address)
    successor = Manager(address)
    assert successor.receive()[0] == ["READY=1", "STATUS=serving"]
    fields, (pipe,) = successor.receive()
    assert fields == ["BARRIER=1"]
    os.close(pipe)
    assert successor.receive()[0] == ["READY=1", "STATUS=serving"], "to one that lives, and so has read the first"
    successor.socket.close()


def test_without_a_manager_nothing_happens(address: str) -> None:
    for notifier in (Notifier(None), Notifier(address)):
        assert not notifier.ready(insists=False)
        assert not notifier.store("x", 0)
        assert not notifier.barrier(0.05)
    assert not Notifier(None).active


def test_an_address_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        Notifier("vsock:2:1234")
    assert caught.value.reason == "notify_socket"
    assert "vsock:2:1234" in str(caught.value)


@pytest.mark.parametrize("name", ["", "a:b", "a\nb", "é", "x" * 256])
def test_names_the_protocol_cannot_carry_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="descriptor"):
        Notifier(None).remove(name)


def test_descriptors_meant_for_another_process_are_not_taken_and_not_passed_on() -> None:
    environ = {"LISTEN_PID": "1", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "a"}
    assert listen_fds(environ) == []
    assert environ == {}


def test_contradicting_variables_are_an_error() -> None:
    with pytest.raises(ConfigError) as caught:
        listen_fds({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "2", "LISTEN_FDNAMES": "a"})
    assert caught.value.reason == "listen_fds"


def test_a_process_takes_its_descriptors_with_names_and_keeps_them_from_its_children() -> None:
    program = """
import os, sys
from weightcache.sdnotify import listen_fds
os.environ["LISTEN_PID"] = str(os.getpid())
taken = listen_fds()
print([(name, os.pread(fd, 10, 0)) for name, fd in taken], "LISTEN_PID" in os.environ)
print(any(os.get_inheritable(fd) for _, fd in taken))
"""
    files = [os.memfd_create(name) for name in "ab"]
    for file, content in zip(files, (b"one", b"two"), strict=True):
        os.write(file, content)
    command = ["bash", "-c", f'exec 3<&{files[0]} 4<&{files[1]}; exec "$@"', "-", sys.executable, "-c", program]
    environ = {**os.environ, "LISTEN_FDS": "2", "LISTEN_FDNAMES": "first:second"}
    # The shell moves them to 3 and 4; the test's own numbers may be any.
    output = subprocess.run(command, env=environ, pass_fds=files, check=True, capture_output=True, text=True).stdout
    assert output.splitlines() == ["[('first', b'one'), ('second', b'two')] False", "False"]


def test_a_manager_that_watches_hears_often_enough_and_not_oftener(
    manager: Manager, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("weightcache.sdnotify.time.monotonic", lambda: now)
    environ = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "60000000", "WATCHDOG_PID": str(os.getpid())}
    notifier = Notifier.from_environment(environ)
    assert [notifier.alive() for _ in range(3)] == [True, False, False]
    now = 1014.9
    assert not notifier.alive()
    now = 1015.1
    assert notifier.alive()
    assert [manager.receive() for _ in range(2)] == [(["WATCHDOG=1"], [])] * 2


@pytest.mark.parametrize("variables", [{}, {"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": "1"}])
def test_a_manager_that_watches_nobody_or_somebody_else_hears_nothing(
    manager: Manager, address: str, variables: dict[str, str]
) -> None:
    assert not Notifier.from_environment({"NOTIFY_SOCKET": address, **variables}).alive()
