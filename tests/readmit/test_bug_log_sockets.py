"""Field failures of memory, daemons and sockets (bug log B05 to B19, B32 to B35), met by the shipped commands.

One daemon serves them all. Each case provokes a fault and starts a command; then its exit status, the step of every
counter on ``/metrics`` and every row in the journal are held against what the case says. Nothing else may have moved.
"""

import os
import struct
from typing import NamedTuple

import msgspec
import pytest
from tests.readmit import faults
from tests.readmit.faults import ENGINE, GREETING, STRANGER, WORKER, Fault, Row, Stage, frame, impostor, peer, saying

from weightcache import messages
from weightcache.frames import encode

INSISTING = "readmit.cli engine {model} --port 0 --socket {socket} --weight-cache=daemon"
STATUS = "readmit.cli cache status --socket {socket} --json"
RELEASE = "readmit.cli cache release --all --socket {socket} --json"

Books = tuple[dict[str, int], list[Row]]
"""Steps of counters, and rows of the journal."""


class Case(NamedTuple):
    """A fault, a command that meets it, and what must come of that.

    Attributes:
        fault: provokes it.
        command: meets it.
        status: its exit status.
        word: of what it says.
        books: what is counted and journaled.
        resident: whether the model's weights are there before.
        in_hub_cache: whether the model is named by the hub cache's folder.
        limits: of the command's process; see `tests.readmit.forked`.
    """

    fault: Fault
    command: str
    status: int
    word: str
    books: Books
    resident: bool = True
    in_hub_cache: bool = False
    limits: dict[str, int] | None = None


def missed(reason: str, detail: str = "", *, replaced: bool = False, then: str = "", because: str = "") -> Books:
    """One miss; ``then`` the weights are ``published``, in place of others or not, or that has ``failed``."""
    told = " ".join(filter(None, ("misses", reason, detail)))
    steps, rows = {"lookups miss": 1, told: 1}, [_row("lookup", "miss", reason, detail)]
    if replaced:
        steps["releases replaced"] = 1
        rows.insert(0, _row("release", "replaced"))
    if then:
        steps[f"publishes {then}"] = 1
        rows += [_row("publish", "begin"), _row("publish", then, *because.split())]
    return steps, rows


def hit(refused: str = "", count: int = 1) -> Books:
    """One hit, whoever was refused meanwhile."""
    steps, _ = nothing(refused, count) if refused else ({}, [])
    return {"lookups hit": 1, **steps}, [_row("lookup", "hit")]


def nothing(refused: str = "", count: int = 1) -> Books:
    """No attach at all, whoever was refused."""
    return ({f"connections_refused {refused}": count} if refused else {}), []


def after(rows: list[Row], books: Books) -> Books:
    """The same, after what the fault itself is counted as."""
    return {**books[0], **{_COUNTED[row[:2]]: 1 for row in rows if row[:2] in _COUNTED}}, [*rows, *books[1]]


def _row(kind: str, name: str, reason: str = "", detail: str = "") -> Row:
    return kind, name, reason or None, detail or None


_COUNTED = {
    ("process", "started"): "daemon_starts started",
    ("release", "released"): "releases released",
    ("publish", "published"): "publishes published",
}
STARTED, EXITED = _row("process", "started"), _row("process", "exited")
RELEASED, PUBLISHED = _row("release", "released"), _row("publish", "published")

PICKLE = b"cposix\nsystem\n(S'touch marker'\ntR."
LATER = msgspec.msgpack.encode({"type": "hello", "version": "9.9", "protocol": 2, "news": [1]})

CASES = {
    "B05 main names a commit that never came": Case(
        faults.moved_to_nothing, WORKER, 1, "never downloaded", missed("fingerprint", "revision"),
        in_hub_cache=True,
    ),
    "B07 a manifest that is none": Case(
        impostor(saying(GREETING), faults.offering_nonsense), WORKER, 1, "not published", missed("manifest_invalid")
    ),
    "B08 released under an engine": Case(faults.in_use, RELEASE, 2, "in use", nothing()),
    "B08 released by force": Case(
        faults.in_use, f"{RELEASE} --force", 0, "released", after([RELEASED], nothing())
    ),
    "B10 no room for the arena": Case(
        faults.nothing_wrong, WORKER, 1, "bytes", missed("absent", then="failed", because="resource memory"),
        resident=False, limits={"file_limit": 5 << 19},
    ),
    "B11 killed, and started again": Case(
        faults.killed_and_back, WORKER, 0, "",
        after([STARTED], missed("residency_lost", "keeper_lost", then="published")),
    ),
    "B12 another daemon with pids of its own": Case(faults.second_daemon, WORKER, 0, "", hit()),
    "B13 asked to end twice": Case(
        faults.ended_and_back, WORKER, 0, "",
        after([EXITED, STARTED], missed("residency_lost", "keeper_lost", then="published")),
    ),
    "B10 no descriptor for the arena": Case(
        faults.nothing_wrong, ENGINE, 1, "Raise the limit of open files", missed("resource", "descriptors"),
        limits={"open_files": 9},
    ),
    "B14 a socket of yesterday": Case(faults.nobody_listens, WORKER, 1, "nobody listens", missed("refused")),
    "B14 a load under way, which fails": Case(
        faults.somebody_loads, WORKER, 0, "", after([RELEASED], missed("daemon_loading", then="published"))
    ),
    "B15 no socket": Case(faults.nobody_there, WORKER, 1, "no weight cache daemon", missed("no_daemon")),
    "B15 accepts and leaves": Case(impostor(saying()), WORKER, 1, "hung up", missed("protocol")),
    "B15 garbage": Case(impostor(saying(b"HTTP/1.1 400\r\n\r\n")), ENGINE, -15, "from disk", missed("protocol")),
    "B15 dies half way": Case(
        impostor(saying(GREETING), saying(b"rdm1\0\0")), ENGINE, -15, "broke off", missed("daemon_died")
    ),
    "B16 a path too long": Case(faults.too_deep, INSISTING, 78, "107", nothing()),
    "B18 rewritten in place, its time restored": Case(
        faults.other_bytes, WORKER, 0, "",
        missed("fingerprint", "checkpoint_digest", replaced=True, then="published"),
    ),
    "B19 a buffer that nobody saved": Case(
        faults.without_a_buffer, WORKER, 1, "inv_freq",
        after([RELEASED, PUBLISHED], missed("state_unrestorable")),
    ),
    "B32 a daemon that is stopped": Case(faults.stopped, INSISTING, 1, "in time", missed("timeout")),
    "B33 silent, dribbling and deaf": Case(faults.silent_dribbling_and_deaf, WORKER, 0, "", hit("timeout", 3)),
    "B33 4 GiB": Case(peer(struct.pack(">4sI", b"rdm1", 2**32 - 1)), WORKER, 0, "", hit("protocol")),
    "B33 a crowd": Case(faults.crowd, STATUS, 2, "busy", nothing("timeout")),
    "B34 a pickle from a client": Case(peer(frame(PICKLE)), WORKER, 0, "", hit("protocol")),
    "B34 a pickle from a daemon": Case(impostor(saying(frame(PICKLE))), WORKER, 1, "schema", missed("protocol")),
    "B34 a later client": Case(peer(frame(LATER)), WORKER, 0, "", hit("protocol_version")),
    "B34 a later daemon": Case(
        impostor(saying(encode(messages.Welcome("9", "x", protocol=2)))), WORKER, 1, "another version",
        missed("protocol_version"),
    ),
    "B35 a stranger": Case(
        faults.open_to_strangers, WORKER, 1, "uid 12345 may not", nothing("peer_refused"), limits={"uid": STRANGER}
    ),
    "B35 a stranger's socket": Case(faults.strangers_socket, WORKER, 1, "uid 12345", missed("peer_refused")),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_fault_has_its_exit_status_its_counter_and_its_row(stage: Stage, name: str) -> None:
    if os.getuid() != 0:
        pytest.fail("other users and namespaces take root")
    case = CASES[name]
    stage.model = stage.in_hub_cache if case.in_hub_cache else stage.folder
    stage.reset(resident=case.resident)
    with stage.books(*case.books), case.fault(stage) as path:
        done = stage.run(case.command, path, **(case.limits or {}))
    assert done.status == case.status, done.said
    assert case.word in done.said
    assert "Traceback" not in done.said


def test_after_all_that_no_counter_has_a_label_more(stage: Stage) -> None:
    """B31: every reason that came up was there at 0 from the start."""
    assert stage.counters().keys() == stage.series
