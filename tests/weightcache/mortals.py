"""Processes that are SIGKILLed after their n-th write to the journal, forked from one that has imported everything.

``python -m tests.weightcache.mortals`` takes orders, a JSON object a line, and answers each with the pid of a process.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weightcache.journal import Journal
from weightcache.process import Process


class Mortals:
    """The process that they are forked from; what they print goes to ``log``."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.running: list[Process] = []
        self._source = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, role: str, writes: int, environment: dict[str, str], *arguments: str) -> Process:
        """Start one that lives for so many writes (0: it dies before its first)."""
        assert self._source.stdin is not None
        assert self._source.stdout is not None
        order = {
            "role": role,
            "writes": writes,
            "environment": environment,
            "arguments": arguments,
            "log": str(self.log),
        }
        self._source.stdin.write(json.dumps(order) + "\n")
        self._source.stdin.flush()
        process = Process.open(int(self._source.stdout.readline()))
        assert process is not None
        self.running.append(process)
        return process

    def close(self) -> None:
        for process in self.running:
            process.send_signal(signal.SIGKILL)
            process.close()
        assert self._source.stdin is not None
        self._source.stdin.close()
        self._source.wait()
        assert self._source.stdout is not None
        self._source.stdout.close()


@contextmanager
def mortals(log: Path) -> Iterator[Mortals]:
    source = Mortals(log)
    try:
        yield source
    finally:
        source.close()


def _die_after(writes: int) -> None:
    append, count = Journal.append, itertools.count(1)

    def mortal(self: Journal, *arguments: Any, **facts: Any) -> None:
        if writes == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        append(self, *arguments, **facts)
        if self.path is not None and next(count) == writes:
            os.kill(os.getpid(), signal.SIGKILL)

    Journal.append = mortal  # type: ignore[method-assign]


def _client(socket: str, name: str) -> None:
    """What an engine marks, around an attach (or a load and publish) in the middle."""
    journal = Journal.from_environment()
    with journal.phase("import"):
        model = skeleton()
    with journal.phase("load_weights"):
        attach(model, config(name), load=loader(model), load_bytes=1, socket=Path(socket), journal=journal, verify=1.0)
    with journal.phase("server_ready"):
        pass


def _run(order: dict[str, Any]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for theirs, ours in ((null, 0), (log, 1), (log, 2)):
        os.dup2(theirs, ours)
    os.environ.update(order["environment"])
    _die_after(order["writes"])
    roles: dict[str, Callable[..., object]] = {
        "client": _client,
        "daemon": lambda *words: daemon.main(list(words)),
        "keeper": lambda *words: keeper.main(list(words)),
        "gate": lambda *words: gate.app(list(words), prog_name="readmit gate"),
        "engine": lambda *words: engine.main(list(words)),
    }
    roles[order["role"]](*order["arguments"])


def _serve() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody here waits for them
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                _run(json.loads(line))
            finally:
                sys.stderr.flush()
                os._exit(0)
        print(pid, flush=True)


if __name__ == "__main__":
    from tests.weightcache.models import config, loader, skeleton

    import readmit.gate.server
    from readmit import engine, engine_fork
    from readmit.commands import gate
    from weightcache import daemon
    from weightcache.client import attach
    from weightcache.keeper import __main__ as keeper
    from weightcache.telemetry import exporter, spans

    assert all((readmit.gate.server, exporter, spans))  # imported here, so that those forked need not
    engine_fork.preload()
    _serve()
