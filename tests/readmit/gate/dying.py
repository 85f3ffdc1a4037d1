"""Processes that die as a test wants them to."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

LINGERS = (
    "import ctypes, sys, threading, time\n"
    "threading.Thread(target=time.sleep, args=(3600,)).start()\n"
    "print('up', flush=True); sys.stdin.readline()\n"
    f"ctypes.CDLL(None).syscall({ {'x86_64': 60, 'aarch64': 93}[os.uname().machine] }, 0)\n"
)
EXECUTES = "import os, sys; print('up', flush=True); sys.stdin.readline(); os.execvp('cat', ['cat'])"


@contextmanager
def running(script: str) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-c", script]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        try:
            yield process
        finally:
            process.kill()


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
