"""What to do about a damaged journal: set it aside, and go on with what can be read of it."""

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from weightcache.journal import snapshots
from weightcache.journal.database import INSERT_WITH_ID, SELECT, connect, transaction

_ID_GAP: Final = 1_000
"""Readers keep their place as an event id, so no id may come twice, not even one of an event that was lost."""
_MOST_FAILURES: Final = 10_000
_CHUNK: Final = 4_096


def salvage(path: Path, floor: int = 0) -> Path:
    """Put a journal with the readable events in the place of a damaged one; returns where the damaged file is now.

    Nobody may hold a connection in this process; those of other processes notice that the file was replaced.

    Args:
        path: the journal.
        floor: the highest event id seen so far; new events get higher ones.

    Raises:
        OSError, sqlite3.Error: there is no room for the copy; the damaged file is still in its place.
    """
    aside, copy = path.with_name(f"{path.name}.damaged-{time.time_ns()}"), path.with_name(f"{path.name}.salvage")
    _remove(copy)
    target = connect(copy)
    try:
        with transaction(target):
            last = floor
            for row in _readable_rows(path):
                target.execute(INSERT_WITH_ID, row)
                last = max(last, row[0])
            target.execute("DELETE FROM sqlite_sequence WHERE name = 'events'")
            target.execute("INSERT INTO sqlite_sequence (name, seq) VALUES ('events', ?)", (last + _ID_GAP,))
        _copy_snapshots(path, target)
    finally:
        target.close()
    os.link(path, aside)
    for suffix in ("-wal", "-shm"):  # first: a WAL applied to a file it does not belong to would damage that too
        with contextlib.suppress(FileNotFoundError):
            os.rename(f"{path}{suffix}", f"{aside}{suffix}")
    os.replace(copy, path)
    return aside


def _copy_snapshots(path: Path, target: sqlite3.Connection) -> None:
    source = sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None)
    try:
        snapshots.copy(source, target)
    finally:
        source.close()


def _readable_rows(path: Path) -> Iterator[tuple[Any, ...]]:
    source = sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None)
    try:
        ranges = [(0, _highest_id(source, path))]
        failures = 0
        while ranges and failures < _MOST_FAILURES:
            low, high = ranges.pop()
            if high - low > _CHUNK:
                ranges += [(low + _CHUNK, high), (low, low + _CHUNK)]
                continue
            try:
                yield from source.execute(f"{SELECT} WHERE id > ? AND id <= ? ORDER BY id", (low, high)).fetchall()
            except sqlite3.DatabaseError:
                failures += 1
                if high - low > 1:
                    middle = (low + high) // 2
                    ranges += [(middle, high), (low, middle)]
    finally:
        source.close()


def _highest_id(source: sqlite3.Connection, path: Path) -> int:
    for query in ("SELECT max(id) FROM events", "SELECT seq FROM sqlite_sequence WHERE name = 'events'"):
        with contextlib.suppress(sqlite3.DatabaseError):
            if (row := source.execute(query).fetchone()) and row[0]:
                return int(row[0])
    return path.stat().st_size // 64  # no event is smaller


def _remove(database: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        Path(f"{database}{suffix}").unlink(missing_ok=True)
