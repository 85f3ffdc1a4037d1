"""The load worker: an engine process started to load weights, publish them and exit.

There is one publishing path, whoever loads. The worker writes its output to a file, not a pipe, so that it survives
the daemon that started it.
"""

import asyncio
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from weightcache.errors import CacheMiss
from weightcache.messages import LOAD_WORKER, Done, Loading
from weightcache.registry import Claim

_LOOK_EVERY_S = 0.1
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

    async def run(
        self, wait_s: float, tell: Callable[[Loading], Awaitable[None]], claim_of: Callable[[int], Claim | None]
    ) -> Done:
        """Run it to its end, and no longer than that.

        Args:
            wait_s: how long it may take.
            tell: is told every now and then how far it is.
            claim_of: by a process's pid, what it has claimed.

        Raises:
            CacheMiss: ``absent``: it cannot be started, or died; ``timeout``: it took too long, and was ended.
        """
        deadline = self._began + wait_s
        try:
            self._start()
            while (status := self._poll()) is None:
                claim = claim_of(self.pid)
                done, total = (claim.done, claim.total) if claim else (0, 0)
                await tell(Loading(pid=self.pid, done=done, total=total, elapsed_s=round(self.elapsed_s, 3)))
                if time.monotonic() > deadline:
                    raise CacheMiss(
                        "timeout",
                        f"the load worker (pid {self.pid}) did not finish in {wait_s} s and was ended",
                        output=self.tail(),
                    )
                await asyncio.sleep(_LOOK_EVERY_S)
            self._check(status)
        finally:
            await asyncio.get_running_loop().run_in_executor(None, self.stop)
        return Done(data={"pid": self.pid, "seconds": round(self.elapsed_s, 3)})

    def _start(self) -> None:
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

    def _poll(self) -> int | None:
        return self._process.poll() if self._process else None

    def _check(self, status: int) -> None:
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
