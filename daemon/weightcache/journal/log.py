"""A writer and reader of one node's journal."""

import contextlib
import json
import os
import sqlite3
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from weightcache.errors import ConfigError
from weightcache.journal.boot import boot_id, boottime_ns
from weightcache.journal.context import Context
from weightcache.journal.database import BUSY_LIMIT_S, INSERT, SELECT, Event, Row, connect
from weightcache.journal.spool import Spool
from weightcache.vocabulary import EVENT_KINDS

if TYPE_CHECKING:
    from weightcache.journal.snapshots import Snapshot

_LEFT_ALONE_S: Final = 1.0
"""How long a database that was busy is left alone: a recovery must not wait `BUSY_LIMIT_S` once for every event."""
_WAL_LIMIT_BYTES: Final = 4 << 20
_WAITING_MOST: Final = 1000
"""Events that wait in memory; about a megabyte, and a busy gate's of ten minutes."""
_of_parents: Final[list[sqlite3.Connection]] = []
"""Connections that came across a fork. Closing one here would touch locks and files that the parent uses."""


class Timing:
    """How long a phase took; ``seconds`` is set when the phase ends."""

    def __init__(self, began_ns: int) -> None:
        self.began_ns = began_ns
        self.seconds = 0.0


class Journal:
    """One process's access to the journal; threads may share it, and it works on both sides of a fork.

    Args:
        path: the SQLite file, or None for a journal that writes nothing (phases are still timed).
        context: what every event of this process carries unless `append` says otherwise.
        checkpoints: True in the one process (the daemon) that moves the WAL into the database.

    Writing never raises because of storage: what the database does not take in time goes to the spool. What the spool
    does not take either, because the disk is full, is said once on stderr and waits in memory for the next event that
    is taken; what is too much for that is counted in `lost`.
    """

    def __init__(self, path: Path | None, context: Context | None = None, *, checkpoints: bool = False) -> None:
        self.path = path
        self.context = context or Context.from_environment()
        self.spooled = 0
        self.lost = 0
        self.waiting: deque[Row] = deque()
        """What neither database nor spool has taken yet."""
        self._checkpoints = checkpoints
        self._spool = Spool(path.with_name(path.name + ".spool")) if path else None
        self._connection: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None
        self._left_alone_until_ns = 0
        self._complained = False
        self._pid = os.getpid()
        self._lock = threading.Lock()

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> "Journal":
        """The journal that ``READMIT_JOURNAL`` names, or a silent one."""
        path = environ.get("READMIT_JOURNAL")
        return cls(Path(path) if path else None, Context.from_environment(environ))

    def bound(self, **changes: Any) -> "Journal":
        """A journal on the same file whose events carry another slot, episode, attempt or rank."""
        return Journal(self.path, self.context._replace(**changes), checkpoints=self._checkpoints)

    def append(
        self,
        kind: str,
        name: str = "",
        attributes: Mapping[str, Any] | None = None,
        *,
        at_ns: int | None = None,
        context: Context | None = None,
    ) -> None:
        """Write one event.

        Args:
            kind: one of `EVENT_KINDS`.
            name: see the table at the top of this package.
            attributes: JSON-compatible facts.
            at_ns: boottime in nanoseconds, for an event noticed after it happened; now if None.
            context: overrides the journal's own context.
        """
        if kind not in EVENT_KINDS:
            raise ValueError(f"event kind {kind!r} is not one of {EVENT_KINDS}")
        if self.path is None:
            return
        now_boot, now_wall = boottime_ns(), time.time_ns()
        at = now_boot if at_ns is None else at_ns
        where = context or self.context
        row = (
            boot_id(),
            at,
            now_wall - (now_boot - at),
            where.node,
            where.slot,
            where.episode,
            where.attempt,
            where.rank,
            kind,
            name,
            json.dumps(attributes or {}, separators=(",", ":"), default=str),
        )
        if not self._insert(row, closes=kind == "episode_close"):
            self._keep(row)

    @contextlib.contextmanager
    def phase(self, name: str, *, began_ns: int | None = None) -> Iterator[Timing]:
        """Mark a phase (``load_weights``) or a part of one (``load_weights.map``) around a block.

        Args:
            name: the phase.
            began_ns: boottime at which it really began, when that was before the block.
        """
        timing = Timing(boottime_ns() if began_ns is None else began_ns)
        self.append("phase_begin", name, at_ns=timing.began_ns)
        failure: BaseException | None = None
        try:
            yield timing
        except BaseException as error:
            failure = error
            raise
        finally:
            ended = boottime_ns()
            timing.seconds = (ended - timing.began_ns) / 1e9
            self.append("phase_end", name, {"error": type(failure).__name__} if failure else None, at_ns=ended)

    def events(self, after: int = 0, *, limit: int = -1) -> list[Event]:
        """Events with an id above ``after``, in the order of their ids."""
        return self.query("WHERE id > ? ORDER BY id LIMIT ?", after, limit)

    def query(self, clause: str, *parameters: object) -> list[Event]:
        """Events that a SQL clause (``WHERE ... ORDER BY ...``) selects. What waits in spools is not among them.

        Raises:
            ConfigError: a newer version wrote the file.
            sqlite3.Error: the database cannot be read.
        """
        if self.path is None or not self.path.exists():
            return []
        with self._guard():
            rows = self._connect().execute(f"{SELECT} {clause}", parameters).fetchall()
        return [Event.from_row(row) for row in rows]

    def last_id(self) -> int:
        """The highest id that an event ever had, 0 in a new journal. Cheap enough to poll."""
        if self.path is None or not self.path.exists():
            return 0
        with self._guard():
            row = self._connect().execute("SELECT seq FROM sqlite_sequence WHERE name = 'events'").fetchone()
        return int(row[0]) if row else 0

    def first_id(self) -> int:
        """The lowest id that an event has, 0 where there is none."""
        first = self.query("ORDER BY id LIMIT 1")
        return first[0].id if first else 0

    def snapshot(self, name: str) -> "Snapshot | None":
        """What was kept under a name, None where nothing was that can be trusted.

        Raises:
            ConfigError, sqlite3.Error: as `query`.
        """
        if self.path is None or not self.path.exists():
            return None
        from weightcache.journal import snapshots

        with self._guard():
            return snapshots.read(self._connect(), name)

    def furthest_snapshot(self) -> "Snapshot | None":
        """The snapshot that leaves the fewest events to be read."""
        # Where little happens the base may go further than the latest: what lies between them may be pruned.
        found = (self.snapshot(name) for name in ("latest", "base"))
        return max(filter(None, found), key=lambda it: it.position, default=None)

    def keep_snapshot(self, name: str, snapshot: "Snapshot") -> None:
        """Keep what events added up to, in the one process that does so.

        Raises:
            ConfigError, sqlite3.Error: the database takes nothing now.
        """
        from weightcache.journal import snapshots

        if self.path is not None:
            with self._guard():
                snapshots.write(self._connect(), name, snapshot)

    def prune(self, until: int, before_wall_ns: int, **stays: Collection[str]) -> int:
        """Delete old events, in the one process that does so; see `weightcache.journal.pruning.prune`.

        Raises:
            ConfigError, sqlite3.Error: the database takes nothing now.
        """
        from weightcache.journal import pruning

        if self.path is None:
            return 0
        with self._guard():
            return pruning.prune(self._connect(), until, before_wall_ns, **stays)

    def merge_spools(self) -> int:
        """Move what processes spooled into the database; returns the number of events moved.

        Raises:
            ConfigError: a newer version wrote the file.
            sqlite3.Error: the database takes nothing now; the spools keep what they hold.
            OSError: spool files cannot be read or removed.
        """
        if self._spool is None or not self._spool.waiting_bytes():
            return 0
        with self._guard():
            return self._spool.merge(self._connect())

    def spool_bytes(self) -> int:
        """How much waits in spool files; above 0 the journal is degraded."""
        return self._spool.waiting_bytes() if self._spool else 0

    def checkpoint(self) -> None:
        """Move a WAL that has grown into the database, in the one process that does so.

        Raises:
            sqlite3.Error: the database is damaged or full.
        """
        if self.path is None or not self._checkpoints:
            return
        with contextlib.suppress(FileNotFoundError), self._guard():
            if Path(f"{self.path}-wal").stat().st_size >= _WAL_LIMIT_BYTES:
                self._connect().execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def salvage(self, floor: int = 0) -> Path:
        """Set a damaged file aside and go on with its readable part; see `weightcache.journal.salvage`."""
        from weightcache.journal.salvage import salvage

        assert self.path is not None
        with self._guard():
            self._disconnect()
            return salvage(self.path, floor)

    def close(self) -> None:
        """Close the connection; the next call opens it again."""
        self.flush()
        with self._guard():
            self._disconnect()

    def flush(self) -> None:
        """Try again to write what waits in memory."""
        if self.waiting:
            self._insert(None, closes=False)

    def _insert(self, row: Row | None, *, closes: bool) -> bool:
        """Whether the database took the row in time, and all that waited before it."""
        guard = self._guard()
        if boottime_ns() < self._left_alone_until_ns or not guard.acquire(timeout=BUSY_LIMIT_S):
            return False
        try:
            if boottime_ns() < self._left_alone_until_ns:  # another thread found it busy while this one waited
                return False
            connection = self._connect()
            if closes and self._spool:  # an episode is judged by what stands before its end
                self._spool.merge(connection)
            if self.waiting:
                self._insert_waiting(connection)
            if row is not None:
                connection.execute(INSERT, row)
            return True
        except (sqlite3.Error, ConfigError, OSError):
            self._left_alone_until_ns = boottime_ns() + round(_LEFT_ALONE_S * 1e9)
            return False
        finally:
            guard.release()

    def _insert_waiting(self, connection: sqlite3.Connection) -> None:
        rows = list(self.waiting)
        connection.execute("BEGIN IMMEDIATE")
        try:
            connection.executemany(INSERT, rows)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        for _ in rows:
            self.waiting.popleft()

    def _keep(self, row: Row) -> None:
        assert self._spool is not None
        try:
            self._spool.write(row)
            self.spooled += 1
        except OSError as error:
            if len(self.waiting) < _WAITING_MOST:
                self.waiting.append(row)
            else:
                self.lost += 1
            if not self._complained:
                self._complained = True
                self._complain(error)

    def _complain(self, error: OSError) -> None:
        with contextlib.suppress(OSError):  # where stderr is a file on the same disk
            print(
                f"readmit: the journal {self.path} takes no events, nor does its spool: {error}. Recoveries go on; "
                f"the first {_WAITING_MOST} events of each process wait in its memory, and end with it. Make room "
                "there and the folder writable for this user, or name another journal in READMIT_JOURNAL",
                file=sys.stderr,
            )

    def _guard(self) -> threading.Lock:
        """The lock of this process: after a fork the parent's may be held by a thread that is not here."""
        if self._pid != os.getpid():
            if self._connection is not None:
                _of_parents.append(self._connection)
            self._connection, self._lock, self._pid = None, threading.Lock(), os.getpid()
            self.waiting.clear()  # that is for the parent to say
        return self._lock

    def _connect(self) -> sqlite3.Connection:
        assert self.path is not None
        if self._connection is not None and self._file == _identity(self.path):
            return self._connection
        self._disconnect()  # first use, or the file was replaced or removed
        while True:
            before = _identity(self.path)
            connection = connect(self.path)
            self._file = _identity(self.path)
            if before in (None, self._file):
                self._connection = connection
                return connection
            connection.close()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino
