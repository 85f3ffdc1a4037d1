"""Spool files: where a process leaves events that the database does not take in time.

A spool file has one writer, and its name is never used twice. How far a file was merged is kept in the database, by the
transaction that merged it, so that whoever is killed half way leaves every event there exactly once. Nobody ever waits
for the lock on a file: its holder may be stopped.
"""

import contextlib
import fcntl
import json
import os
import sqlite3
from pathlib import Path
from typing import BinaryIO

from weightcache.journal.boot import boottime_ns
from weightcache.journal.database import INSERT, Row, transaction

_REQUIRED = (0, 1, 2, 3, 8, 9, 10)  # the columns that are not null


class Spool:
    """The spool files of one journal.

    Args:
        folder: where they are; made when first needed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file: Path | None = None
        self._pid = 0

    def write(self, row: Row) -> None:
        """Keep one event for later.

        Raises:
            OSError: the file system takes nothing.
        """
        line = json.dumps(row, separators=(",", ":")).encode() + b"\n"
        while self._file is None or self._pid != os.getpid() or not _append(self._file, line):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._file = self.folder / f"{boottime_ns():020d}-{os.getpid()}-{os.urandom(4).hex()}.jsonl"
            self._pid = os.getpid()
            os.close(os.open(self._file, os.O_CREAT | os.O_EXCL, 0o600))

    def waiting_bytes(self) -> int:
        """How much waits to be merged."""
        total = 0
        for path in self.folder.glob("*.jsonl"):
            with contextlib.suppress(FileNotFoundError):  # merged meanwhile
                total += path.stat().st_size
        return total

    def merge(self, connection: sqlite3.Connection) -> int:
        """Move what waits into the database, in order of time; returns the number of events moved.

        A file with a line that is no event is kept as ``*.damaged`` once its other lines are moved.

        Raises:
            sqlite3.Error: the database takes nothing; the files keep what they hold.
            OSError: the files cannot be read or removed; what is in the database already will not be merged again.
        """
        with contextlib.ExitStack() as stack:
            files = [held for path in sorted(self.folder.glob("*.jsonl")) if (held := _hold(stack, path))]
            if not files:
                return 0
            with transaction(connection):
                rows, damaged = [], set()
                for path, file in files:
                    file.seek(_merged_bytes(connection, path))
                    lines = [line for line in file if line.endswith(b"\n")]  # a torn last line was never said
                    read = [row for line in lines if (row := _row(line))]
                    rows += read
                    if len(read) < len(lines):
                        damaged.add(path)
                    connection.execute("REPLACE INTO merged VALUES (?, ?)", (path.name, file.tell()))
                connection.executemany(INSERT, _by_time(rows))
            for path, _ in files:
                if path in damaged:
                    path.rename(path.with_suffix(".damaged"))
                else:
                    path.unlink()
            connection.executemany("DELETE FROM merged WHERE spool = ?", [(path.name,) for path, _ in files])
            return len(rows)


def _append(path: Path, line: bytes) -> bool:
    """Whether the line is in the file; it is not when a merge holds the file or removed it."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        status = os.fstat(descriptor)
        if status.st_nlink == 0:
            return False
        if os.write(descriptor, line) < len(line):
            os.ftruncate(descriptor, status.st_size)  # the next line must not be glued to half a one
            raise OSError(f"{path} takes no more: the file system is full")
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


def _hold(stack: contextlib.ExitStack, path: Path) -> tuple[Path, BinaryIO] | None:
    """The file, opened and locked until the stack unwinds; None when somebody else has it or had it."""
    try:
        file = stack.enter_context(path.open("rb"))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (FileNotFoundError, BlockingIOError):
        return None
    return (path, file) if os.fstat(file.fileno()).st_nlink else None


def _merged_bytes(connection: sqlite3.Connection, path: Path) -> int:
    row = connection.execute("SELECT bytes FROM merged WHERE spool = ?", (path.name,)).fetchone()
    return row[0] if row else 0


def _row(line: bytes) -> list[object] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    is_row = isinstance(row, list) and len(row) == 11 and all(isinstance(value, str | int | None) for value in row)
    return row if is_row and all(row[column] is not None for column in _REQUIRED) else None


def _by_time(rows: list[list[object]]) -> list[list[object]]:
    """Rows by boot, and by boottime within a boot."""
    first_wall: dict[object, int] = {}
    for boot, _, wall, *_ in rows:
        assert isinstance(wall, int)
        first_wall[boot] = min(wall, first_wall.get(boot, wall))
    return sorted(rows, key=lambda row: (first_wall[row[0]], row[1]))
