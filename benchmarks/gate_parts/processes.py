"""The benchmark's own child processes, and ports for them."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1]
PATIENCE_S = 240.0


class Children:
    """Processes that end with the benchmark."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, *argv: str) -> subprocess.Popen[bytes]:
        """Start one; what it says goes to the log."""
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=FOLDER, start_new_session=True
            )
        self._running.append(process)
        return process

    def python(self, *argv: str) -> subprocess.Popen[bytes]:
        """Start a Python program."""
        return self.start(sys.executable, *argv)

    def end(self) -> None:
        """End them all, the latest first; those that can do so in good order."""
        while self._running:
            process = self._running.pop()
            if process.poll() is None:
                process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            if process.poll() is None:
                process.kill()
                process.wait()


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, no two the same."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


async def until(condition: Callable[[], Awaitable[bool]], what: str, pause_s: float = 0.01) -> None:
    """Wait for something that another process brings about.

    Raises:
        TimeoutError: it does not within `PATIENCE_S`.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not await condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {PATIENCE_S:g} s for {what}")
        await asyncio.sleep(pause_s)


def descriptors(pid: int) -> int:
    """How many files a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def quantile(values: Sequence[float], share: float) -> float:
    """The nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
