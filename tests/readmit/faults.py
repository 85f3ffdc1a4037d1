"""Faults of memory, daemons and sockets, provoked around a command that meets them."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from tests.fixtures import checkpoints
from tests.readmit.forked import Forked, forks
from tests.weightcache.caches import Cache, descriptors, wait_for
from tests.weightcache.publishing import attach

from weightcache import messages
from weightcache.arena.seals import sealed_file
from weightcache.fingerprint import CacheConfig
from weightcache.frames import HEADER, close_all, encode, send_frame
from weightcache.manifest import KINDS, Manifest, generation_of, read
from weightcache.server import MAX_CONNECTIONS

ENGINE = "readmit.cli engine {model} --port 0 --socket {socket} --weight-cache=client"
WORKER = "weightcache.integrations.transformers {model} --socket {socket}"
STRANGER = 12_345
_COUNTERS = ("lookups", "misses", "publishes", "releases", "quarantines", "connections_refused", "daemon_starts")
_JOURNALED = ("lookup", "publish", "release", "quarantine", "process")


class Done(NamedTuple):
    """How a command ended: its exit status, negative for a signal, and all it said."""

    status: int
    said: str


Row = tuple[str, str, str | None, str | None]
"""Kind, name, reason and detail of a journal event."""


class Stage:
    """A daemon, a model, and commands that meet there."""

    def __init__(self) -> None:
        self.cache = Cache()
        self.cache.start()
        self.folder = self.model = checkpoints.with_tokenizer(checkpoints.plain(self.cache.folder / "t"))
        self.in_hub_cache = checkpoints.as_hub_cache(self.folder, self.cache.folder / "hub", "a" * 40)
        self._said = self.cache.folder / "output"
        self.running: Forked | None = None
        self._loaded: dict[Path, list[tuple[str, Any]]] = {}
        """What was resident once a model had been loaded."""
        self.series = self.counters().keys()

    @property
    def daemon(self) -> "subprocess.Popen[str]":
        return self.cache.processes[-1]

    def start(self, command: str, socket_path: Path, **limits: int) -> int:
        """Start a command; returns its pid."""
        self._said.unlink(missing_ok=True)
        argv = [sys.executable, "-m", *command.format(model=self.model, socket=socket_path).split()]
        env = self.cache.environment | (self._home_of(limits["uid"]) if "uid" in limits else {})
        pipes = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
        with self._said.open("w") as output:
            self.running = forks().popen(argv, limits=limits, env=env, stdout=output, **pipes)
        return self.running.pid

    def run(self, command: str, socket_path: Path, **limits: int) -> Done:
        """Run a command to its end; an engine that serves is asked to end."""
        pid = self.start(command, socket_path, **limits)
        if "--weight-cache=client" in command:
            wait_for(lambda: "serving on" in self.said() or not Path(f"/proc/{pid}").exists(), "it to serve or to end")
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        return self.wait()

    def wait(self) -> Done:
        """The end of what was started."""
        assert self.running is not None
        return Done(self.running.wait(240), self.said())

    def said(self) -> str:
        """All that the command has said so far."""
        return self._said.read_text() if self._said.exists() else ""

    def _home_of(self, uid: int) -> dict[str, str]:
        """A user's own places, where ours are closed to him."""
        home = self.cache.folder / str(uid)
        home.mkdir(mode=0o700)
        os.chown(home, uid, uid)
        return {"HOME": str(home), "READMIT_STATE": str(home), "READMIT_JOURNAL": str(home / "journal.sqlite3")}

    def reset(self, *, resident: bool) -> None:
        """Have this model's weights resident, or nothing, and all that was journaled counted."""
        wait_for(lambda: self.cache.leases() == 0, "engines to be gone")
        if not resident or self._there() != self._loaded.get(self.model):
            self.release()
            if resident:
                self._load()
        wait_for(self._is_counted, "the metrics to follow")

    def _load(self) -> None:
        done = self.run(WORKER, self.cache.socket)
        assert done.status == 0, f"the model cannot be made resident: {done.said}"
        wait_for(lambda: self.cache.leases() == 0, "the worker to be gone")
        self._loaded[self.model] = self._there()

    def _there(self) -> list[tuple[str, Any]]:
        """What is resident, and why it should not be used."""
        return [(it["generation"], it["quarantined"]) for it in self.cache.generations()]

    def release(self) -> None:
        wait_for(lambda: self.cache.leases() == 0, "engines to be gone")
        self.cache.ask(messages.Release())

    def _is_counted(self) -> bool:
        counters = self.counters()
        names = ("lookup hit", "lookup miss", "publish published", "publish failed", "release released")
        rows = [f"{kind} {name}" for kind, name, _, _ in self.rows(0)]
        plural = {"lookup": "lookups", "publish": "publishes", "release": "releases"}
        return all(
            counters[f"{plural[kind]} {how}"] == rows.count(f"{kind} {how}") for kind, how in map(str.split, names)
        )

    def counters(self) -> dict[str, float]:
        """What is on /metrics, as ``misses fingerprint dtype``."""
        found = {}
        for sample in self.cache.samples():
            name = sample.name.removeprefix("weightcache_").removesuffix("_total")
            if name in _COUNTERS:
                labels = (sample.labels[label] for label in sorted(sample.labels, reverse=True))  # reason, then detail
                found[" ".join(filter(None, (name, *labels)))] = sample.value
        return found

    @contextmanager
    def books(self, steps: dict[str, int], rows: list[Row]) -> Iterator[None]:
        """Hold what is counted and journaled during the block against what should be: all of it, and nothing else."""
        before, last = self.counters(), max(event.id for event in self.cache.events())
        yield
        assert self.rows(last) == rows

        def stepped() -> dict[str, float]:
            return {it: value - before[it] for it, value in self.counters().items() if value != before[it]}

        wait_for(lambda: stepped().keys() >= steps.keys(), f"{steps} to be counted")
        assert stepped() == steps

    def rows(self, after: int) -> list[Row]:
        kinds = ", ".join(f"'{kind}'" for kind in _JOURNALED)
        events = self.cache.events(f"WHERE id > ? AND kind IN ({kinds}) ORDER BY id", after)
        return [(it.kind, it.name, it.attributes.get("reason"), it.attributes.get("detail")) for it in events]

    def identity(self) -> CacheConfig:
        (generation,) = self.cache.generations()
        return CacheConfig.from_dict(generation["config"])

    def close(self) -> None:
        self.cache.close()


Fault = Callable[[Stage], AbstractContextManager[Path]]
"""Gives the socket that the command is told."""


def nothing_wrong(stage: Stage) -> AbstractContextManager[Path]:
    return nullcontext(stage.cache.socket)


@contextmanager
def nobody_there(stage: Stage) -> Iterator[Path]:
    """A private folder where no daemon is."""
    folder = stage.cache.folder / f"elsewhere-{os.urandom(3).hex()}"
    folder.mkdir(mode=0o700)
    yield folder / "cache.sock"


@contextmanager
def nobody_listens(stage: Stage) -> Iterator[Path]:
    with nobody_there(stage) as path, socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        yield path


@contextmanager
def strangers_socket(stage: Stage) -> Iterator[Path]:
    with nobody_listens(stage) as path:
        os.chown(path, STRANGER, STRANGER)
        yield path


@contextmanager
def too_deep(stage: Stage) -> Iterator[Path]:
    yield stage.cache.folder / ("d" * 100) / "cache.sock"


@contextmanager
def stopped(stage: Stage) -> Iterator[Path]:
    stage.daemon.send_signal(signal.SIGSTOP)
    yield stage.cache.socket
    stage.daemon.send_signal(signal.SIGCONT)


@contextmanager
def killed_and_back(stage: Stage) -> Iterator[Path]:
    stage.daemon.kill()
    stage.daemon.wait()
    stage.cache.start()
    yield stage.cache.socket


@contextmanager
def ended_and_back(stage: Stage) -> Iterator[Path]:
    """Asked to end, and asked again while it does."""
    stage.daemon.terminate()
    stage.daemon.terminate()
    assert stage.daemon.wait(120) == 0
    assert os.listdir(stage.cache.runtime_dir) == ["cache.sock.lock"]
    stage.cache.start()
    yield stage.cache.socket


@contextmanager
def somebody_loads(stage: Stage) -> Iterator[Path]:
    """A claim on this model, whose holder dies once somebody waits for it."""
    identity = stage.identity()
    stage.release()
    loading = stage.cache.connect()
    loading.ask(messages.Claim(config=identity.to_dict()), messages.Claimed)
    before = len(stage.cache.lookups())

    def die() -> None:
        wait_for(lambda: len(stage.cache.lookups()) > before, "somebody to wait")
        loading.close()

    waiting = threading.Thread(target=die)
    waiting.start()
    yield stage.cache.socket
    waiting.join()


@contextmanager
def other_bytes(stage: Stage) -> Iterator[Path]:
    """A shard rewritten in place: as long as before, and with the time stamp it had."""
    shard = stage.model / checkpoints.SHARDS[0]
    before, content = shard.stat(), shard.read_bytes()
    with shard.open("r+b") as file:
        file.write(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    yield stage.cache.socket
    shard.write_bytes(content)


@contextmanager
def moved_to_nothing(stage: Stage) -> Iterator[Path]:
    """``main`` now names a commit of which only the config was downloaded; what is resident stays for who goes back."""
    snapshot = stage.model / "snapshots" / ("b" * 40)
    snapshot.mkdir()
    shutil.copy(stage.model / "snapshots" / ("a" * 40) / "config.json", snapshot)
    (stage.model / "refs" / "main").write_text("b" * 40)
    yield stage.cache.socket
    assert stage.identity().revision == "a" * 40


@contextmanager
def second_daemon(stage: Stage) -> Iterator[Path]:
    """Another daemon at the same socket, to which the first one's pid means nothing."""
    second = stage.cache.run(["unshare", "--pid", "--fork", "--mount-proc", *stage.cache.command])
    said, _ = second.communicate(timeout=120)
    stage.cache.processes.remove(second)
    assert (second.returncode, f"pid {stage.daemon.pid}" in said) == (2, True), said
    yield stage.cache.socket


@contextmanager
def without_a_buffer(stage: Stage) -> Iterator[Path]:
    """What is resident lacks a buffer that is in no file, as if its publisher had forgotten it."""
    connection, _, descriptors = attach(stage.cache, stage.identity())
    _, manifest = read(descriptors[0])
    connection.close()
    stage.release()
    row, size = manifest.kinds.index(KINDS.index("non_persistent_buffer")), manifest.digest_size
    columns = ("names", "dtype", "shapes", "strides", "offsets", "kinds")
    less = msgspec.structs.replace(
        manifest,
        **{name: _without(getattr(manifest, name), row) for name in columns},
        digests=manifest.digests[: row * size] + manifest.digests[(row + 1) * size :],
        aliases={name: target - (target > row) for name, target in manifest.aliases.items()},
    )
    _publish(stage, less, descriptors[1:])
    close_all(descriptors)
    yield stage.cache.socket


def _without(column: Any, row: int) -> Any:
    return column[:row] + column[row + 1 :]


def _publish(stage: Stage, manifest: Manifest, arena: list[int]) -> None:
    connection = stage.cache.connect()
    connection.ask(messages.Claim(config=manifest.config.to_dict()), messages.Claimed)
    named = sealed_file("weightcache-manifest", manifest.encode())
    connection.ask(messages.Publish(descriptors=1 + len(arena)), messages.Published, [named, *arena])
    os.close(named)
    connection.close()


@contextmanager
def in_use(stage: Stage) -> Iterator[Path]:
    connection, _, descriptors = attach(stage.cache, stage.identity())
    close_all(descriptors)
    yield stage.cache.socket
    connection.close()


def impostor(*says: Callable[[socket.socket], None]) -> Fault:
    """Somebody who listens where a daemon should, has something to say to each message of a client, and is gone."""

    @contextmanager
    def listening(stage: Stage) -> Iterator[Path]:
        with nobody_there(stage) as path, socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
            server.listen()

            def play() -> None:
                peer, _ = server.accept()
                with peer, suppress(ConnectionError):
                    server.close()
                    for say in says:
                        peer.recv(65536)
                        say(peer)

            playing = threading.Thread(target=play)
            playing.start()
            yield path
            playing.join()

    return listening


def saying(*sent: bytes) -> Callable[[socket.socket], None]:
    return lambda peer: peer.sendall(b"".join(sent))


GREETING = encode(messages.Welcome("1", "impostor"))


def offering_nonsense(peer: socket.socket) -> None:
    """Sealed files whose manifest is none."""
    files = [sealed_file("manifest", b"\x80"), sealed_file("arena", bytes(64))]
    attached = messages.Attached(generation=generation_of(b"\x80"), descriptors=2)
    send_frame(peer, memoryview(encode(attached)), files)
    close_all(files)


def frame(body: bytes, magic: bytes = b"rdm1") -> bytes:
    return HEADER.pack(magic, len(body)) + body


def peer(sent: bytes, *, greeted: bool = False) -> Fault:
    """A client that sends this, and stays when it is refused."""

    @contextmanager
    def connected(stage: Stage) -> Iterator[Path]:
        with stage.cache.raw(greeted=greeted) as peer:
            peer.sendall(sent)
            assert peer.recv(4096)
            yield stage.cache.socket

    return connected


@contextmanager
def silent_dribbling_and_deaf(stage: Stage) -> Iterator[Path]:
    """Three clients that the daemon waits for, each until its limit."""
    with stage.cache.raw(), stage.cache.raw() as half, stage.cache.raw(greeted=True) as deaf:
        half.sendall(b"rdm1\0")
        deaf.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                deaf.send(encode(messages.Status()) * 100)
        yield stage.cache.socket
        wait_for(lambda: stage.cache.status()["connections"] == 1, "the daemon to let go of all three")


@contextmanager
def crowd(stage: Stage) -> Iterator[Path]:
    with ExitStack() as together:
        for _ in range(MAX_CONNECTIONS):
            together.enter_context(socket.socket(socket.AF_UNIX)).connect(str(stage.cache.socket))
        yield stage.cache.socket
    wait_for(lambda: descriptors(stage.daemon.pid) < MAX_CONNECTIONS, "the crowd to be forgotten")


@contextmanager
def open_to_strangers(stage: Stage) -> Iterator[Path]:
    """As a container might mount it: the kernel lets a stranger through to the socket."""
    ours = (stage.cache.folder, stage.cache.runtime_dir, stage.cache.socket)
    modes = [path.stat().st_mode & 0o7777 for path in ours]
    for path in ours:
        path.chmod(0o777)
    yield stage.cache.socket
    for path, mode in zip(ours, modes, strict=True):
        path.chmod(mode)
