"""What a child prints, in a file it writes itself: a dead keeper never breaks a pipe. Standard library only."""

import contextlib
import os
import re
from pathlib import Path
from typing import Final

from weightcache.keeper.console import offer, say

OUTPUT_MAX: Final = 16 << 20
"""Bytes of a living process's output; beyond, all but the last lines go."""
TAIL_LINES: Final = 200
KEPT: Final = 10
"""Files of dead attempts per slot."""
_TAIL_BYTES: Final = 256 << 10


class Output:
    """One output file, opened for appending. The child gets `fileno`; the keeper trims, reads and keeps its tail.

    ``shown`` is how far `show` has come: to the present end, if None.
    """

    def __init__(self, path: Path, shown: int | None = None) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.shown = os.fstat(self._fd).st_size if shown is None else shown

    def fileno(self) -> int:
        return self._fd

    def tail(self, lines: int = TAIL_LINES) -> list[bytes]:
        """The last lines so far, with their line ends."""
        size = os.fstat(self._fd).st_size
        start = max(0, size - _TAIL_BYTES)
        return os.pread(self._fd, size - start, start).splitlines(keepends=True)[-lines:]

    def trim(self) -> None:
        """Cut a file that has outgrown `OUTPUT_MAX` down to its last lines.

        What is written between the reading of those lines and the cut is lost; the writer itself notices nothing,
        since it appends.
        """
        if os.fstat(self._fd).st_size <= OUTPUT_MAX:
            return
        kept = self.tail()
        os.ftruncate(self._fd, 0)
        os.write(self._fd, b"[readmit cut this file here: it had outgrown its limit]\n" + b"".join(kept))

    def show(self, fd: int) -> None:
        """Copy what is new since the last call (or since opening) to a descriptor, as far as it takes it at once."""
        if os.fstat(self._fd).st_size < self.shown:  # trimmed meanwhile
            self.shown = 0
        while data := os.pread(self._fd, 64 << 10, self.shown):
            taken = offer(fd, data)
            self.shown += taken
            if taken < len(data):
                return

    def keep_tail(self) -> None:
        """Write the last lines to a file beside this one, for the report of a death."""
        try:
            self.path.with_name(self.path.name + ".tail").write_bytes(b"".join(self.tail()))
        except OSError as error:  # a full disk must not hold up a restart
            say(f"the last output of {self.path} is not kept: {error}")

    def close(self) -> None:
        os.close(self._fd)


def prune(folder: Path, slot: str) -> None:
    """Remove all but the newest `KEPT` attempts' files of a slot."""
    ours = re.compile(rf"{re.escape(slot)}-[0-9a-f]{{8}}-\d+\.log")
    logs = [path for path in folder.iterdir() if ours.fullmatch(path.name)]
    logs.sort(key=lambda path: path.stat().st_mtime)
    for log in logs[:-KEPT]:
        for path in (log, log.with_name(log.name + ".tail")):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
