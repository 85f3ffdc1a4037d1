"""What can be said about one slot now: for a refused client, for ``/api/status`` and for the page."""

from dataclasses import asdict, dataclass
from typing import Any, Final

from readmit.gate.chronicle import Chronicle
from readmit.gate.slots import Slot
from readmit.gate.verifier import Finding
from weightcache.journal import boottime_ns

_ON_ITS_WAY: Final = ("engine_started", "port_open")
"""Why a slot is not ready, without a recovery, where nothing has been found against its engine: the gate is new."""


@dataclass(frozen=True)
class Outlook:
    """One slot, with the recovery it is in. Times are in seconds.

    Attributes:
        reason: why the slot is in its state; ``given_up`` where the keeper starts no engine any more.
        phase: of the open recovery, as the engine marks it; the slot's state where nobody marks.
        since_s: how long the slot has been in its state.
        elapsed_s: how old the open recovery is; without one, `since_s`.
        expected_s: how long recoveries of this slot by this path usually take, None without history.
        ready_in_s: when it may be ready, as far as history says; None where it says nothing, or nobody is at it.
        last_correct_s: how long ago all golden answers were correct, None for never.
        message: what the latest verification found wrong.
    """

    slot: str
    url: str
    state: str | None
    reason: str
    phase: str | None
    since_s: float
    elapsed_s: float
    expected_s: float | None
    ready_in_s: float | None
    last_correct_s: float | None
    in_flight: int
    verified: bool | None
    generation: str | None
    pid: int | None
    start_ticks: int | None
    episode_id: str | None
    cause: str | None
    path: str | None
    miss_reason: str | None
    message: str

    @classmethod
    def of(cls, slot: Slot, finding: Finding | None, chronicle: Chronicle, foreseen: str | None) -> "Outlook":
        """The outlook for a slot whose recovery is ``foreseen`` to take a certain path, None where nobody knows."""
        now = boottime_ns()
        episode, elapsed = chronicle.episode(slot.name), chronicle.elapsed_s(slot.name)
        marked = episode.phase if episode is not None else None
        since = (now - slot.since_ns) / 1e9
        expected = chronicle.expected_s(slot.name, foreseen)
        ready_in = None if expected is None or elapsed is None else max(0.0, expected - elapsed)
        if not chronicle.rewound or (episode is None and slot.reason in _ON_ITS_WAY):
            ready_in = chronicle.verification_s(slot.name)
        return cls(
            slot=slot.name,
            url=slot.url,
            state=slot.state,
            reason="given_up" if slot.state == "starting" and chronicle.is_given_up(slot.name) else slot.reason,
            phase=marked.phase if marked is not None else slot.state,
            since_s=_rounded(since),
            elapsed_s=_rounded(since if elapsed is None else elapsed),
            expected_s=_rounded(expected),
            ready_in_s=_rounded(ready_in),
            last_correct_s=_rounded(None if slot.last_correct_ns is None else (now - slot.last_correct_ns) / 1e9),
            in_flight=slot.in_flight,
            verified=slot.lease.verified if slot.lease is not None else None,
            generation=slot.lease.generation if slot.lease is not None else chronicle.generation(slot.name),
            pid=slot.engine.pid if slot.engine is not None else None,
            start_ticks=slot.engine.start_ticks if slot.engine is not None else None,
            episode_id=episode.id if episode is not None else None,
            cause=episode.cause if episode is not None else None,
            path=episode.path if episode is not None else None,
            miss_reason=episode.reason if episode is not None else None,
            message=finding.message if finding is not None else "",
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-compatible."""
        return asdict(self)


def _rounded(seconds: float | None) -> Any:
    return None if seconds is None else round(seconds, 3)
