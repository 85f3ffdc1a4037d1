"""Follows the output of a slot's attempts, and writes what it says into the journal."""

import os
import re
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from readmit.config import split_address
from readmit.observe.engines import looks, table_for
from readmit.observe.markers import Finding, Reading, Table
from weightcache.episodes import Attempt, Replay
from weightcache.journal import Context, Journal, boottime_ns

LOOK_S: Final = 0.05
_READ_BYTES: Final = 1 << 20
_LINE_CHARACTERS: Final = 1 << 16
_COLOURS: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Observer:
    """One slot's observer.

    Args:
        journal: of the node.
        node: what it is called there.
        slot: whose engine is observed.
        command: the engine's command, which says what engine it is.
        output: the folder of the engines' output.
        address: where the engine will listen.
        engine: what engine it is, where the command does not say it.
    """

    def __init__(
        self,
        journal: Path,
        node: str,
        slot: str,
        command: Sequence[str],
        output: Path,
        address: str | None,
        engine: str | None = None,
    ) -> None:
        self._journal = Journal(journal, Context(node, slot))
        self._replay = Replay(keep=2)
        self._slot = slot
        self._table = table_for(command, engine)
        self._looks = self._table is not None and looks(self._table, command, engine)
        own = self._table.own if self._table else None
        self._silent = own is not None and re.search(own, " ".join(command)) is not None
        """The engine tells the journal itself."""
        self._output = output
        self._address = address

    def run(self) -> None:
        """Follow one attempt after the other, for ever."""
        seen: tuple[str, int] | None = None
        while True:
            attempt = self._attempt()
            if attempt is not None and (attempt.episode.id, attempt.number) != seen:
                seen = attempt.episode.id, attempt.number
                self.follow(attempt)
            time.sleep(LOOK_S)

    def follow(self, attempt: Attempt) -> None:
        """Follow one attempt until it is ready, has ended, or nothing more can be learned of it."""
        where = Context(self._journal.context.node, self._slot, attempt.episode.id, attempt.number)
        if self._table is None:
            self._first_byte(attempt, where)
        elif not self._silent:
            self._read_lines(self._table, attempt, where)

    def _read_lines(self, table: Table, attempt: Attempt, where: Context) -> None:
        reading = Reading(table, self._looks)
        began_ns = self._executed_ns(attempt)
        file = self._output / f"{self._slot}-{attempt.episode.id[:8]}-{attempt.number}.log"
        position, rest = 0, ""
        while not reading.over:
            lines, position, rest, at_ns = lines_of(file, position, rest)
            for line in lines:
                for finding in reading.line(line):
                    first = finding.kind == "phase_begin" and finding.name == table.first
                    self._write(finding, where, began_ns if first else at_ns)
            if self._gone(attempt):
                return
            if not lines:
                if not reading.known and self._listens():  # its lines go elsewhere, or are another version's
                    break
                time.sleep(LOOK_S)
        if not reading.known:
            self._first_byte(attempt, where)

    def _listens(self) -> bool:
        try:
            self._connect().close()
        except OSError:
            return False
        return True

    def _connect(self) -> socket.socket:
        """A connection to the engine.

        Raises:
            OSError: nobody listens there, or where is not known.
        """
        if self._address is None:
            raise ConnectionRefusedError
        host, port = split_address(self._address)
        return socket.create_connection((host or "127.0.0.1", port), timeout=5)

    def _first_byte(self, attempt: Attempt, where: Context) -> None:
        """For an engine of which nothing is known: from the open port to the first byte of an answer."""
        opened = False
        while self._address is not None and not self._gone(attempt):
            try:
                with self._connect() as connection:
                    if not opened:
                        opened = True
                        self._write(Finding("phase_begin", "server_ready", None), where, None)
                    connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
                    if connection.recv(1):
                        self._write(Finding("phase_end", "server_ready", None), where, None)
                        return
            except OSError:  # nobody listens yet, or does not answer in time
                pass
            time.sleep(LOOK_S)

    def _gone(self, attempt: Attempt) -> bool:
        """Whether an attempt is over, or another one has begun."""
        return self._attempt() is not attempt or attempt.ended_ns is not None

    def _attempt(self) -> Attempt | None:
        if self._journal.last_id() > self._replay.position:
            self._replay.catch_up(self._journal)
        slot = self._replay.slots.get(self._slot)
        return slot.episode.attempt if slot and slot.episode and slot.episode.attempt else None

    def _executed_ns(self, attempt: Attempt) -> int:
        """When the engine's program began: boottime."""
        condition = "WHERE slot = ? AND episode = ? AND attempt = ? AND kind = 'phase_end' AND name = 'spawn'"
        for _ in range(100):
            if events := self._journal.query(condition, self._slot, attempt.episode.id, attempt.number):
                return events[0].boottime_ns
            time.sleep(LOOK_S)
        return boottime_ns()

    def _write(self, finding: Finding, where: Context, at_ns: int | None) -> None:
        context = where._replace(rank=finding.rank)
        facts = {"mode": "observed", "reason": finding.reason, "detail": finding.detail, "message": finding.message}
        about = {name: value for name, value in facts.items() if value} if finding.kind == "lookup" else None
        self._journal.append(finding.kind, finding.name, about, at_ns=at_ns, context=context)


def lines_of(file: Path, position: int, rest: str) -> tuple[list[str], int, str, int]:
    """Whole lines beyond a position, the new position, what is left of a line, and when the last was written."""
    try:
        with file.open("rb") as output:
            stat = os.fstat(output.fileno())
            if stat.st_size < position:  # it was cut
                position, rest = 0, ""
            output.seek(position)
            data = output.read(_READ_BYTES)
    except FileNotFoundError:
        return [], position, rest, boottime_ns()
    text = rest + _COLOURS.sub("", data.decode(errors="replace"))
    *lines, rest = text.replace("\r", "\n").split("\n")
    if len(rest) > _LINE_CHARACTERS:  # no line of a table is as long: its end says nothing
        lines, rest = [*lines, rest], ""
    # Read late, it was still written when the file last changed.
    ago_ns = max(0, time.time_ns() - stat.st_mtime_ns)
    return [line[:_LINE_CHARACTERS] for line in lines], position + len(data), rest, boottime_ns() - ago_ns
