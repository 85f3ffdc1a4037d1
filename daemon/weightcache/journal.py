"""The journal: an append-only event log, written directly by every process that has something to say.

One SQLite file in WAL mode on a local file system holds the events of a node. State is replayed from it, never
stored. The event that starts a thing is written before the thing starts; a death is closed by whoever survives it.

An append waits at most `BUSY_LIMIT_S` for the database and then goes to the process's own spool file beside it, which
the daemon merges later: telemetry never blocks a recovery. ``synchronous=NORMAL`` survives the death of any process,
not the loss of power.

What each kind of event carries (``name``; ``attributes``):

================  ===================================================================================================
episode_open      cause; fault_boottime_ns, fault_clock (``exit``, ``last_correct_answer``, ``start``, ``command``),
                  previous (episode id or None)
episode_close     outcome; verified (bool), generation
attempt_start     empty; command, starting_state
attempt_end       outcome; exit_code, signal
phase_begin/_end  phase, or ``phase.part``; on an end ``error`` when the phase failed
lookup            ``hit`` or ``miss``; mode, reason, detail, differences, generation, bytes, message
publish           ``begin``, ``published``, ``failed``; config (every field), generation, bytes, publisher, reason
release           ``released``, ``evicted``, ``replaced``, ``lost``; generation, bytes
lease_open/close  empty; generation, lease, pid
slot_state        the state entered; previous, reason, pid, start_ticks, generation
probe             ``correct``, ``wrong``, ``late``, ``error``; seconds, expected, found
process           ``started``, ``spawned``, ``adopted``, ``readopted``, ``exited``; process, pid, start_ticks,
                  exit_code, signal
quarantine        ``set`` or ``lifted``; generation, reason
override          ``set`` or ``lifted``; reason, ttl_s, user
================  ===================================================================================================

An episode's id is 32 hexadecimal digits: it is the id of its OpenTelemetry trace as well.
"""

import contextlib
import fcntl
import json
import os
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from weightcache.vocabulary import EVENT_KINDS

SCHEMA_VERSION: Final = 1
BUSY_LIMIT_S: Final = 0.05
"""How long an append waits for another writer before it goes to the spool."""

_SCHEMA = """
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
"""
_COLUMNS = "boot_id, boottime_ns, wall_ns, node, slot, episode, attempt, rank, kind, name, attributes"
_INSERT = f"INSERT INTO events ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_SELECT = f"SELECT id, {_COLUMNS} FROM events"


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


@dataclass(frozen=True)
class Context:
    """Where in the world an event happens; passed to child processes by environment."""

    node: str
    slot: str | None = None
    episode: str | None = None
    attempt: int | None = None
    rank: int | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> "Context":
        """Read ``READMIT_NODE``, ``_SLOT``, ``_EPISODE``, ``_ATTEMPT`` and ``_RANK``; the node defaults to the host's name."""
        attempt, rank = environ.get("READMIT_ATTEMPT"), environ.get("READMIT_RANK")
        return cls(
            node=environ.get("READMIT_NODE") or os.uname().nodename,
            slot=environ.get("READMIT_SLOT") or None,
            episode=environ.get("READMIT_EPISODE") or None,
            attempt=int(attempt) if attempt else None,
            rank=int(rank) if rank else None,
        )

    def to_environment(self) -> dict[str, str]:
        """The variables that make `from_environment` give this context, W3C trace context included."""
        pairs = {
            "READMIT_NODE": self.node,
            "READMIT_SLOT": self.slot,
            "READMIT_EPISODE": self.episode,
            "READMIT_ATTEMPT": self.attempt,
            "READMIT_RANK": self.rank,
            "TRACEPARENT": self.traceparent(),
        }
        return {name: str(value) for name, value in pairs.items() if value is not None}

    def traceparent(self) -> str | None:
        """The W3C ``traceparent`` of the current attempt, or None outside an episode."""
        if self.episode is None:
            return None
        return f"00-{self.episode}-{span_id(self.episode, 'attempt', self.attempt or 0)}-01"


def span_id(*parts: object) -> str:
    """A span id, 16 hexadecimal digits, that is the same whenever the same span is derived again."""
    import hashlib  # not at the top: only processes that write spans or start children need it

    return hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).hexdigest()


def new_episode_id() -> str:
    """A fresh episode (and trace) id: 32 hexadecimal digits."""
    return os.urandom(16).hex()


def boottime_ns() -> int:
    """Nanoseconds since boot, suspend included: the clock that all processes of a node share."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """The kernel's id of this boot; two boottimes compare only within one boot."""
    global _boot_id  # noqa: PLW0603 - constant for the life of the kernel, read once
    if _boot_id is None:
        _boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return _boot_id


_boot_id: str | None = None


@dataclass
class Timing:
    """How long a phase took; ``seconds`` is set when the phase ends."""

    began_ns: int
    seconds: float = 0.0


class Journal:
    """A writer and reader of one node's journal.

    Args:
        path: the SQLite file, or None for a journal that writes nothing (phases are still timed).
        context: what every event of this process carries unless `append` says otherwise.
        checkpoints: True in the one process (the daemon) that moves the WAL into the database.

    A journal never raises because of its storage: what the database does not take in time goes to the spool, and what
    the spool does not take either is kept in `lost` as a count and said once on stderr.
    """

    def __init__(self, path: Path | None, context: Context | None = None, *, checkpoints: bool = False) -> None:
        self.path = path
        self.context = context or Context.from_environment()
        self.spooled = 0
        self.lost = 0
        self._checkpoints = checkpoints
        self._connection: sqlite3.Connection | None = None
        self._pid = 0
        self._lock = threading.Lock()

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> "Journal":
        """The journal that ``READMIT_JOURNAL`` names, or a silent one."""
        path = environ.get("READMIT_JOURNAL")
        return cls(Path(path) if path else None, Context.from_environment(environ))

    def bound(self, **changes: Any) -> "Journal":
        """A journal on the same file whose events carry another slot, episode, attempt or rank."""
        return Journal(self.path, replace(self.context, **changes), checkpoints=self._checkpoints)

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
            name: see the table at the top of this module.
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
            json.dumps(attributes or {}, separators=(",", ":")),
        )
        with self._lock:
            try:
                self._connect().execute(_INSERT, row)
            except sqlite3.Error:
                self._spool(row)

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
        """Events that a SQL clause (``WHERE ... ORDER BY ...``) selects.

        Raises:
            sqlite3.Error: the database cannot be read.
        """
        if self.path is None or not self.path.exists():
            return []
        with self._lock:
            rows = self._connect().execute(f"{_SELECT} {clause}", parameters).fetchall()
        return [Event(*row[:-1], json.loads(row[-1])) for row in rows]

    def last_id(self) -> int:
        """The id of the newest event, 0 in an empty journal. Cheap enough to poll."""
        if self.path is None or not self.path.exists():
            return 0
        with self._lock:
            (last,) = self._connect().execute("SELECT coalesce(max(id), 0) FROM events").fetchone()
        return int(last)

    def merge_spools(self) -> int:
        """Move what processes spooled into the database; returns the number of events moved."""
        moved = 0
        if self.path is None:
            return moved
        for spool in sorted(_spool_folder(self.path).glob("*.jsonl")):
            with open(spool, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                rows = [json.loads(line) for line in file if line.endswith(b"\n")]
                with self._lock:
                    connection = self._connect()
                    try:
                        connection.execute("BEGIN IMMEDIATE")
                        connection.executemany(_INSERT, rows)
                        connection.execute("COMMIT")
                    except sqlite3.Error:
                        if connection.in_transaction:
                            connection.execute("ROLLBACK")
                        break  # still busy or read-only: the spool keeps what it holds
                spool.unlink()
                moved += len(rows)
        return moved

    def spool_bytes(self) -> int:
        """How much waits in spool files; above 0 the journal is degraded."""
        if self.path is None:
            return 0
        total = 0
        for spool in _spool_folder(self.path).glob("*.jsonl"):
            with contextlib.suppress(FileNotFoundError):  # merged meanwhile
                total += spool.stat().st_size
        return total

    def close(self) -> None:
        """Close the connection; the next call opens it again."""
        with self._lock:
            if self._connection is not None and self._pid == os.getpid():
                self._connection.close()
            self._connection = None

    def _connect(self) -> sqlite3.Connection:
        # A connection must not cross a fork: its locks belong to the parent.
        if self._connection is not None and self._pid == os.getpid():
            return self._connection
        assert self.path is not None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise sqlite3.OperationalError(str(error)) from error
        connection = sqlite3.connect(self.path, timeout=BUSY_LIMIT_S, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")
            if not self._checkpoints:
                connection.execute("PRAGMA wal_autocheckpoint=0")
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version == 0:
                connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;")
        except sqlite3.Error:
            connection.close()
            raise
        self._connection, self._pid = connection, os.getpid()
        return connection

    def _spool(self, row: tuple[object, ...]) -> None:
        assert self.path is not None
        folder = _spool_folder(self.path)
        line = json.dumps(row, separators=(",", ":")).encode() + b"\n"
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            while True:
                descriptor = os.open(folder / f"{os.getpid()}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
                    if os.fstat(descriptor).st_nlink == 0:
                        continue  # the daemon merged and removed it between open and lock
                    os.write(descriptor, line)
                    self.spooled += 1
                    return
                finally:
                    os.close(descriptor)
        except OSError as error:
            if self.lost == 0:
                print(f"readmit: the journal {self.path} takes no events, nor does its spool: {error}", file=sys.stderr)
            self.lost += 1


def _spool_folder(path: Path) -> Path:
    return path.with_name(path.name + ".spool")
