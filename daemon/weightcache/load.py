"""The load worker: an engine process started to load weights, publish them and exit.

There is one publishing path, whoever loads. The worker writes its output to a file, not a pipe, so that it survives
the daemon that started it.
"""

import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from weightcache.errors import CacheMiss
from weightcache.messages import LOAD_WORKER

_STOP_LIMIT_S = 5.0
_TAIL_LINES = 20


class LoadWorker:
    """One engine process that loads for the cache.

    Args:
        argv: the command, from somebody who could run it as well.
        env: variables added to the daemon's own.
        socket: where it publishes.
        journal: where its events go.
    """

    def __init__(self, argv: list[str], env: dict[str, str], socket: Path, journal: Path | None) -> None:
        self._argv = argv
        self._env = {**os.environ, **env, "WEIGHTCACHE_SOCKET": str(socket), LOAD_WORKER: "1"}
        for name in ("NOTIFY_SOCKET", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PID"):
            self._env.pop(name, None)
        if journal is not None:
            self._env["READMIT_JOURNAL"] = str(journal)
        self._process: subprocess.Popen[bytes] | None = None
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop
        self._began = time.monotonic()

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def start(self) -> None:
        """Start it.

        Raises:
            CacheMiss: ``absent``, because the command cannot be run.
        """
        try:
            self._process = subprocess.Popen(
                self._argv,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:  # ValueError: no argument or variable of a process looks like that
            raise CacheMiss(
                "absent",
                f"the load worker cannot be started: {error}",
                found=" ".join(self._argv),
                remedy="Check that the command exists and can be run by the daemon's user",
            ) from error

    def poll(self) -> int | None:
        """Its exit status, None while it runs."""
        return self._process.poll() if self._process else None

    def check(self, status: int) -> None:
        """Check that it loaded.

        Raises:
            CacheMiss: ``absent``: it died, with its exit status and its last words.
        """
        if status == 0:
            return
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        tail = self.tail()
        raise CacheMiss(
            "absent",
            f"the load worker (pid {self.pid}) ended with {how}" + (f"; it said: {tail[-1]}" if tail else ""),
            expected="exit status 0",
            found=how,
            remedy="Run its command by hand: " + " ".join(self._argv),
            output=tail,
        )

    def tail(self) -> list[str]:
        """The last lines of its output."""
        size = os.fstat(self._output.fileno()).st_size
        content = os.pread(self._output.fileno(), 8192, max(0, size - 8192))
        return content.decode(errors="replace").splitlines()[-_TAIL_LINES:]

    def stop(self) -> None:
        """End it and its children, if it still runs. Blocks for at most `_STOP_LIMIT_S` seconds and a kill."""
        process = self._process
        if process is not None and process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(_STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._output.close()
