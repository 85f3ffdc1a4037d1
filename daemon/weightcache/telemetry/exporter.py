"""Where spans go: a file beside the journal, and an OTLP collector where the environment names one.

A sink keeps its place, the id of the journal event up to which it has exported, in a small file. What it had not
finished when its process died is exported again by the next one, under the same ids.
"""

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from opentelemetry.sdk.trace import ReadableSpan

from weightcache.telemetry.health import Health
from weightcache.telemetry.otlp_json import encode

log = logging.getLogger(__name__)

_FILE_LIMIT_BYTES: Final = 64 << 20
_QUEUED_EPISODES: Final = 256
_RETRY_PAUSES_S: Final = (1, 2, 4, 8, 15, 30, 60, 60, 60, 60)
_CLOSE_LIMIT_S: Final = 1.5
"""How long the end of the daemon may wait for a collector: less than the 2 s it has in all."""
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


class Sink(Protocol):
    """Takes the spans of closed episodes."""

    @property
    def position(self) -> int:
        """The id of the latest event whose spans it took."""

    def export(self, position: int, spans: Sequence[ReadableSpan]) -> None:
        """Take the spans of the episode that the event with id ``position`` closed. Neither blocks nor raises."""

    def close(self) -> None:
        """Give up what cannot be handed over soon."""


def sinks(spans_path: Path, last_id: int, health: Health, environ: Mapping[str, str] = os.environ) -> list[Sink]:
    """The sinks that the environment asks for.

    Args:
        spans_path: the file of spans.
        last_id: the journal's; where a collector that was never exported to starts, for it is not sent the past.
        health: where they count.
        environ: names the collector, as the OpenTelemetry specification says.
    """
    found: list[Sink] = [FileSink(spans_path, last_id, health)]
    # As the specification of OpenTelemetry's variables has it.
    disabled = environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or environ.get("OTEL_TRACES_EXPORTER") == "none"
    if not disabled and any(environ.get(name) for name in _ENDPOINTS):
        found.append(CollectorSink(spans_path.with_name(spans_path.name + ".otlp-position"), last_id, health))
    return found


class Place:
    """The position of a sink, in a file that is replaced as a whole.

    Args:
        path: the file.
        default: the position where there is none.
        last_id: the journal's; a position beyond it belongs to another journal and counts as 0.
    """

    def __init__(self, path: Path, default: int, last_id: int) -> None:
        self._path = path
        self.value = default
        with contextlib.suppress(FileNotFoundError):
            self.value = int(path.read_text())
        if self.value > last_id:
            self.value = 0

    def move(self, value: int) -> None:
        """Remember a new position.

        Raises:
            OSError: it cannot be written; the old one stands.
        """
        self.value = value
        fresh = self._path.with_name(self._path.name + ".new")
        fresh.write_text(str(value))
        fresh.replace(self._path)


class FileSink:
    """Appends OTLP-JSON lines to a file, one an episode; a full file becomes ``*.1``."""

    name: Final = "file"

    def __init__(self, path: Path, last_id: int, health: Health) -> None:
        self._path = path
        self._health = health
        self._place = Place(path.with_name(path.name + ".position"), 0, last_id)
        health.sinks.append(self.name)
        self._mend()

    @property
    def position(self) -> int:
        return self._place.value

    def export(self, position: int, spans: Sequence[ReadableSpan]) -> None:
        try:
            if self._path.exists() and self._path.stat().st_size > _FILE_LIMIT_BYTES:
                self._path.replace(self._path.with_name(self._path.name + ".1"))
            with self._path.open("a") as file:
                file.write(encode(spans) + "\n")
            self._place.move(position)
            self._health.exported[self.name] += len(spans)
        except OSError as error:
            if not self._health.dropped[self.name]:
                log.warning("%s takes no spans: %s", self._path, error)
            self._health.dropped[self.name] += len(spans)

    def close(self) -> None:
        """Nothing is held back."""

    def _mend(self) -> None:
        """Cut off a last line that its writer did not finish."""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb+") as file:
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)


class _Batch(NamedTuple):
    position: int
    spans: Sequence[ReadableSpan]


class CollectorSink:
    """Sends OTLP over HTTP from a thread of its own, so that a collector that is dead or slow delays nobody."""

    name: Final = "otlp"

    def __init__(self, place: Path, last_id: int, health: Health) -> None:
        self._place = Place(place, last_id, last_id)
        self._queued = self._place.value
        self._health = health
        self._batches: queue.Queue[_Batch | None] = queue.Queue(_QUEUED_EPISODES)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)
        health.sinks.append(self.name)
        self._thread.start()

    @property
    def position(self) -> int:
        return self._queued

    def export(self, position: int, spans: Sequence[ReadableSpan]) -> None:
        try:
            self._batches.put_nowait(_Batch(position, spans))
        except queue.Full:
            self._drop(spans, "its queue is full")
        self._queued = position

    def close(self) -> None:
        self._stop.set()
        with contextlib.suppress(queue.Full):
            self._batches.put_nowait(None)
        self._thread.join(_CLOSE_LIMIT_S)

    def _run(self) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError as error:
            log.error("no spans go to the collector: %s. Install readmit[otlp]", error)
            return
        from opentelemetry.sdk.trace.export import SpanExportResult

        exporter = OTLPSpanExporter()
        while (batch := self._batches.get()) is not None:
            for pause_s in _RETRY_PAUSES_S:
                if exporter.export(batch.spans) is SpanExportResult.SUCCESS:
                    self._health.exported[self.name] += len(batch.spans)
                    break
                if self._stop.wait(pause_s):
                    return  # its place was not moved: the next daemon sends this again
            else:
                self._drop(batch.spans, "it refuses them, or is away for too long")
            try:
                self._place.move(batch.position)
            except OSError as error:
                log.warning("the place of the collector is not kept: %s", error)

    def _drop(self, spans: Sequence[ReadableSpan], why: str) -> None:
        if not self._health.dropped[self.name]:
            log.warning("spans are dropped instead of sent to the collector: %s", why)
        self._health.dropped[self.name] += len(spans)
