"""What the daemon runs: it feeds new events to the accounts, and closed episodes to the sinks of spans."""

import contextlib
import logging
import os
import sqlite3
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server

from weightcache.episodes import Episode, Replay
from weightcache.errors import ConfigError
from weightcache.forecast import Forecast
from weightcache.journal import Event, Journal
from weightcache.journal.database import is_damage
from weightcache.slo import Objectives
from weightcache.telemetry.accounts import Accounts
from weightcache.telemetry.health import Health
from weightcache.telemetry.metrics import Collector, Residents

if TYPE_CHECKING:
    from weightcache.telemetry.exporter import Sink

log = logging.getLogger(__name__)

_BATCH: Final = 500
"""Events fed at a time: a scrape waits for no more."""
_REMEMBERED_EPISODES: Final = 16
"""Closed episodes kept for events that come late and for links between traces."""


class Telemetry:
    """The node's exporter.

    Args:
        journal: the journal; telemetry reads it through a connection of its own.
        residents: the registry, or anything that has what `Residents` lists.
        metrics_address: ``HOST:PORT`` of /metrics, None for none.
        spans_path: the file of spans, by default ``spans.jsonl`` beside the journal.
        objectives: what is promised.
        forecast: whether the next start of each slot would hit; it learns from the events.
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
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._journal = journal.bound()
        self._writer = journal
        self._address = metrics_address
        self._spans_path = spans_path or (journal.path.with_name("spans.jsonl") if journal.path else None)
        self._environ = environ
        self._health = Health()
        self._replay = Replay(keep=_REMEMBERED_EPISODES)
        self._forecast = forecast
        objectives = objectives or Objectives()
        self._accounts = Accounts(objectives)
        self._collector = Collector(self._replay, self._accounts, residents, self._health, objectives, forecast)
        self.registry = CollectorRegistry()
        self.registry.register(self._collector)
        ProcessCollector(registry=self.registry)
        self._stepping = threading.Lock()
        self._sinks: list[Sink] | None = None
        self._server: tuple[WSGIServer, threading.Thread] | None = None
        self._complaint = ""

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
                found=str(error),
                remedy="Choose another one with --metrics (a port of 0 takes any)",
            ) from error

    def step(self) -> None:
        """Take in what is new in the journal. What its storage refuses is said once and tried again the next time."""
        with self._stepping:
            complaint = self._try_to_advance()
        if complaint and complaint != self._complaint:
            log.warning("the journal cannot be read: %s", complaint)
        self._complaint = complaint
        health = self._health
        health.spool_bytes, health.lost = self._journal.spool_bytes(), self._writer.lost
        health.degraded = bool(complaint or health.spool_bytes or health.lost)

    def close(self) -> None:
        """Take in the last events, hand over what can be handed over in 2 s, and stop serving."""
        self.step()
        for sink in self._sinks or ():
            sink.close()
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()
            self._server = None
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
        except ConfigError as error:
            self._collector.caught_up.set()  # nothing to wait for: only another release can read this journal
            return str(error)
        except (sqlite3.Error, OSError) as error:
            return str(error)
        return ""

    def _advance(self) -> None:
        with contextlib.suppress(sqlite3.OperationalError):  # busy: the spools wait, and their size says so
            self._journal.merge_spools()
        last = self._journal.last_id()
        if last < self._replay.position:
            self._replay.position = 0  # another journal is in its place
        if self._sinks is None and self._spans_path is not None:
            # Not at the top: importing OpenTelemetry takes as long as a daemon's restart may in all.
            from weightcache.telemetry.exporter import sinks

            self._sinks = sinks(self._spans_path, last, self._health, self._environ)
        if not self._collector.caught_up.is_set():
            self._catch_up(last)
        while events := self._journal.events(self._replay.position, limit=_BATCH):
            self._feed(events)
        self._journal.checkpoint()

    def _catch_up(self, last: int) -> None:
        """Replay the past. Probes, of which there are by far the most, are only counted, and by SQLite."""
        for result, count in self._journal.tally("probe", last).items():
            self._accounts.probes.step(result, by=count)
        past = "WHERE id > ? AND id <= ? AND kind != 'probe' ORDER BY id LIMIT ?"
        while events := self._journal.query(past, self._replay.position, last, _BATCH):
            self._feed(events)
        self._replay.position = last
        self._collector.caught_up.set()

    def _feed(self, events: list[Event]) -> None:
        closed: list[tuple[int, Episode]] = []
        with self._collector.lock:
            for event in events:
                change = self._replay.feed(event)
                self._accounts.feed(event, self._replay, change)
                if self._forecast is not None:
                    self._forecast.learn(event)
                if change.closed is not None:
                    closed.append((event.id, change.closed))
        for position, episode in closed:
            behind = [sink for sink in self._sinks or () if sink.position < position]
            if behind:
                from weightcache.telemetry.spans import spans_of

                spans = spans_of(episode, self._replay.episode(episode.previous or ""))
                for sink in behind:
                    sink.export(position, spans)

    def _salvage(self, error: sqlite3.Error) -> None:
        aside = self._journal.salvage(self._replay.position)
        self._health.salvages += 1
        log.error("the journal is damaged (%s); it is kept as %s, and what could be read of it goes on", error, aside)
