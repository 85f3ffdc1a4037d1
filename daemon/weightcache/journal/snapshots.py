"""Snapshots: what a reader made of the events up to some id, so that nobody reads the past twice.

``latest`` is taken now and then; whoever doubts it does without. ``base`` is taken before events are pruned and tells
what those came to: replay begins there. Both are in the journal's own file, so that they go wherever it goes, in a
table that only the daemon knows: writers of any release need not, and `SCHEMA_VERSION` does not count it.
"""

import json
import logging
import sqlite3
from typing import Any, Final, NamedTuple

_FORMAT: Final = 1
_TABLE: Final = (
    "CREATE TABLE IF NOT EXISTS snapshots "
    "(name TEXT PRIMARY KEY, position INTEGER NOT NULL, digest TEXT NOT NULL, state TEXT NOT NULL)"
)
_log: Final = logging.getLogger("weightcache.journal")


class Snapshot(NamedTuple):
    """The state that all events with ids up to ``position`` add up to, as plain data."""

    position: int
    state: dict[str, Any]


def write(connection: sqlite3.Connection, name: str, snapshot: Snapshot) -> None:
    """Put a snapshot in the place of the one of that name.

    Raises:
        sqlite3.Error: the database takes nothing now; the old one stands.
    """
    text = json.dumps({"format": _FORMAT, **snapshot.state}, separators=(",", ":"))
    connection.execute(_TABLE)
    row = (name, snapshot.position, _digest(snapshot.position, text), text)
    connection.execute("REPLACE INTO snapshots VALUES (?, ?, ?, ?)", row)


def read(connection: sqlite3.Connection, name: str) -> Snapshot | None:
    """The snapshot of that name; None where there is none, or none that can be trusted.

    Raises:
        sqlite3.Error: the database cannot be read.
    """
    if not _is_there(connection):
        return None
    row = connection.execute("SELECT position, digest, state FROM snapshots WHERE name = ?", (name,)).fetchone()
    if row is None:
        return None
    position, digest, text = row
    (last,) = connection.execute("SELECT max(seq) FROM sqlite_sequence WHERE name = 'events'").fetchone()
    if digest != _digest(position, text) or position > (last or 0):
        _log.error("the journal's snapshot %r is damaged, and not used", name)
        return None
    state = json.loads(text)
    if state.pop("format") != _FORMAT:
        _log.warning("the journal's snapshot %r was taken by another release, and is not used", name)
        return None
    return Snapshot(position, state)


def copy(source: sqlite3.Connection, target: sqlite3.Connection) -> None:
    """Copy what can be read of one journal's snapshots into another."""
    try:
        rows = source.execute("SELECT * FROM snapshots").fetchall() if _is_there(source) else []
    except sqlite3.DatabaseError as error:
        _log.error("the snapshots of a damaged journal cannot be read: %s", error)
        return
    target.execute(_TABLE)
    target.executemany("REPLACE INTO snapshots VALUES (?, ?, ?, ?)", rows)


def _is_there(connection: sqlite3.Connection) -> bool:
    return connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'snapshots'").fetchone() is not None


def _digest(position: int, text: str) -> str:
    # Not through hashlib, which maps OpenSSL.
    from _blake2 import blake2b

    return blake2b(f"{position} {text}".encode(), digest_size=16).hexdigest()
