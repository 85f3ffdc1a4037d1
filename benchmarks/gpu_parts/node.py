"""A node: the real keeper and the weight cache daemon it runs, in folders of their own."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from weightcache import messages
from weightcache.errors import CacheMiss
from weightcache.keeper.spec import ChildSpec, KeeperSpec
from weightcache.protocol import Connection


class Node:
    """Starts on entering, ends on leaving."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="readmit-gpu-")
        root = Path(self._folder.name)
        self.runtime, self.state = root / "run", root / "state"
        self.socket, self.journal = self.runtime / "cache.sock", self.state / "journal.sqlite3"
        self.log = root / "log"
        self._keeper: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Node":
        for folder in (self.runtime, self.state):
            folder.mkdir(mode=0o700)
        os.environ["READMIT_JOURNAL"] = str(self.journal)
        os.environ["READMIT_NODE"] = "bench"
        os.environ["WEIGHTCACHE_SOCKET"] = str(self.socket)
        argv = [sys.executable, "-m", "weightcache.daemon", "--socket", str(self.socket), "--metrics", "127.0.0.1:0"]
        spec = KeeperSpec(
            node="bench",
            runtime_dir=self.runtime,
            state_dir=self.state,
            journal=self.journal,
            children=(ChildSpec("cache", "daemon", (*argv, "--journal", str(self.journal))),),
        )
        self.spec = self.runtime / "spec.json"
        spec.save(self.spec)
        self.start_keeper()
        self.wait()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._keeper is not None
        self._keeper.terminate()
        try:
            self._keeper.wait(30)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
        self._folder.cleanup()

    def start_keeper(self) -> None:
        with open(self.log, "ab") as log:
            command = [sys.executable, "-m", "weightcache.keeper", str(self.spec)]
            self._keeper = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def kill_keeper(self) -> None:
        assert self._keeper is not None
        self._keeper.kill()
        self._keeper.wait()

    def kill_daemon(self) -> int:
        """SIGKILL the daemon; its pid."""
        pid = self.daemon_pid()
        os.kill(pid, signal.SIGKILL)
        return pid

    def daemon_pid(self) -> int:
        return int(self.status()["pid"])

    def keeper_pid(self) -> int:
        assert self._keeper is not None
        return self._keeper.pid

    def connection(self) -> Connection:
        return Connection(self.socket, messages.Hello(version="benchmark"), timeout_s=10.0)

    def status(self) -> dict[str, Any]:
        return self._ask(messages.Status())

    def release(self, *, force: bool = False) -> list[str]:
        """Drop every generation."""
        return list(self._ask(messages.Release(force=force))["released"])

    def adopted(self) -> bool:
        """Whether the newest keeper has taken the daemon over."""
        found = [event for event in self.events("process") if event.get("process") == "daemon"]
        return bool(found) and found[-1]["name"] == "adopted"

    def wait(self, limit_s: float = 60.0, *, not_pid: int | None = None) -> dict[str, Any]:
        """The status, as soon as a daemon (another one than ``not_pid``) answers."""
        deadline = time.monotonic() + limit_s
        while True:
            try:
                status = self.status()
                if status["pid"] != not_pid:
                    return status
            except CacheMiss:
                if time.monotonic() > deadline:
                    raise RuntimeError("no daemon answers; " + self.log.read_text()[-2000:]) from None
            time.sleep(0.002)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The journal's events of one kind, oldest first."""
        from weightcache.journal import Journal

        found = Journal(self.journal).query("WHERE kind = ? ORDER BY id", kind)
        return [{"name": event.name, **event.attributes} for event in found]

    def _ask(self, request: messages.Request) -> dict[str, Any]:
        connection = self.connection()
        try:
            done, _ = connection.ask(request, messages.Done)
            return json.loads(json.dumps(done.data))
        finally:
            connection.close()
