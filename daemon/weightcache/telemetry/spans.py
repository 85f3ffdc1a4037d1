"""OpenTelemetry spans, derived from replayed episodes: one trace an episode, its id the episode's.

Every process's spans are made here from what it journaled, also those of processes that were killed, with the times at
which things happened. The same episode always gives the same ids, so exporting it twice does no harm.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.util.types import AttributeValue

from weightcache.episodes import Attempt, Episode, Lookup
from weightcache.journal import span_id
from weightcache.phases import Bounded, Interval
from weightcache.version import VERSION

_SCOPE: Final = InstrumentationScope("weightcache.telemetry", VERSION)


def spans_of(episode: Episode, previous: Episode | None = None) -> list[ReadableSpan]:
    """Every span of a closed episode, parents first.

    Args:
        episode: what to tell.
        previous: the slot's episode before it, if it is remembered: the root links to the engine that was lost.
    """
    return _Trace(episode, previous).spans()


def root_id(episode: str) -> str:
    """The span id of an episode's root."""
    return span_id(episode, "episode")


def attempt_id(episode: str, attempt: int) -> str:
    """The span id of an attempt; `weightcache.journal.Context.traceparent` hands it to the engine."""
    return span_id(episode, "attempt", attempt)


class _Trace:
    def __init__(self, episode: Episode, previous: Episode | None) -> None:
        self._episode = episode
        self._previous = previous
        self._resource = Resource({"service.name": "readmit", "service.version": VERSION, "host.name": episode.node})

    def spans(self) -> list[ReadableSpan]:
        episode = self._episode
        bounded = episode.bounded()
        ids = _interval_ids(episode, bounded)
        spans = [self._root()]
        spans += [self._attempt(attempt, bounded) for attempt in episode.attempts]
        phases: dict[tuple[int | None, int | None, str], str] = {}
        for one, id_ in zip(bounded, ids, strict=True):
            place = (one.interval.attempt, one.interval.rank, one.interval.phase)
            parent = phases.get(place) if one.interval.is_part else None
            spans.append(self._interval(one, id_, parent or self._attempt_or_root(one.interval)))
            if not one.interval.is_part:
                phases[place] = id_
        return spans

    def _attempt_or_root(self, interval: Interval) -> str:
        """The parent of a phase; what comes before an attempt's process is the recovery's."""
        episode = self._episode
        numbers = [attempt.number for attempt in episode.attempts]
        if interval.attempt is not None and interval.attempt in numbers and interval.phase not in ("detect", "backoff"):
            return attempt_id(episode.id, interval.attempt)
        return root_id(episode.id)

    def _root(self) -> ReadableSpan:
        episode = self._episode
        facts = {
            "readmit.slot": episode.slot,
            "readmit.cause": episode.cause,
            "readmit.domain": episode.domain,
            "readmit.path": episode.path,
            "readmit.outcome": episode.outcome,
            "readmit.fault_clock": episode.fault_clock,
            "readmit.verified": episode.verified,
            "readmit.generation": episode.generation,
            "readmit.attempts": len(episode.attempts),
            "readmit.total_seconds": episode.total_s,
            **{f"readmit.phase.{name}_seconds": seconds for name, seconds in episode.phases_s().items()},
            **(_miss(episode.miss) if episode.miss else {}),
        }
        error = None if episode.outcome == "ready" else episode.outcome
        return self._span("recovery", root_id(episode.id), None, episode.fault_ns, episode.end_ns(), facts, error)

    def _attempt(self, attempt: Attempt, bounded: list[Bounded]) -> ReadableSpan:
        episode = self._episode
        begins = [one.interval.begin_ns for one in bounded if one.interval.attempt == attempt.number]
        begin = attempt.started_ns if attempt.started_ns is not None else min(begins, default=episode.fault_ns)
        facts = {
            "readmit.slot": episode.slot,
            "readmit.attempt": attempt.number,
            "readmit.outcome": attempt.outcome,
            "readmit.path": attempt.path,
            "process.pid": attempt.pid,
            "process.exit.code": attempt.exit_code,
            "process.exit.signal": attempt.signal,
            **{f"readmit.starting_state.{name}": value for name, value in (attempt.starting_state or {}).items()},
            **(_miss(attempt.miss) if attempt.miss else {}),
        }
        error = (
            None if attempt.outcome == "ready" else "process_lost" if attempt.outcome == "crashed" else attempt.outcome
        )
        id_ = attempt_id(episode.id, attempt.number)
        end = attempt.ended_ns if attempt.ended_ns is not None else episode.end_ns()
        return self._span("attempt", id_, root_id(episode.id), begin, end, facts, error)

    def _interval(self, bounded: Bounded, id_: str, parent: str) -> ReadableSpan:
        interval = bounded.interval
        facts: dict[str, Any] = {
            "readmit.slot": self._episode.slot,
            "readmit.attempt": interval.attempt,
            "readmit.rank": interval.rank,
            "readmit.unfinished": True if interval.end_ns is None else None,
        }
        if interval.name == "load_weights":
            attempts = (attempt for attempt in self._episode.attempts if attempt.number == interval.attempt)
            for lookup in (it for attempt in attempts for it in attempt.lookups if it.rank == (interval.rank or 0)):
                facts |= {"readmit.lookup": lookup.result, **(_miss(lookup) if lookup.result == "miss" else {})}
        error = interval.error or (None if interval.end_ns is not None else "process_lost")
        return self._span(interval.name, id_, parent, interval.begin_ns, bounded.end_ns, facts, error)

    def _span(
        self, name: str, id_: str, parent: str | None, begin: int, end: int, facts: Mapping[str, Any], error: str | None
    ) -> ReadableSpan:
        attributes = {key: value for key, value in facts.items() if value is not None}
        if error:
            attributes["error.type"] = error
        return ReadableSpan(
            name=name,
            context=_context(self._episode.id, id_),
            parent=_context(self._episode.id, parent) if parent else None,
            resource=self._resource,
            attributes=attributes,
            links=() if parent else self._links(),
            kind=SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, error) if error else Status(),
            start_time=begin,
            end_time=max(begin, end),
            instrumentation_scope=_SCOPE,
        )

    def _links(self) -> tuple[Link, ...]:
        lost = self._episode.previous
        if lost is None:
            return ()
        number = self._previous.attempt.number if self._previous and self._previous.attempt else None
        id_ = root_id(lost) if number is None else attempt_id(lost, number)
        return (Link(_context(lost, id_), {"link.reason": "previous_run"}),)


def _context(trace: str, span: str) -> SpanContext:
    return SpanContext(int(trace, 16), int(span, 16), is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _miss(miss: Lookup) -> dict[str, AttributeValue | None]:
    """Why an attach missed: on a span there is room for every field that differs, with both values."""
    differences = miss.attributes.get("differences") or []
    return {
        "readmit.miss.reason": miss.reason,
        "readmit.miss.detail": miss.detail,
        "readmit.miss.message": miss.attributes.get("message"),
        "readmit.miss.fields": [str(difference.get("field")) for difference in differences] or None,
        "readmit.miss.differences": [json.dumps(difference) for difference in differences] or None,
    }


def _interval_ids(episode: Episode, bounded: list[Bounded]) -> list[str]:
    """An id for each interval; the same name on one rank of one attempt is told apart by its turn."""
    turns: dict[tuple[object, ...], int] = {}
    ids = []
    for interval, _ in bounded:
        key = (interval.attempt, interval.rank, interval.name)
        turns[key] = turn = turns.get(key, 0) + 1
        ids.append(span_id(episode.id, "phase", *key, turn))
    return ids
