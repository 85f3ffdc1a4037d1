"""Shipped commands, forked from a process that has done an engine's imports, as `weightcache.preload` does it.

An engine's start costs seconds of imports; forked it costs what is being tested. Only the imports are shared: argv,
environment, folder, output and exit status are each command's own. `Forks.popen` is `subprocess.Popen` of
``python -m MODULE``. `Forks.popen_keeper` starts a keeper and below it the processes that its engines are forked from,
which would otherwise cost each node the imports that they save.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from readmit.cli import COMMANDS
from readmit.engine_fork import preload
from weightcache.keeper.preloaded import socket_of
from weightcache.paths import private_dir
from weightcache.preload import Forked as Engine
from weightcache.preload import OutOfDate, Request, Resident

ATTACHING: Final = "tests.readmit.attaching_engine"
MODULES: Final = (
    *("readmit.config", "readmit.engine", "readmit.gate.server", "weightcache.integrations.transformers", ATTACHING),
    *sorted({entry.module for entry in COMMANDS.values()}),
)
"""What can be forked, and what it would otherwise import."""
PLAINLY: Final = "plainly"
"""The file in a keeper's runtime folder whose presence has engines started without a fork."""
PATIENCE_S: Final = 240.0
_REQUEST_BYTES: Final = 1 << 17
_PR_CAPBSET_DROP: Final = 24
_CAPABILITY_VERSION_3: Final = 0x20080522


class Forks:
    """A process that forks commands."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", __name__, str(theirs.fileno())]
        self._parent = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()

    def popen(self, command: Sequence[str], *, limits: Mapping[str, int] | None = None, **options: Any) -> "Forked":
        """`subprocess.Popen` of ``[sys.executable, "-m", MODULE, ...]``, with text streams.

        Args:
            command: the command.
            limits: ``file_limit``, the most bytes that any file of it may have; ``open_files``, how many it may have
                open; ``uid``, who runs it; ``capabilities``, 0 for none.
            options: those of `subprocess.Popen` for streams, environment and folder.
        """
        return Forked(self._ours, {"limits": dict(limits or {})}, command, **{"text": True, **options})

    def readmit(self, *words: str, **options: Any) -> "subprocess.CompletedProcess[str]":
        """Run a ``readmit`` command to its end. The options are those of `popen`."""
        command = [sys.executable, "-m", "readmit.cli", *words]
        process = self.popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
        try:
            output, errors = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
        return subprocess.CompletedProcess(command, process.returncode, output, errors)

    def popen_keeper(
        self, command: Sequence[str], runtime_dir: Path, residents: Mapping[str, str], **options: Any
    ) -> "Forked":
        """`subprocess.Popen` of what becomes a keeper.

        Args:
            command: the command.
            runtime_dir: the keeper's.
            residents: by the name of each child that engines are forked from, the module that it runs.
            options: those of `subprocess.Popen` for streams, environment and folder.
        """
        request = {"runtime_dir": str(runtime_dir), "residents": dict(residents)}
        return Forked(self._ours, request, command, **{"text": True, **options})

    def close(self) -> None:
        self._ours.close()
        self._parent.wait()


@functools.cache
def forks() -> Forks:
    """The process that all tests of this one share."""
    shared = Forks()
    atexit.register(shared.close)
    return shared


def interpreter(folder: Path) -> str:
    """A Python for slots of a keeper from `Forks.popen_keeper`, which has their resident processes already."""
    path = folder / "python"
    path.write_text(
        f'#!/bin/sh\nif [ "$2" = weightcache.preload ]; then exec sleep infinity; fi\nexec {sys.executable} "$@"\n'
    )
    path.chmod(0o700)
    return str(path)


class Forked(subprocess.Popen[str]):
    """A command that another process forks, and waits for."""

    def __init__(self, forking: socket.socket, request: Mapping[str, Any], command: Sequence[str], **options: Any):
        self._forking, self._request = forking, request
        super().__init__(command, **options)

    def _execute_child(self, args: Any, _executable: Any, _preexec: Any, _close: Any, _pass: Any, *rest: Any) -> None:
        cwd, env, _, _, _, *pipes = rest[:11]
        request = {**self._request, "argv": args, "cwd": str(cwd or os.getcwd()), "env": dict(env or os.environ)}
        self._answers, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        streams = [own if given == -1 else given for own, given in enumerate(pipes[i] for i in (0, 3, 5))]
        socket.send_fds(self._forking, [json.dumps(request).encode()], [theirs.fileno(), *streams])
        theirs.close()
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
        self.pid = int(self._answers.recv(32))
        self._child_created = True

    def _try_wait(self, flags: int) -> tuple[int, int]:
        if flags == os.WNOHANG and not select.select([self._answers], [], [], 0)[0]:
            return 0, 0
        return self.pid, int(self._answers.recv(32))

    def _internal_poll(self, _deadstate: int | None = None) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(False):  # type: ignore[attr-defined]
            try:
                ended, status = self._try_wait(os.WNOHANG)
                if ended:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode


class _Resident(Resident):
    """What a keeper takes for its own `weightcache.preload`. It has been imported elsewhere, for every environment."""

    def __init__(self, module: str, runtime_dir: Path) -> None:
        super().__init__(module)
        self._runtime_dir = runtime_dir
        self._asked = 0

    def check(self, request: Request) -> str | None:
        self._asked += 1
        return "it is told not to" if (self._runtime_dir / PLAINLY).exists() else None

    def become(self, forked: Engine) -> None:
        """As inherited. A node's first engine comes after the daemon, as one that has to import everything does."""
        super().become(forked)
        deadline = time.monotonic() + 60
        while self._asked == 1 and "client" in sys.argv and time.monotonic() < deadline:
            if (self._runtime_dir / "cache.sock").exists():
                break
            time.sleep(0.01)


def _reside(listener: socket.socket, module: str, runtime_dir: Path) -> None:
    """Below a keeper that is about to be: serve it. Returns in engines, once they have run."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    importlib.import_module(module)  # where it is a test's own
    resident = _Resident(module, runtime_dir)
    try:
        forked = resident.serve(listener)
    except OutOfDate:  # its keeper has died
        os._exit(0)
    resident.become(forked)
    _run(module)


def _become_keeper(request: Mapping[str, Any]) -> None:
    """In the fork: replace it by a keeper. Returns in engines that are forked for it."""
    runtime_dir = Path(request["runtime_dir"])
    if request["residents"]:
        private_dir(private_dir(runtime_dir) / "keeper")
    for name, module in request["residents"].items():
        path = socket_of(runtime_dir, name)
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(path))
            listener.listen()
            if os.fork() == 0:
                _reside(listener, module, runtime_dir)
                return
    if request["argv"][2] != "readmit.cli":  # which does so itself
        os.execv(request["argv"][0], request["argv"])
    _run_command(request["argv"])


def _arrange(request: Mapping[str, Any], streams: Sequence[int]) -> None:
    """In the fork: what a process inherits."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for place, stream in enumerate(streams):
        os.dup2(stream, place)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    limits = request.get("limits", {})
    if "file_limit" in limits:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limits["file_limit"],) * 2)
    if "open_files" in limits:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limits["open_files"],) * 2)
    if "capabilities" in limits:
        _drop_capabilities()
    if "uid" in limits:
        os.setresgid(*[limits["uid"]] * 3)
        os.setresuid(*[limits["uid"]] * 3)


def _drop_capabilities() -> None:
    """Have root do no more than files' modes say, here and in what is executed (capabilities(7))."""
    library = ctypes.CDLL(None)
    for capability in range(int(Path("/proc/sys/kernel/cap_last_cap").read_text()) + 1):
        library.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    library.capset(struct.pack("Ii", _CAPABILITY_VERSION_3, 0), bytes(24))


def _be(request: Mapping[str, Any], streams: Sequence[int]) -> None:
    """In the fork: be the command."""
    _arrange(request, streams)
    if "residents" in request:
        _become_keeper(request)
        return
    _run_command(request["argv"])


def _run_command(command: list[str]) -> None:
    _, _, module, *arguments = command
    sys.argv, sys.orig_argv = [module, *arguments], command  # by which some start themselves anew
    _run(module)


def _run(module: str) -> None:
    """Run a module; ends the process where the module does not fail."""
    warnings.simplefilter("ignore", RuntimeWarning)  # runpy's own: the module has been imported before it is run
    ended: int | str | None = None
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as exit_:
        ended = exit_.code
    if isinstance(ended, str):
        print(ended, file=sys.stderr)
    # All that an interpreter does at its end, but for clearing every object away: that would copy all memory first.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1 if isinstance(ended, str) else ended or 0)


def _serve(control: socket.socket) -> None:
    """Fork what is asked for, until nobody can ask any more. Returns in what was forked, too, once it has run."""
    running: dict[int, tuple[int, socket.socket]] = {}
    while True:
        for ready in select.select([control, *running], [], [])[0]:
            if ready is not control:
                pid, asker = running.pop(ready)
                os.close(ready)
                with asker:
                    _tell(asker, os.waitpid(pid, 0)[1])
                continue
            data, fds, _, _ = socket.recv_fds(control, _REQUEST_BYTES, 4)
            if not data:
                return None
            asker, *streams = socket.socket(fileno=fds[0]), *fds[1:]
            pid = os.fork()
            if pid == 0:
                for inherited in (control, asker, *(it for _, it in running.values())):
                    inherited.close()
                for descriptor in running:
                    os.close(descriptor)
                return _be(json.loads(data), streams)
            _tell(asker, pid)
            for stream in streams:
                os.close(stream)
            running[os.pidfd_open(pid)] = pid, asker


def _tell(asker: socket.socket, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # who asked has ended
        asker.send(str(number).encode())


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; whoever is forked has it back
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # or importing numpy starts a thread for every core
    preload()
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    for module in MODULES:
        importlib.import_module(module)
    get_checkpoint_conversion_mapping("llama")  # 0.2 s, for the tables of all architectures
    gc.collect()
    gc.freeze()
    _serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
