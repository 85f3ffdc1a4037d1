"""A resident process that has done an engine's imports; its restarts are forked from it.

``python -m weightcache.preload --socket PATH MODULE`` imports ``MODULE`` and whatever the entry points of group
``readmit.preload`` add for its package, then waits. A request of the keeper (`weightcache.keeper.preloaded`) forks it
twice; the engine runs ``MODULE`` as ``__main__`` with the arguments, environment, folder and output of its slot.

A fork copies one thread and everything that was imported. So the resident has one task, no CUDA context and no
connection of any kind, which it checks at every request; and it stands for the packages and the environment that it was
made from, which it checks as well. It refuses when anything differs, and ends when it is out of date: its keeper starts
another.

Standard library only, apart from what it imports for others.
"""

import argparse
import contextlib
import errno
import gc
import importlib
import itertools
import json
import os
import runpy
import select
import signal
import socket
import sys
import traceback
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final, NamedTuple

from weightcache.keeper.launch import EXEC_FAILED, GO, limit, prepare_signals
from weightcache.keeper.preloaded import PRELOADED, REQUEST_BYTES
from weightcache.memory import resident_bytes
from weightcache.sdnotify import Notifier

GROUP: Final = "readmit.preload"
"""Entry points named like a top-level package, called after the import of a module of it, to import the rest."""

_OF_THE_MOMENT: Final = ("READMIT_", "LISTEN_", "WATCHDOG_", "NOTIFY_SOCKET", "TRACEPARENT", "OPENBLAS_NUM_THREADS")
"""Variables, or beginnings of such, that differ between any two processes of a node, and that no import depends on."""


class Request(NamedTuple):
    """An engine to be forked."""

    argv: list[str]
    env: dict[str, str]
    cwd: str | None
    open_files: int


class Forked(NamedTuple):
    """What the forked process has: its request, the channel on which the keeper says go, and the engine's output."""

    request: Request
    channel: int
    output: int


class OutOfDate(Exception):
    """The resident stands for packages or an environment that are others by now, or for imports that failed."""


class Resident:
    """See the top of this module.

    Args:
        module: what ``python -m`` would run.
    """

    def __init__(self, module: str) -> None:
        self.module = module
        self._keeper = os.pidfd_open(os.getppid())
        self._began_with = dict(os.environ)
        self._stamps: dict[str, tuple[int, int]] = {}
        self._added: dict[str, str] = {}
        self._failure: str | None = None

    @property
    def status(self) -> str:
        """What it is good for, for people."""
        return self._failure or f"holds {len(sys.modules)} modules in {resident_bytes() >> 20} MiB"

    def load(self) -> None:
        """Do the imports. One that fails is the answer to the next request, after which they are tried anew."""
        package = self.module.partition(".")[0]
        try:
            importlib.import_module(self.module)
            for point in entry_points(group=GROUP, name=package):
                point.load()()
        except (Exception, SystemExit) as error:  # noqa: BLE001  # whatever modules raise, the engine starts without us
            traceback.print_exc()
            self._failure = f"importing {self.module} failed: {type(error).__name__}: {error}"
        self._added = {name: value for name, value in os.environ.items() if self._began_with.get(name) != value}
        self._stamps = dict(_stamps())
        gc.collect()
        gc.freeze()  # what the collector never visits stays shared with every engine
        if binding := sys.modules.get("weightcache.binding"):
            binding.heap_is_frozen = True  # type: ignore[attr-defined]

    def check(self, request: Request) -> str | None:
        """Why this request is refused, None if it is not.

        Raises:
            OutOfDate: no request can be accepted any more.
        """
        if self._failure is not None:
            raise OutOfDate(self._failure)
        if changed := next((path for path, stamp in self._stamps.items() if _stamp(path) != stamp), None):
            raise OutOfDate(f"{changed} has changed")
        if differing := differing_variable(self._began_with, request.env):
            raise OutOfDate(f"its environment has another {differing}")
        tasks = os.listdir("/proc/self/task")
        if len(tasks) != 1:
            return f"it has {len(tasks)} threads"
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            return "it has a CUDA context"
        if self.module not in _modules_run(request.argv):
            return f"the command does not run {self.module}"
        return None

    def serve(self, listener: socket.socket) -> Forked:
        """Answer requests. Returns in the forked process only.

        Raises:
            OutOfDate: after the request that showed it was refused, or at the death of the keeper: an engine forked for
                another one would not be its child.
        """
        while True:
            ready, _, _ = select.select([listener.fileno(), self._keeper], [], [])
            if self._keeper in ready:
                raise OutOfDate("its keeper has died")
            connection, _ = listener.accept()
            with connection:
                forked = self._answer(connection)
            if forked is not None:
                listener.close()
                return forked

    def _answer(self, connection: socket.socket) -> Forked | None:
        data, fds, _, _ = socket.recv_fds(connection, REQUEST_BYTES, 2)
        try:
            request = Request(**json.loads(data))
            channel, output = fds
            try:
                refused = self.check(request)
            except OutOfDate as error:
                _reply(connection, refused=str(error))
                raise
            if refused is not None:
                _reply(connection, refused=refused)
                return None
            pid = fork_away()
            if pid == 0:
                return Forked(request, os.dup(channel), os.dup(output))
            _reply(connection, pid=pid)
            return None
        finally:
            for descriptor in fds:
                os.close(descriptor)

    def become(self, forked: Forked) -> None:
        """Turn this forked process into the engine, once the keeper says go; does not return if it does not."""
        request = forked.request
        os.close(self._keeper)
        try:
            prepare_signals(False)
            os.setsid()
            if os.read(forked.channel, 1) != GO:
                os._exit(EXEC_FAILED)
            # Only the standard streams: what the imports have opened belongs to them.
            for descriptor, place in ((os.open(os.devnull, os.O_RDONLY), 0), (forked.output, 1), (forked.output, 2)):
                os.dup2(descriptor, place)
            os.close(forked.output)
            limit(request.open_files, 3, False)
            if request.cwd is not None:
                os.chdir(request.cwd)
        except OSError as error:
            os.write(forked.channel, str(error.errno or errno.EINVAL).encode())
            os._exit(EXEC_FAILED)
        os.environ.clear()
        os.environ.update({**request.env, **self._added, PRELOADED: "1"})
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed()  # or every engine would draw the same numbers
        arguments = request.argv[request.argv.index(self.module) + 1 :]
        sys.argv = [sys.modules[self.module].__file__ or self.module, *arguments]
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.close(forked.channel)  # what exec would do


def fork_away() -> int:
    """Fork a process that is not our child; 0 in it, its pid here once its parent is our own nearest subreaper."""
    reading, writing = os.pipe()
    between = os.fork()
    if between == 0:
        os.close(reading)
        pid = os.fork()
        if pid == 0:
            os.close(writing)
            return 0
        os.write(writing, str(pid).encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        told = pipe.read()
    os.waitpid(between, 0)
    if not told:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return int(told)


def differing_variable(one: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    """The name of an environment variable that two processes which should be alike do not share."""
    names = sorted(one.keys() | other.keys())
    return next((it for it in names if one.get(it) != other.get(it) and not it.startswith(_OF_THE_MOMENT)), None)


def _modules_run(argv: list[str]) -> list[str]:
    return [module for option, module in itertools.pairwise(argv) if option == "-m"]


def _stamps() -> Iterator[tuple[str, tuple[int, int]]]:
    """The files that were imported, and the folders in which packages are installed."""
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    installed = (entry for entry in sys.path if entry.endswith("-packages"))
    for path in {*(file for file in files if file), *installed}:
        if (stamp := _stamp(path)) is not None:
            yield path, stamp


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _reply(connection: socket.socket, **answer: Any) -> None:
    with contextlib.suppress(BrokenPipeError):  # the keeper did not wait; an engine ends by itself without its word
        connection.send(json.dumps(answer).encode())


def main() -> None:
    """Import, wait, and in a forked process run the module."""
    parser = argparse.ArgumentParser(description="Hold a module imported, and fork processes that run it.")
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("module")
    arguments = parser.parse_args()
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # or importing numpy starts a thread for every core
    resident = Resident(arguments.module)
    resident.load()
    with contextlib.suppress(FileNotFoundError):
        arguments.socket.unlink()  # of a predecessor: the keeper runs one of us
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(arguments.socket))
        listener.listen()
        Notifier.from_environment().ready(resident.status, insists=False)  # it has one thread, and ends with its keeper
        try:
            forked = resident.serve(listener)
        except OutOfDate as error:
            arguments.socket.unlink(missing_ok=True)
            sys.exit(f"readmit preload: ends, to be started anew: {error}")
    resident.become(forked)
    runpy.run_module(resident.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
