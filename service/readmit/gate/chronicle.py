"""The journal as the gate sees it: whose engine runs where, what a recovery is waiting for, what the gate has to add.

Writing goes through one thread, so that a database that is busy holds up neither a request nor the opening of the gate;
events carry the time at which they happened, and keep their order.
"""

import asyncio
import sqlite3
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

from readmit.gate.process import Engine
from readmit.gate.records import Records
from readmit.gate.slots import Lease
from weightcache.asked import Asked, Fields
from weightcache.availability import Availability, Outage
from weightcache.episodes import Attempt, Episode, Replay, Slot
from weightcache.errors import ConfigError
from weightcache.journal import Context, Event, Journal, boottime_ns, new_episode_id

HISTORY: Final = 20
"""Recoveries of a slot that expectations rest on."""
NOTICED_APART_NS: Final = 2_000_000_000
"""The keeper and the gate both see an engine die, neither of them always first."""


class _Ahead(NamedTuple):
    """An engine and the attempt that it is, by the keeper's word."""

    engine: Engine
    episode: str
    attempt: int | None
    """None where a full disk kept the journal from the keeper's word of it, and the keeper died."""


class Admission(NamedTuple):
    """An engine that was let in, and the digest of the golden answers that it had given; None where there were none."""

    engine: Engine
    probe_set: str | None


class Chronicle:
    """Reads and writes one node's journal.

    Args:
        path: the journal, or None: then nothing is known and nothing is kept.
        node: what this node is called in it.
        slots: the names of the gate's slots.
        records: the keeper's, for what a busy database keeps from the journal.
    """

    def __init__(self, path: Path | None, node: str, slots: Sequence[str], records: Records) -> None:
        context = Context(node or Context.from_environment().node)
        self.node = context.node
        self.replay = Replay(keep=HISTORY * len(slots))
        self.replay.slots.update((slot, Slot(slot)) for slot in slots)
        self.availability = Availability()
        self.override: Event | None = None
        """What was last said of an operator's override before this gate began."""
        self.drained: set[str] = set()
        """The slots that an operator had drained, and not taken back, before this gate began."""
        self.outages: deque[Outage] = deque(maxlen=HISTORY)
        """Times in which no slot of the node was ready, the latest last; `availability` has the one that lasts."""
        self.failure: str | None = None
        """Why the journal could not be read at the last attempt."""
        self._slots = slots
        self._records = records
        self.rewound = False
        """Whether the past has been read."""
        self._reader = Journal(path, context)
        self._writer = Journal(path, context)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="chronicle")
        self._closed: dict[str, str] = {}
        """The episode of each slot that this gate closed last; the journal may say so later."""
        self._told: dict[str, tuple[str | None, int | None]] = {}
        """The episode and attempt whose engine the following tell of, by slot."""
        self._generations: dict[str, dict[int, str]] = {}
        self._mapped: dict[str, set[str]] = {}
        self._weights: dict[str, dict[str, Any]] = {}
        self._admitted: dict[str, Admission] = {}
        self._asked = Asked()

    @property
    def asked(self) -> dict[str, dict[int, Fields]]:
        """What each rank of each of the gate's slots asked the cache for last."""
        return {slot: self._asked.slots.get(slot, {}) for slot in self._slots}

    @property
    def kept(self) -> bool:
        """Whether there is a journal at all."""
        return self._reader.path is not None

    def rewind(self) -> bool:
        """Read what matters of the past, the latest recoveries of each slot; False when the journal cannot be read.

        This may take long; it may run in another thread, and until it is done `poll` does nothing.
        """
        try:
            self.replay.position = min((self._start_of_history(slot) for slot in self._slots), default=0)
            self._catch_up()
            self.override = next(iter(self._reader.query("WHERE kind = 'override' ORDER BY id DESC LIMIT 1")), None)
            self.drained = {slot for slot in self._slots if self._was_drained(slot)}
        except (sqlite3.Error, ConfigError) as error:  # ConfigError: a newer version writes it
            self.failure = str(error)
            return False
        self.rewound = True
        return True

    def poll(self) -> bool:
        """Take in what is new; returns whether anything was. Cheap when nothing is."""
        if not self.rewound:
            return False
        try:
            found = self._reader.last_id() > self.replay.position and self._catch_up()
        except (sqlite3.Error, ConfigError) as error:
            self.failure = str(error)
            return False
        self.failure = None
        return found

    def engine(self, slot: str) -> Engine | None:
        """The living process that the keeper runs in a slot, None if there is none."""
        if (ahead := self._ahead(slot)) is not None:
            return ahead.engine
        attempt = self._attempt(slot)
        if attempt is None or attempt.pid is None or attempt.start_ticks is None:
            return None
        engine = Engine(attempt.pid, attempt.start_ticks)
        return engine if engine.alive else None

    def is_given_up(self, slot: str) -> bool:
        """Whether the keeper has stopped trying to start a slot's engine, of its own accord."""
        last = self.replay.slots[slot].last
        gave_up = last is not None and last.outcome == "abandoned" and not last.stopped
        return gave_up and self.episode(slot) is None

    def generation(self, slot: str) -> str | None:
        """The weights that a slot's engine mapped or published: one generation, or one a rank joined by ``+``."""
        ranks = self._generations.get(slot, {}) if self._is_told(slot) else {}
        return "+".join(ranks[rank] for rank in sorted(ranks)) or None

    def weights(self, slot: str) -> Mapping[str, Any]:
        """What is known of the weights that a slot's engine runs on: fields of its `CacheConfig`."""
        return self._weights.get(slot, {}) if self._is_told(slot) else {}

    def mapped(self, slot: str) -> set[str]:
        """The resident generations that a slot's engine mapped, and did not itself load from disk."""
        return self._mapped.get(slot, set()) if self._is_told(slot) else set()

    def admitted(self, slot: str) -> "Admission | None":
        """The latest engine of a slot that was let in, by this gate or one before it."""
        return self._admitted.get(slot)

    def context(self, slot: str) -> Context:
        """Where an event of this slot happens: in whatever episode and attempt it is in."""
        if (ahead := self._ahead(slot)) is not None:
            known = self.replay.episode(ahead.episode)
            if ahead.episode != self._closed.get(slot) and (known is None or known.is_open):
                return Context(self.node, slot, ahead.episode, ahead.attempt)
        episode = self.episode(slot)
        if episode is None:
            return Context(self.node, slot)
        return Context(self.node, slot, episode.id, episode.attempt.number if episode.attempt is not None else None)

    def episode(self, slot: str) -> Episode | None:
        """The open episode of a slot."""
        episode = self.replay.slots[slot].episode
        return None if episode is not None and episode.id == self._closed.get(slot) else episode

    def elapsed_s(self, slot: str) -> float | None:
        """How old the open episode of a slot is."""
        episode = self.episode(slot)
        return None if episode is None else episode.age_s(self.replay.clock.now())

    def expected_s(self, slot: str, foreseen: str | None) -> float | None:
        """How long the open recovery of this slot is going to take, as starts by its path usually do: the median.

        What went by before its engine was started counts as it was; how long others took to be noticed does not.
        None without history, and without a recovery: an engine that a new gate only verifies takes no start's length.

        Args:
            foreseen: the path it will take, as far as that is known before the engine says so.
        """
        episode = self.episode(slot)
        if episode is None:
            return None
        path, past = episode.path if episode.path != "unknown" else foreseen, self._recovered(slot)
        alike = [(it.end_ns() - began_ns) / 1e9 for it in past if it.path == path and (began_ns := _begun_ns(it))]
        if not alike:
            return None
        running = episode.attempt is not None and episode.attempt.ended_ns is None
        began_ns = (_begun_ns(episode) if running else None) or self.replay.clock.now()
        return (began_ns - episode.fault_ns) / 1e9 + statistics.median(alike)

    def last_path(self, slot: str) -> str | None:
        """The path of a slot's latest recovery."""
        past = self._recovered(slot)
        return past[-1].path if past else None

    def verification_s(self, slot: str) -> float:
        """How long an engine of this slot usually takes to answer all golden questions; 0 without history."""
        took = [it.phases_s().get("semantic_verify", 0.0) for it in self._recovered(slot)]
        return statistics.median(took) if took else 0.0

    def _recovered(self, slot: str) -> list[Episode]:
        return [it for it in self.replay.episodes if it.slot == slot and it.outcome == "ready" and it.attempts]

    def write(
        self, slot: str, kind: str, name: str, attributes: Mapping[str, Any] | None = None, at_ns: int | None = None
    ) -> None:
        """Add an event of a slot."""
        self._submit(kind, name, attributes, at_ns, self.context(slot))

    def write_override(self, name: str, facts: Mapping[str, Any]) -> None:
        """Add that an override was ``set`` or ``lifted``."""
        self._submit("override", name, facts, None, Context(self.node))

    def open_episode(
        self, slot: str, cause: str, fault_ns: int | None, *, fault_clock: str = "last_correct_answer", **facts: Any
    ) -> None:
        """Open an episode for an engine that lives but does not answer, or answers wrongly; none if one is open.

        The fault is dated back, as a rule to the last correct answer: nobody knows that it came later.
        """
        self.poll()
        if self.episode(slot) is not None:
            return
        last = self.replay.slots[slot].last
        now = boottime_ns()
        where = Context(self.node, slot, new_episode_id())
        facts |= {
            "cause": cause,
            "fault_boottime_ns": fault_ns or now,
            "fault_clock": fault_clock,
            "previous": last and last.id,
        }
        self._submit("episode_open", cause, facts, now, where)
        self._submit("phase_begin", "detect", None, fault_ns or now, where)

    def close_episode(self, slot: str, verified: bool, at_ns: int) -> None:
        """Close the slot's open episode, and its attempt: the engine answers since ``at_ns``.

        Nothing to do without one, or when its fault is younger than the answer.
        """
        self.poll()
        episode = self.episode(slot)
        if episode is None or self._boottime_ns(episode.fault_ns) > at_ns:
            return
        if episode.attempt is not None and episode.attempt.outcome is None:
            self.write(slot, "attempt_end", "ready", at_ns=at_ns)
        facts = {"verified": verified, "generation": self.generation(slot)}
        self.write(slot, "episode_close", "ready", facts, at_ns=at_ns)
        self._closed[slot] = episode.id

    def fault(self, slot: str, lost_ns: int) -> Episode | None:
        """The open episode of a slot for whose fault the gate took it out of service, at boottime ``lost_ns``."""
        self.poll()
        episode = self.episode(slot)
        if episode is None or self._boottime_ns(episode.fault_ns) > lost_ns + NOTICED_APART_NS:
            return None
        return episode

    def take_over(self, slot: str, lease: Lease, fault: Episode, took_ns: int, proved_ns: int) -> None:
        """Write down that a standby took over: an episode of its own, by path ``standby``.

        The service's recovery is over with it. That of the engine which failed, ``fault``, goes on.

        Args:
            slot: the standby.
            lease: by which it was ready.
            fault: what it took over from.
            took_ns: boottime since which requests went to it.
            proved_ns: boottime of its first correct answer after that.
        """
        last = self.replay.slots[slot].last
        where = Context(self.node, slot, new_episode_id())
        fault_ns = min(self._boottime_ns(fault.fault_ns), took_ns)
        facts = {
            "cause": fault.cause,
            "fault_boottime_ns": fault_ns,
            "fault_clock": fault.fault_clock,
            "previous": last and last.id,
            "instead_of": {"slot": fault.slot, "episode": fault.id},
        }
        ended = {"verified": lease.verified, "generation": lease.generation, "path": "standby"}
        self._submit("episode_open", fault.cause, facts, took_ns, where)
        for phase, began_ns, ended_ns in (("detect", fault_ns, took_ns), ("semantic_verify", took_ns, proved_ns)):
            self._submit("phase_begin", phase, None, began_ns, where)
            self._submit("phase_end", phase, None, ended_ns, where)
        self._submit("episode_close", "ready", ended, proved_ns, where)

    def _boottime_ns(self, placed_ns: int) -> int:
        """The boottime of a time of the replay's clock."""
        return boottime_ns() - (self.replay.clock.now() - placed_ns)

    async def flushed(self) -> None:
        """Wait until everything written so far is in the journal or its spool."""
        await asyncio.wrap_future(self._thread.submit(lambda: None))

    def close(self) -> None:
        """Write what is left and let go of the journal."""
        self._thread.shutdown(wait=True)
        self._writer.close()
        self._reader.close()

    def _submit(
        self, kind: str, name: str, attributes: Mapping[str, Any] | None, at_ns: int | None, context: Context
    ) -> None:
        at = boottime_ns() if at_ns is None else at_ns
        self._thread.submit(self._writer.append, kind, name, attributes, at_ns=at, context=context)

    def _ahead(self, slot: str) -> _Ahead | None:
        """The living engine that the keeper has written down and the journal does not tell of yet."""
        record, attempt = self._records.of(slot), self._attempt(slot)
        if record is None or not (record.pid and record.start_ticks and record.episode):
            return None
        engine = Engine(record.pid, record.start_ticks)
        if attempt is not None and engine == (attempt.pid, attempt.start_ticks):
            return None
        return _Ahead(engine, record.episode, record.attempt) if engine.alive else None

    def _is_told(self, slot: str) -> bool:
        """Whether the journal tells of the weights of a slot's engine, be it in an episode whose beginning it lost."""
        ahead = self._ahead(slot)
        return ahead is None or (ahead.episode, ahead.attempt) == self._told.get(slot)

    def _attempt(self, slot: str) -> Attempt | None:
        # An episode that the gate opened itself has no attempt of its own yet: the engine is still the last one's.
        known = self.replay.slots[slot]
        if known.episode is not None and known.episode.attempt is not None:
            return known.episode.attempt
        return known.last.attempt if known.last is not None else None

    def _catch_up(self) -> bool:
        events = self._reader.events(self.replay.position)
        for event in events:
            change = self.replay.feed(event)
            if (outage := self.availability.feed(event, self.replay, change)) is not None:
                self.outages.append(outage)
            self._asked.learn(event)
            self._note_weights(event)
            self._note_admission(event)
        return bool(events)

    def _start_of_history(self, slot: str) -> int:
        clause = "WHERE slot = ? AND kind = 'episode_open' ORDER BY id DESC LIMIT 1 OFFSET ?"
        oldest = "WHERE slot = ? AND kind = 'episode_open' ORDER BY id LIMIT 1"
        events = self._reader.query(clause, slot, HISTORY) or self._reader.query(oldest, slot)
        return events[0].id - 1 if events else self._reader.last_id()

    def _was_drained(self, slot: str) -> bool:
        """Whether the last word on a slot, but for gates that came and went, was an operator's to drain it."""
        events = self._reader.query("WHERE slot = ? AND kind = 'slot_state' ORDER BY id DESC LIMIT 20", slot)
        words = ((event.name, event.attributes.get("reason")) for event in events)
        last = next((word for word in words if word[1] not in ("gate_started", "drain")), None)
        return last == ("draining", "operator_drain")

    def _note_admission(self, event: Event) -> None:
        facts = event.attributes
        if event.kind == "slot_state" and event.name == "ready" and event.slot is not None and facts.get("pid"):
            engine = Engine(facts["pid"], facts["start_ticks"])
            self._admitted[event.slot] = Admission(engine, facts.get("probe_set"))

    def _note_weights(self, event: Event) -> None:
        if event.slot is None:
            return
        if event.kind == "attempt_start":
            self._told[event.slot] = event.episode, event.attempt
            self._generations[event.slot], self._mapped[event.slot], self._weights[event.slot] = {}, set(), {}
        elif event.kind in ("lookup", "publish"):
            config = event.attributes.get("config") or {}
            known = {field: value for field, value in config.items() if value is not None}
            self._weights.setdefault(event.slot, {}).update(known)
            if generation := event.attributes.get("generation"):
                self._generations.setdefault(event.slot, {})[event.rank or 0] = generation
                if event.name == "hit":
                    self._mapped.setdefault(event.slot, set()).add(generation)


def _begun_ns(episode: Episode) -> int | None:
    """When the latest engine of a recovery was started."""
    return episode.attempt.started_ns if episode.attempt is not None else None
