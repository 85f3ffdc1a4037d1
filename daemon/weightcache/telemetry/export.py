"""What the daemon runs: it feeds new events to the books, and closed episodes to the sinks of spans."""

import contextlib
import logging
import os
import socket
import sqlite3
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server

from weightcache.episodes import Episode, Replay
from weightcache.episodes.state import REMEMBERED_EPISODES
from weightcache.errors import ConfigError
from weightcache.forecast import Forecast
from weightcache.journal import Event, Journal
from weightcache.journal.database import is_damage
from weightcache.journal.pruning import PROBES_KEPT_S
from weightcache.slo import KEPT_DAYS, Objectives
from weightcache.telemetry.books import Books
from weightcache.telemetry.health import Health
from weightcache.telemetry.metrics import Collector, Residents
from weightcache.telemetry.shown import Shown

if TYPE_CHECKING:
    from weightcache.telemetry.exporter import Sink

log = logging.getLogger(__name__)

_BATCH: Final = 500
"""Events fed at a time: a scrape waits for no more."""
_SNAPSHOT_EVENTS: Final = 1_000
"""A daemon that starts replays no more events than that, which takes a twentieth of a second."""
_ALIVE_EVERY_S: Final = 60.0
"""How often the journal is told that this boot lasts: so exactly is known later when it ended."""
_PRUNED_EVENTS: Final = 2_000
_PRUNE_EVERY_S: Final = 3_600.0
_FIRST_PRUNE_S: Final = 60.0
_PRUNE_ON_S: Final = 5.0
"""The pause while more is to be pruned: it is work for one core, and nobody waits for it."""


class Telemetry:
    """The node's exporter.

    Args:
        journal: the journal; telemetry reads it through a connection of its own.
        residents: the registry, or anything that has what `Residents` lists.
        metrics_address: ``HOST:PORT`` of /metrics, None for none.
        spans_path: the file of spans, by default ``spans.jsonl`` beside the journal.
        objectives: what is promised.
        forecast: whether the next start of each slot would hit; it learns from the events.
        kept_days: how long events stay in the journal.
        environ: may name an OTLP collector.
    """

    def __init__(
        self,
        journal: Journal,
        residents: Residents,
        metrics_address: str | None = None,
        spans_path: Path | None = None,
        *,
        objectives: Objectives | None = None,
        forecast: Forecast | None = None,
        kept_days: float = KEPT_DAYS,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._journal = journal.bound()
        self._writer = journal
        self._address = metrics_address
        self._spans_path = spans_path or (journal.path.with_name("spans.jsonl") if journal.path else None)
        self._environ = environ
        self._kept_s = kept_days * 86_400
        self._health = Health()
        self._objectives = objectives or Objectives()
        self._forecast = forecast
        self._books = Books(self._objectives)
        self._shown = Shown(journal.path.with_name(journal.path.name + ".shown") if journal.path else None)
        self._collector = Collector(
            self._books.replay, self._books.accounts, residents, self._health, self._objectives, forecast, self._shown
        )
        self.registry = CollectorRegistry()
        self.registry.register(self._collector)
        ProcessCollector(registry=self.registry)
        self._stepping = threading.Lock()
        self._sinks: list[Sink] | None = None
        self._server: tuple[WSGIServer, threading.Thread] | None = None
        self._complaint = ""
        self._snapshot_position = 0
        self._alive_at = time.monotonic() + _ALIVE_EVERY_S
        self._prune_at = time.monotonic() + _FIRST_PRUNE_S

    @property
    def port(self) -> int | None:
        """The port that /metrics is served on."""
        return self._server[0].server_port if self._server else None

    def start(self) -> None:
        """Serve /metrics. Scrapes wait until the first `step` has replayed the past.

        Raises:
            ConfigError: the address is taken, or none.
        """
        if self._address is None:
            return
        host, _, port = self._address.rpartition(":")
        try:
            self._server = start_http_server(int(port), host.strip("[]"), self.registry)
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(
                "metrics_address",
                f"metrics cannot be served on {self._address}",
                expected="HOST:PORT that nobody uses",
                found=(error.strerror or str(error)) if isinstance(error, OSError) else "none",
                remedy="Choose another one with --metrics (a port of 0 takes any)",
            ) from error

    def step(self) -> None:
        """Take in what is new in the journal. What its storage refuses is said once and tried again the next time."""
        with self._stepping:
            complaint = self._try_to_advance()
        if complaint and complaint != self._complaint:
            log.warning(
                "the journal %s cannot be read: %s. Weights are served, events wait in its spool, and /metrics tells "
                "what was known before. Make room there and the folder writable for this user, or name another "
                "journal in READMIT_JOURNAL",
                self._journal.path,
                complaint,
            )
        self._complaint = complaint
        self._collector.unreadable = bool(complaint)
        if time.monotonic() >= self._alive_at:
            self._alive_at = time.monotonic() + _ALIVE_EVERY_S
            self._writer.append("clock", "alive")
        self._writer.flush()
        health = self._health
        health.spool_bytes, health.lost = self._journal.spool_bytes(), self._writer.lost
        health.degraded = bool(complaint or health.spool_bytes or self._writer.waiting or health.lost)

    def close(self) -> None:
        """Take in the last events, hand over what can be handed over in 2 s, and stop serving."""
        self.step()
        if self._collector.caught_up.is_set():
            with (
                self._stepping,
                contextlib.suppress(sqlite3.Error, ConfigError, OSError),
            ):  # the next start replays more
                self._take_snapshot()
        for sink in self._sinks or ():
            sink.close()
        if self._server is not None:
            server, thread = self._server
            # Its thread looks only twice a second whether it is to end, unless its socket wakes it.
            server.socket.shutdown(socket.SHUT_RDWR)
            server.shutdown()
            server.server_close()
            thread.join()
            self._server = None
        self._shown.close()
        self._journal.close()

    def _try_to_advance(self) -> str:
        """Feed what is new; returns what stood in the way."""
        try:
            try:
                self._advance()
            except sqlite3.Error as error:
                if not is_damage(error):
                    raise
                self._salvage(error)
                self._advance()
        except (ConfigError, sqlite3.Error, OSError) as error:
            return str(error)
        return ""

    def _advance(self) -> None:
        with contextlib.suppress(sqlite3.OperationalError):  # busy: the spools wait, and their size says so
            self._journal.merge_spools()
        last = self._journal.last_id()
        if self._sinks is None and self._spans_path is not None:
            # Not at the top: importing OpenTelemetry takes as long as a daemon's restart may in all.
            from weightcache.telemetry.exporter import sinks

            self._sinks = sinks(self._spans_path, last, self._health, self._environ)
        if not self._collector.caught_up.is_set():
            self._resume(last)
        elif last < self._books.replay.position:
            self._books.replay.position = 0  # another journal is in its place
        self._feed_from_journal()
        self._collector.caught_up.set()
        self._journal.checkpoint()
        with contextlib.suppress(sqlite3.OperationalError):  # busy, or no room: another time
            if self._books.replay.position >= self._snapshot_position + _SNAPSHOT_EVENTS:
                self._take_snapshot()
            if time.monotonic() >= self._prune_at:
                self._prune()

    def _resume(self, last: int) -> None:
        """Go on from the snapshot that goes furthest, else from the first event."""
        # Where little happens the base may go further than the latest: what lies between them may be pruned.
        found = [books for books in map(self._restored, ("latest", "base")) if books is not None]
        self._books = max(found, key=lambda books: books.replay.position, default=Books(self._objectives))
        if self._forecast is not None:
            self._books.hand_over(self._forecast)
        self._snapshot_position = self._books.replay.position
        self._collector.show(self._books.replay, self._books.accounts)
        self._shown.load(last)
        self._export_missed()

    def _restored(self, name: str) -> Books | None:
        snapshot = self._journal.snapshot(name)
        if snapshot is None:
            return None
        books = Books(self._objectives)
        try:
            books.restore(snapshot)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            log.error("the journal's snapshot %r is not used, because it does not fit: %r", name, error)
            return None
        return books

    def _feed_from_journal(self) -> None:
        while events := self._journal.events(self._books.replay.position, limit=_BATCH):
            closed: list[tuple[int, Episode]] = []
            with self._collector.lock:
                for event in events:
                    change = self._books.feed(event)
                    if change.closed is not None:
                        closed.append((event.id, change.closed))
            for position, episode in closed:
                self._export(position, episode, self._books.replay)

    def _export(self, position: int, episode: Episode, replay: Replay) -> None:
        behind = [sink for sink in self._sinks or () if sink.position < position]
        if behind:
            from weightcache.telemetry.spans import spans_of

            spans = spans_of(episode, replay.episode(episode.previous or ""))
            for sink in behind:
                sink.export(position, spans)

    def _export_missed(self) -> None:
        """Give sinks the episodes that they had not taken when the snapshot was."""
        until = self._books.replay.position
        behind = min((sink.position for sink in self._sinks or ()), default=until)
        missed: list[Event] = (
            self._journal.query(
                "WHERE kind = 'episode_open' AND episode IN "
                "(SELECT episode FROM events WHERE kind = 'episode_close' AND id > ? AND id <= ?) ORDER BY id LIMIT 1",
                *(behind, until),
            )
            if behind < until
            else []
        )
        if not missed:
            return
        replay = Replay(keep=REMEMBERED_EPISODES)
        replay.position = missed[0].id - 1
        while events := self._journal.query(
            "WHERE id > ? AND id <= ? ORDER BY id LIMIT ?", replay.position, until, _BATCH
        ):
            for event in events:
                closed = replay.feed(event).closed
                if closed is not None:
                    self._export(event.id, closed, replay)

    def _take_snapshot(self) -> None:
        with self._collector.lock:
            snapshot = self._books.snapshot()
        self._journal.keep_snapshot("latest", snapshot)
        self._snapshot_position = snapshot.position

    def _prune(self) -> None:
        """Let the base take in some events of more than a week ago, and delete what is not needed beyond that.

        The base is replayed from the events themselves, not taken from what runs: what goes was counted twice.
        """
        self._prune_at = time.monotonic() + _PRUNE_ON_S  # also if it fails: what runs matters more
        now_ns = time.time_ns()
        recent_ns = now_ns - PROBES_KEPT_S * 1_000_000_000
        base = self._restored("base")
        if base is None:
            base = Books(self._objectives)
            if self._journal.first_id() > 1:  # what told of pruned events is lost; what runs still knows
                base.restore(self._books.snapshot())
        # A wall clock that was wrong must not keep everything that came after.
        events = self._journal.events(base.replay.position, limit=_PRUNED_EVENTS)
        old = next((n for n, event in enumerate(events) if recent_ns <= event.wall_ns <= now_ns), len(events))
        for event in events[:old]:
            base.feed(event)
        if old:
            self._journal.keep_snapshot("base", base.snapshot())
        slots = base.replay.slots.values()
        self._journal.prune(
            base.replay.position,
            now_ns - round(self._kept_s * 1e9),
            open_episodes={slot.episode.id for slot in slots if slot.episode},
            last_episodes={slot.last.id for slot in slots if slot.last},
            slots=[slot.name for slot in slots],
        )
        if old < _PRUNED_EVENTS:
            self._prune_at = time.monotonic() + _PRUNE_EVERY_S

    def _salvage(self, error: sqlite3.Error) -> None:
        aside = self._journal.salvage(self._books.replay.position)
        self._health.salvages += 1
        log.error("the journal is damaged (%s); it is kept as %s, and what could be read of it goes on", error, aside)
        if self._collector.caught_up.is_set():  # what was lost is counted here, and nowhere else
            with self._collector.lock:
                snapshot = self._books.snapshot()
            for name in ("latest", "base"):
                self._journal.keep_snapshot(name, snapshot)
