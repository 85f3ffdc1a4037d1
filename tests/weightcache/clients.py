"""What client processes of tests do. Each function runs in a process of its own, told and heard through a pipe."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

from tests.weightcache.models import config, contents, loader, skeleton

from weightcache import messages
from weightcache.attachment import Attachment, Progress
from weightcache.binding import Binding
from weightcache.client import _Recovery as Recovery
from weightcache.client import attach
from weightcache.errors import CacheMiss
from weightcache.journal import Context, Journal
from weightcache.protocol import Connection
from weightcache.version import VERSION

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload([__name__])  # a client is forked from a process that has imported torch already

NO_FALLBACK = {"absent": "fail", "fingerprint": "fail", "daemon_loading": "fail"}


class Client:
    """A client process."""

    def __init__(self, action: Callable[..., None], *arguments: Any) -> None:
        self.pipe, theirs = _processes.Pipe()
        self.process = _processes.Process(target=action, args=(theirs, *arguments))
        self.process.start()
        theirs.close()

    def hear(self) -> Any:
        """What it says next."""
        if not self.pipe.poll(120):
            raise TimeoutError("the client says nothing")
        return self.pipe.recv()

    def go_on(self) -> None:
        self.pipe.send(None)

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


@contextmanager
def client(action: Callable[..., None], *arguments: Any) -> Iterator[Client]:
    """A client process that ends with the block."""
    running = Client(action, *arguments)
    try:
        yield running
    finally:
        running.close()


def hold(pipe: Pipe, socket: Path, name: str, slot: str | None = None, journal: Path | None = None) -> None:
    """Attach or load and publish, say how, and hold the weights until told to go on; then say what they are by then."""
    model = skeleton()
    where = Journal(journal, Context("n", slot))
    outcome = attach(model, config(name), load=loader(model), load_bytes=1, socket=socket, journal=where)
    pipe.send((outcome.path, outcome.generation, contents(model)))
    pipe.recv()
    pipe.send(contents(model))
    pipe.recv()


def write_into(pipe: Pipe, socket: Path, name: str) -> None:
    """Attach, and overwrite every weight in place."""
    model = skeleton()
    attach(model, config(name), policies=NO_FALLBACK, socket=socket)
    for parameter in model.parameters():
        parameter.data.zero_()
    pipe.send(contents(model))
    pipe.recv()


def stop_in(pipe: Pipe, socket: Path, name: str, part: str, load: bool, journal: Path | None = None) -> None:
    """Attach (or load and publish), and stop when a part of it begins for the first time, to be killed there."""
    begin = Attachment.part

    @contextmanager
    def stopping(self: Attachment, named: str) -> Iterator[None]:
        with begin(self, named):
            if named == part:
                Attachment.part = begin  # type: ignore[method-assign]
                pipe.send(part)
                pipe.recv()
            yield

    Attachment.part = stopping  # type: ignore[method-assign, assignment]
    model = skeleton()
    where = Journal(journal, Context("n", "a"))
    read = loader(model) if load else None
    attach(model, config(name), load=read, load_bytes=1, socket=socket, journal=where, verify=1.0)
    pipe.recv()


def stop_half_bound(pipe: Pipe, socket: Path, name: str) -> None:
    """Attach, and stop when parameters are placed and buffers are not."""

    def stopping(_: Binding) -> int:
        pipe.send("half")
        pipe.recv()
        return 0

    Binding.place_buffers = stopping  # type: ignore[method-assign]
    attach(skeleton(), config(name), policies=NO_FALLBACK, socket=socket)


def attach_as(pipe: Pipe, socket: Path, name: str, uid: int) -> None:
    """Attach as another user, and say why it failed."""
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    try:
        attach(skeleton(), config(name), policies=NO_FALLBACK, socket=socket, journal=Journal(None))
    except CacheMiss as miss:
        pipe.send(miss.to_dict())
    else:
        pipe.send(None)


def load_as(pipe: Pipe, socket: Path, uid: int) -> None:
    """As another user: ask for weights, then have the daemon run a command, and say what came of both."""
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    answers = []
    connection = Connection(socket, messages.Hello(version=VERSION))
    marker = socket.parent.parent / "marker"
    for request in (messages.Attach(config=config().to_dict()), messages.Load(argv=["touch", str(marker)], wait_s=5)):
        try:
            connection.ask(request, messages.Done)
            answers.append(None)
        except CacheMiss as miss:
            answers.append(miss.to_dict())
    pipe.send(answers)


def load_slowly(pipe: Pipe, socket: Path, name: str) -> None:
    """Find nothing, say so, and go on to claim and load only when told; then say what came of it."""
    model, loads = skeleton(), []
    claim = Recovery._claim

    def claiming(self: Recovery, replace: bool) -> CacheMiss | None:
        if not loads:
            loads.append(0)
            pipe.send("absent")
            pipe.recv()
        return claim(self, replace)

    def loading(progress: Progress) -> None:
        loads.append(1)
        loader(model)(progress)

    Recovery._claim = claiming  # type: ignore[method-assign]
    outcome = attach(model, config(name), load=loading, load_bytes=1, socket=socket, journal=Journal(None))
    pipe.send((outcome.generation, sum(loads), contents(model)))
    pipe.recv()


def hold_a_claim(pipe: Pipe, socket: Path, device: str) -> None:
    """Claim for a GPU, and load for ever."""
    connection = Connection(socket, messages.Hello(version=VERSION))
    connection.ask(messages.Claim(config=config().to_dict(), device=device), messages.Claimed)
    pipe.send("claimed")
    pipe.recv()


def own_daemon(
    pipe: Pipe, socket: Path, journal: Path, detach: bool, visible: str | None = None, gpu: str | None = None
) -> None:
    """Attach in mode daemon, seeing some GPUs or as if on one; say the outcome, or the reason and detail of a miss."""
    os.environ["READMIT_JOURNAL"] = str(journal)
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    Attachment.gpu = gpu  # type: ignore[assignment]
    model = skeleton()
    command = [sys.executable, "-c", f"from tests.weightcache.clients import work; work({gpu!r})"]
    where = Journal(journal, Context("n", "a"))
    try:
        outcome = attach(
            model, config(), mode="daemon", load_command=command, socket=socket, journal=where, detach=detach
        )
    except CacheMiss as miss:
        pipe.send((miss.reason, miss.detail))
        return
    pipe.send((outcome, contents(model)))
    pipe.recv()


def work(gpu: str | None) -> None:
    """The load worker of `own_daemon`: loads, publishes as what comes from the GPUs that it sees, and exits."""
    Attachment.gpu = gpu  # type: ignore[assignment]
    model = skeleton()
    outcome = attach(model, config(), load=loader(model), load_bytes=1, origin=os.environ.get("CUDA_VISIBLE_DEVICES"))
    sys.exit(0 if outcome.generation else str(outcome))


def load_in_a_cgroup(pipe: Pipe, socket: Path, group: Path, load_bytes: int) -> None:
    """With 300 MiB of memory left, load what is said to take so much; say the outcome or the miss."""
    (group / "memory.limit_in_bytes").write_text(str(300 << 20))
    (group / "cgroup.procs").write_text(str(os.getpid()))
    model = skeleton()
    try:
        pipe.send(attach(model, config(), load=loader(model), load_bytes=load_bytes, socket=socket))
    except CacheMiss as miss:
        pipe.send(miss.to_dict())
