"""Shipped commands, forked from a process that has done an engine's imports, as `weightcache.preload` does it.

An engine's start costs seconds of imports; forked it costs what is being tested. Only the imports are shared: argv,
environment, folder, output and exit status are each command's own.
"""

import json
import os
import resource
import runpy
import subprocess
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Done(NamedTuple):
    """How a command ended: its exit status, negative for a signal, and all it said."""

    status: int
    said: str


class Forks:
    """A process that forks commands, one at a time. Each is what ``python -m`` would run."""

    def __init__(self) -> None:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._parent = subprocess.Popen([sys.executable, "-m", __name__], **pipes)

    def start(self, argv: Sequence[str], env: Mapping[str, str], output: Path, **changes: int) -> int:
        """Start a command; returns its pid.

        Args:
            argv: a module and its arguments.
            env: its environment.
            output: the file that gets what it says.
            changes: ``file_limit``, the most bytes that any file of it may have; ``open_files``, how many it may have
                open; ``uid``, who runs it.
        """
        self._output = output
        self._say({"argv": list(argv), "env": dict(env), "output": str(output), **changes})
        return self._hear()

    def wait(self) -> Done:
        """The end of what was started."""
        return Done(self._hear(), self._output.read_text())

    def close(self) -> None:
        assert self._parent.stdin is not None
        self._parent.stdin.close()
        self._parent.wait()

    def _say(self, request: Mapping[str, Any]) -> None:
        assert self._parent.stdin is not None
        self._parent.stdin.write(json.dumps(request) + "\n")
        self._parent.stdin.flush()

    def _hear(self) -> int:
        assert self._parent.stdout is not None
        return int(self._parent.stdout.readline())


def _run(request: Mapping[str, Any]) -> int:
    """In the fork: be the command; its exit status."""
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for descriptor, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
        os.dup2(source, descriptor)
    os.environ.clear()
    os.environ.update(request["env"])
    if "file_limit" in request:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_limit"],) * 2)
    if "open_files" in request:
        resource.setrlimit(resource.RLIMIT_NOFILE, (request["open_files"],) * 2)
    if "uid" in request:
        os.setresgid(*[request["uid"]] * 3)
        os.setresuid(*[request["uid"]] * 3)
    module, *arguments = request["argv"]
    sys.argv = [module, *arguments]
    warnings.simplefilter("ignore", RuntimeWarning)  # runpy's own: the module has been imported before it is run
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
            return 1
        return ended.code or 0
    except BaseException:  # noqa: BLE001 - as an interpreter does with whatever ends it
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    from readmit.engine_fork import preload

    preload()
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                status = _run(json.loads(line))
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(status)
        print(pid, file=answers, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=answers, flush=True)


if __name__ == "__main__":
    main()
