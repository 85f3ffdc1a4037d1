"""The suspicion: engines fail again and again on the same resident weights, which may carry the fault.

Read from the journal when weights are asked for, so that it holds without a gate, and over the deaths of daemons. What
counts is an engine that had these weights and ended by a fault of its own before it was ever verified to answer
correctly. That somebody ended it from outside (SIGKILL, also for memory, or a signal to stop) says nothing of weights.
"""

import os
import signal
import sqlite3
from dataclasses import dataclass, field
from typing import Any, Final

from weightcache.errors import ConfigError
from weightcache.journal import Context, Event, Journal
from weightcache.process import Exit

FAILURES: Final = 2
"""Failed attempts in a row after which weights are handed to nobody."""

PROVEN_S: Final = 600.0
"""An engine that nobody verifies has proven its weights when it lived so long with them."""

_LOOK_BACK: Final = 100
"""Events of the slot that are looked at: those of some ten attempts."""

_OUTSIDE: Final = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM})
_NO_FAULT: Final = frozenset({0, os.EX_CONFIG, *(128 + number for number in _OUTSIDE)})


@dataclass
class _Attempt:
    """One engine process, as far as the events read so far tell."""

    generations: set[str] = field(default_factory=set)
    leased: Event | None = None
    ended: Event | None = None

    @property
    def fault(self) -> str | None:
        """How it ended by its own fault, or None."""
        facts: dict[str, Any] = self.ended.attributes if self.ended else {}
        end = Exit(facts.get("exit_code"), facts.get("signal"))
        innocent = not end.known or end.signal in _OUTSIDE or end.code in _NO_FAULT
        return None if innocent else str(end)

    @property
    def lived_s(self) -> float:
        """Seconds it had the weights; 0 where a reboot lies between."""
        if self.ended is None or self.leased is None or self.ended.boot_id != self.leased.boot_id:
            return 0.0
        return (self.ended.boottime_ns - self.leased.boottime_ns) / 1e9


def failures(journal: Journal, generation: str, client: Context) -> list[str]:
    """How the latest attempts of a client's slot failed on a generation, if they failed in a row; latest first.

    Args:
        journal: where leases and the ends of engines are.
        generation: what is asked for.
        client: who asks; its own attempt does not count.
    """
    clause = "WHERE slot = ? AND kind IN ('process', 'lease_open', 'episode_close') ORDER BY id DESC LIMIT ?"
    try:
        events = journal.query(clause, client.slot, _LOOK_BACK)
        lifted = journal.query("WHERE kind = 'quarantine' AND id > ?", events[-1].id if events else 0)
    except (sqlite3.Error, ConfigError):
        return []  # weights are served without it
    trusted = max((each.id for each in lifted if each.attributes.get("generation") == generation), default=0)
    attempts: dict[tuple[str | None, int | None], _Attempt] = {}
    for event in events:
        if event.id < trusted or (event.kind == "episode_close" and event.attributes.get("verified")):
            break
        attempt = attempts.setdefault((event.episode, event.attempt), _Attempt())
        if event.kind == "lease_open":
            attempt.generations.add(str(event.attributes.get("generation")))
            attempt.leased = event
        elif event.name == "exited" and event.attributes.get("process") == "engine":
            attempt.ended = event
    attempts.pop((client.episode, client.attempt), None)
    return _in_a_row(list(attempts.values()), generation)


def _in_a_row(attempts: list[_Attempt], generation: str) -> list[str]:
    found: list[str] = []
    for attempt in attempts:
        if not attempt.generations:
            continue  # it never got that far
        if generation not in attempt.generations or attempt.lived_s >= PROVEN_S:
            break
        if attempt.fault is not None:
            found.append(attempt.fault)
    return found
