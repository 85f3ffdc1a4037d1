"""The journal's SQLite file."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from weightcache.errors import ConfigError

SCHEMA_VERSION: Final = 2
BUSY_LIMIT_S: Final = 0.05
"""How long an append waits for another writer before it goes to the spool."""

WAL_KEPT_BYTES: Final = 1 << 20
"""What a WAL is cut to once it was moved into the database; it must be less than what makes `Journal` move it."""

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS events (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    boot_id TEXT NOT NULL,
    boottime_ns INTEGER NOT NULL,
    wall_ns INTEGER NOT NULL,
    node TEXT NOT NULL,
    slot TEXT,
    episode TEXT,
    attempt INTEGER,
    rank INTEGER,
    kind TEXT NOT NULL,
    name TEXT NOT NULL,
    attributes TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS events_by_slot ON events (slot, kind, id);
CREATE TABLE IF NOT EXISTS merged (spool TEXT PRIMARY KEY, bytes INTEGER NOT NULL);
"""
_COLUMNS: Final = "boot_id, boottime_ns, wall_ns, node, slot, episode, attempt, rank, kind, name, attributes"
INSERT: Final = f"INSERT INTO events ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
INSERT_WITH_ID: Final = f"INSERT INTO events (id, {_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
SELECT: Final = f"SELECT id, {_COLUMNS} FROM events"

Row = tuple[str, int, int, str, str | None, str | None, int | None, int | None, str, str, str]
"""An event as stored: everything but its id, attributes as JSON text."""
CACHE_KIB: Final = 256
"""Pages a connection keeps. SQLite's own 2 MiB would grow the keeper by an eighth, for rows that are read once."""


class Event(NamedTuple):
    """One row of the journal. Times are nanoseconds; ``boottime_ns`` counts from the boot named by ``boot_id``."""

    id: int
    boot_id: str
    boottime_ns: int
    wall_ns: int
    node: str
    slot: str | None
    episode: str | None
    attempt: int | None
    rank: int | None
    kind: str
    name: str
    attributes: dict[str, Any]

    @classmethod
    def from_row(cls, row: tuple[Any, ...]) -> "Event":
        """An event from a row of `SELECT`."""
        *columns, attributes = row
        return cls._make([*columns, json.loads(attributes)])


def connect(path: Path) -> sqlite3.Connection:
    """Open a journal's file, made or brought to the present schema if need be.

    Raises:
        ConfigError: a newer version of this program wrote the file.
        sqlite3.Error: it cannot be opened now.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise sqlite3.OperationalError(str(error)) from error
    connection = sqlite3.connect(path, timeout=BUSY_LIMIT_S, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute(f"PRAGMA cache_size=-{CACHE_KIB}")
        # An append must not pay for moving the WAL into the database: `Journal.checkpoint` does it, in one process.
        connection.execute("PRAGMA wal_autocheckpoint=0")
        connection.execute(f"PRAGMA journal_size_limit={WAL_KEPT_BYTES}")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version > SCHEMA_VERSION:
            raise ConfigError(
                "journal_version",
                f"the journal {path} was written by a newer version",
                expected=f"schema {SCHEMA_VERSION} or older",
                found=f"schema {version}",
                remedy="Upgrade readmit, or name another journal in READMIT_JOURNAL",
            )
        if version < SCHEMA_VERSION:
            connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;")
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Write all of it or nothing, with no other writer in between.

    Raises:
        sqlite3.Error: another writer has the database.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # SQLite itself rolls back where the disk is full
            connection.execute("ROLLBACK")
        raise


def is_damage(error: sqlite3.Error) -> bool:
    """Whether an error says that the file's content is broken, rather than busy, full or forbidden."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
