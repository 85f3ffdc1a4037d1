"""Real weight cache daemons, alone or under a real keeper, and bare sockets to misbehave with."""

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from weightcache import messages
from weightcache.errors import CacheMiss
from weightcache.frames import encode
from weightcache.journal import Context, Event, Journal
from weightcache.protocol import Connection
from weightcache.version import VERSION

T = TypeVar("T")
PATIENCE_S = 120.0


def wait_for(condition: Callable[[], T], what: str = "the condition") -> T:
    """Poll until a condition is true; fails after a generous while."""
    deadline = time.monotonic() + PATIENCE_S
    while not (result := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {PATIENCE_S:g} s in vain for {what}")
        time.sleep(0.01)
    return result


def descriptors(pid: int | str = "self") -> int:
    """How many descriptors a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def memory_files(pid: int | str) -> int:
    """How many of a process's descriptors are memory files."""
    count = 0
    for entry in os.scandir(f"/proc/{pid}/fd"):
        try:
            count += os.readlink(entry.path).startswith("/memfd:weightcache")
        except FileNotFoundError:  # closed meanwhile
            continue
    return count


@contextmanager
def few_descriptors(left: int) -> Iterator[None]:
    """Let this process open only so many more descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1 + left, hard))
    filling = []
    try:
        while True:
            filling.append(os.dup(0))
    except OSError:
        for _ in range(left):
            os.close(filling.pop())
    try:
        yield
    finally:
        for descriptor in filling:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Cache:
    """One node's weight cache: folders of its own, and the daemons that serve there in turn."""

    def __init__(self, *options: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="cache-"))  # not tmp_path: a socket's path has 107 bytes
        self.runtime_dir = self.folder / "r"
        self.state_dir = self.folder / "s"
        self.socket = self.runtime_dir / "cache.sock"
        self.journal_path = self.state_dir / "journal.sqlite3"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.command = [
            *(sys.executable, "-m", "weightcache.daemon", "--socket", str(self.socket)),
            *("--journal", str(self.journal_path), "--metrics", f"127.0.0.1:{self.port}"),
            *options,
        ]
        self.processes: list[subprocess.Popen[str]] = []
        self.journal = Journal(self.journal_path, Context("n"))

    @property
    def environment(self) -> dict[str, str]:
        strangers = ("READMIT", "NOTIFY", "LISTEN", "WEIGHTCACHE", "TRACEPARENT")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(strangers)}
        return {
            **inherited,
            "READMIT_RUNTIME": str(self.runtime_dir),
            "READMIT_STATE": str(self.state_dir),
            "READMIT_JOURNAL": str(self.journal_path),
            "READMIT_NODE": "n",
            "WEIGHTCACHE_SOCKET": str(self.socket),
        }

    def run(self, command: list[str], **options: Any) -> "subprocess.Popen[str]":
        """Start a process whose output can be read."""
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, env=self.environment, text=True, **{**pipes, **options})
        self.processes.append(process)
        return process

    def launch(self, *more: str) -> "subprocess.Popen[str]":
        """Start a daemon without waiting for anything."""
        return self.run([*self.command, *more])

    def start(self, *more: str) -> "subprocess.Popen[str]":
        """Start a daemon and wait until it answers."""
        process = self.launch(*more)
        wait_for(lambda: self.pid() == process.pid or process.poll() is not None, "the daemon to answer")
        if process.poll() is not None:
            raise AssertionError(f"the daemon ended: {process.communicate()[0]}")
        return process

    def pid(self) -> int | None:
        """The pid of the daemon that answers, if one does."""
        try:
            return int(self.status()["pid"])
        except CacheMiss:
            return None

    def connect(self, **facts: Any) -> Connection:
        return Connection(self.socket, messages.Hello(version=VERSION, **facts), timeout_s=60)

    def ask(self, request: messages.Request, reply: type[Any] = messages.Done) -> Any:
        """One request on a connection of its own."""
        connection = self.connect()
        try:
            return connection.ask(request, reply, timeout_s=60)[0]
        finally:
            connection.close()

    def load(self, argv: list[str], wait_s: float = 60) -> dict[str, Any]:
        """Have the daemon run a load worker to its end."""
        connection = self.connect()
        replies = connection.ask_for_all(messages.Load(argv=argv, wait_s=wait_s), timeout_s=wait_s + 60)
        try:
            return next(reply.data for reply, _ in replies if isinstance(reply, messages.Done))
        finally:
            connection.close()

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.ask(messages.Status()).data
        return answer

    def generations(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.status()["generations"]
        return found

    def leases(self) -> int:
        return sum(len(generation["leases"]) for generation in self.generations())

    def events(self, clause: str = "ORDER BY id", *values: object) -> list[Event]:
        return self.journal.query(clause, *values)

    def lookups(self) -> list[Event]:
        return self.events("WHERE kind = 'lookup' ORDER BY id")

    def metric(self, name: str, **labels: str) -> float:
        """A sample's value now, 0 where there is none."""
        found = [sample for sample in self.samples() if sample.name == name]
        return sum(each.value for each in found if all(each.labels.get(key) == it for key, it in labels.items()))

    def samples(self) -> list[Sample]:
        """All that /metrics has now."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=PATIENCE_S) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        return [sample for family in families for sample in family.samples]

    @contextmanager
    def raw(self, *, greeted: bool = False) -> Iterator[socket.socket]:
        """A bare connection."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(PATIENCE_S)
            connection.connect(str(self.socket))
            if greeted:
                connection.sendall(encode(messages.Hello(version=VERSION)))
                connection.recv(4096)
            yield connection

    def close(self) -> None:
        for process in reversed(self.processes):
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        for process in self.processes:
            try:
                process.communicate(timeout=PATIENCE_S)
            finally:
                process.kill()
        self.journal.close()
        shutil.rmtree(self.folder)


class KeptCache(Cache):
    """A weight cache under a real keeper, which restarts the daemon and stores its descriptors."""

    def start_keeper(self) -> "subprocess.Popen[str]":
        """Start a keeper and wait until its daemon answers."""
        self.runtime_dir.mkdir(mode=0o700, exist_ok=True)
        spec = self.folder / "spec.json"
        child = {"name": "daemon", "role": "daemon", "argv": self.command, "stop_s": 60.0}
        facts = {"node": "n", "runtime_dir": self.runtime_dir, "state_dir": self.state_dir}
        spec.write_text(json.dumps({**facts, "journal": self.journal_path, "children": [child]}, default=str))
        keeper = self.run([sys.executable, "-m", "weightcache.keeper", str(spec)])
        wait_for(lambda: self.socket.exists() and self.pid(), "the daemon to answer")
        return keeper

    def close(self) -> None:
        daemon = self.pid() if self.socket.exists() else None
        super().close()
        if daemon is not None and Path(f"/proc/{daemon}").exists():  # its keeper was killed and had no successor
            os.kill(daemon, signal.SIGKILL)

    def kill_daemon(self) -> int:
        """SIGKILL the daemon and wait for its successor; returns the successor's pid."""
        before = self.status()["pid"]
        os.kill(before, signal.SIGKILL)
        wait_for(lambda: self.pid() not in (None, before), "the daemon's successor")
        return int(self.status()["pid"])
