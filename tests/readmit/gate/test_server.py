"""The gate's process: the socket it leaves behind, and how it leaves."""

import array
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.fixtures import http
from tests.readmit.gate.harness import Gate, ScriptedEngine, ending, free_port, probe_file, run_gate, until

from readmit.gate.operator import order


class Manager:
    """The service manager's end of the notification socket."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.messages: list[str] = []
        self.stored: list[int] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            text, ancillary, _, _ = self._socket.recvmsg(65536, socket.CMSG_SPACE(1024))
            for _, _, data in ancillary:
                self.stored.extend(array.array("i", data))
            self.messages.append(text.decode())

    def count(self, start: str) -> int:
        return sum(message.startswith(start) for message in self.messages)


@pytest.fixture
def manager(tmp_path: Path) -> Manager:
    return Manager(tmp_path / "notify.sock")


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    engine = ScriptedEngine()
    with ending(engine):
        yield engine


@pytest.fixture
def options(engine: ScriptedEngine, tmp_path: Path) -> list[str]:
    return [
        *("--slot", f"a={engine.url}", "--unsupervised", "--journal", str(tmp_path / "journal.sqlite3")),
        *("--probes", str(probe_file(tmp_path / "probes.json"))),
    ]


def test_the_listening_socket_is_left_with_the_manager(manager: Manager, options: list[str]) -> None:
    gate = Gate(*options, env={"NOTIFY_SOCKET": str(manager.path)})
    with ending(gate):
        until(lambda: manager.count("READY=1"), "the gate to report")
        assert [it for it in manager.messages if "FDSTORE=1" in it] == ["FDSTORE=1\nFDNAME=gate\nFDPOLL=0"]
        stored = socket.socket(fileno=manager.stored[0])
        assert stored.getsockname()[1] == int(gate.url.rpartition(":")[2])
        gate.process.send_signal(signal.SIGHUP)
        until(lambda: manager.count("FDSTORE=1") == 2, "the socket to be stored again")
        gate.until_ready()
        until(lambda: "STATUS=slot a ready" in manager.messages, "the status")
        gate.process.terminate()
        until(lambda: manager.count("STOPPING=1"), "the goodbye")
        stored.close()


def test_a_new_gate_takes_over_the_socket_and_who_waits_there(options: list[str]) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as waiting,
    ):
        waiting.sendall(b"GET /livez HTTP/1.1\r\nHost: gate\r\nConnection: close\r\n\r\n")
        process = _inheriting(listener, options)
        try:
            assert waiting.recv(65536).startswith(b"HTTP/1.1 200 OK")
        finally:
            process.kill()
            process.wait()


def test_a_socket_of_another_address_is_not_taken_over(options: list[str]) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = _inheriting(listener, ["--listen", f"127.0.0.1:{port}", *options])
        try:
            until(lambda: _answers(port), "the gate at its own address")
        finally:
            process.kill()
            process.wait()


def test_it_serves_on_while_word_of_its_leaving_gets_around(options: list[str]) -> None:
    gate = Gate(*options, "--drain-notice", "3")
    with ending(gate):
        gate.until_ready()
        gate.process.terminate()
        refused = until(lambda: answer if (answer := gate.client.get("/readyz")).status_code == 503 else None, "503")
        assert refused.json()["type"] == "urn:readmit:problem:draining"
        assert gate.client.get("/v1/echo").status_code == 201
        assert gate.client.get("/livez").status_code == 200
        assert gate.slot()["state"] == "draining"
        assert gate.process.wait(60) == 0


def test_a_second_signal_ends_it_at_once(options: list[str]) -> None:
    gate = Gate(*options, "--drain-notice", "3600")
    with ending(gate):
        gate.until_ready()
        gate.process.terminate()
        gate.until_state("draining")
        gate.process.terminate()
        assert gate.process.wait(60) == 0


def test_an_engine_that_dies_while_the_gate_drains_gets_nothing_more(
    engine: ScriptedEngine, options: list[str]
) -> None:
    gate = Gate(*options, "--drain-notice", "3600")
    with ending(gate):
        gate.until_ready()
        gate.process.terminate()
        gate.until_state("draining")
        engine.end()
        refused = until(lambda: answer if (answer := gate.client.get("/v1/echo")).status_code == 503 else None, "503")
        assert refused.json()["type"] == "urn:readmit:problem:not-ready"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "the gate's slots must be told apart"),
        (["--slot", "http://127.0.0.1:1"], "expected NAME=URL, found http://127.0.0.1:1"),
        (["--slot", "a=http://127.0.0.1:1", "--listen", "nowhere"], "expected HOST:PORT, found nowhere"),
    ],
)
def test_options_that_cannot_work_are_explained(options: list[str], says: str) -> None:
    status, said = run_gate(*options)
    assert status == os.EX_CONFIG
    assert says in said
    assert "Traceback" not in said


def test_a_port_in_use_is_explained(options: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        status, said = run_gate(*options, "--listen", listen)
    assert status == os.EX_CONFIG
    assert f"the gate cannot listen on {listen}" in said


def _inheriting(listener: socket.socket, options: list[str]) -> subprocess.Popen[bytes]:
    """A gate to which the manager hands a socket."""
    port = listener.getsockname()[1]
    gate = f"exec {sys.executable} -m readmit.gate"
    # The shell becomes the gate and keeps its pid, which the variables must name.
    script = f'LISTEN_PID=$$ LISTEN_FDS=1 LISTEN_FDNAMES=gate {gate} "$@" 3<&{listener.fileno()}'
    command = ["bash", "-c", script, "gate", "--listen", f"127.0.0.1:{port}", *options]
    return subprocess.Popen(command, pass_fds=(listener.fileno(),))


def _answers(port: int) -> bool:
    try:
        return http.get(f"http://127.0.0.1:{port}/livez", timeout=60).status_code == 200
    except httpx.ConnectError:
        return False


def test_a_second_gate_on_the_node_does_not_take_the_first_ones_orders(options: list[str], tmp_path: Path) -> None:
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    first = Gate(*options, "--runtime-dir", str(runtime))
    second = Gate(*options, "--runtime-dir", str(runtime))
    with ending(first, second):
        second.says("no orders are taken .*another gate takes them")
        assert order(runtime, "POST", "/api/override", {"reason": "test", "user": "x", "ttl_s": 60})["ttl_s"] == 60
        assert "override" in first.client.get("/readyz?verbose").text
        assert "override" not in second.client.get("/readyz?verbose").text
        assert second.end(signal.SIGTERM) == 0
        assert order(runtime, "DELETE", "/api/override", {"user": "x"})["lifted"]
