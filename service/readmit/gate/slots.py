"""The states of a slot, and the lease without which nothing gets in.

::

    starting -> loading -> verifying -> ready -> suspect
                                                   |  `-> loading, verifying: the engine is asked again, or a new one
    any of them -> draining -> stopped
                          `-> starting: an operator has ended the drain

`Slot.open` is the only way into ``ready``, and it takes a `Lease`: proof of who answered what.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from readmit.gate.process import Engine
from weightcache.journal import boottime_ns
from weightcache.vocabulary import SLOT_STATES

TRANSITIONS: Final = {
    None: {"starting"},
    "starting": {"loading", "draining"},
    "loading": {"starting", "verifying", "draining"},
    "verifying": {"starting", "loading", "ready", "suspect", "draining"},
    "ready": {"suspect", "draining"},
    "suspect": {"starting", "loading", "verifying", "draining"},
    "draining": {"stopped", "starting"},
    "stopped": set(),
}
assert set(TRANSITIONS) == {None, *SLOT_STATES}

REVOCATIONS: Final = (
    "engine_exited",
    "engine_replaced",
    "engine_refused",
    "engine_error",
    "hang",
    "wrong_answer",
    "foreign_listener",
    "probes_changed",
    "generation_changed",
    "drain",
    "operator_drain",
    "override_ended",
)
"""Why readiness ends."""


class Lease(NamedTuple):
    """What readiness rests on; it ends when any of this changes.

    Attributes:
        engine: the process that answered; None where no pid can be known (another host).
        generation: the weights it answered from, None where nobody said.
        probe_set: the digest of the probe set, None for a lease without golden answers.
        granted_ns: boottime in nanoseconds.
        overridden: granted by an operator's override, and ending with it.
    """

    engine: Engine | None
    generation: str | None
    probe_set: str | None
    granted_ns: int
    overridden: bool = False

    @property
    def verified(self) -> bool:
        return self.probe_set is not None


@dataclass(frozen=True)
class Transition:
    """One step of the state machine."""

    slot: "Slot"
    previous: str | None
    state: str
    reason: str
    at_ns: int


class ImpossibleTransitionError(RuntimeError):
    """The gate tried to do what the state machine does not allow: an error in the gate."""

    def __init__(self, slot: str, previous: str | None, state: str) -> None:
        self.slot, self.previous, self.state = slot, previous, state
        super().__init__(f"slot {slot} cannot go from {previous} to {state}")


class Slot:
    """One slot's state. Everything here happens on the event loop; nothing waits.

    Args:
        name: as in the journal.
        url: its engine.
        observers: told about every step, in order.
    """

    def __init__(self, name: str, url: str, observers: Sequence[Callable[[Transition], None]] = ()) -> None:
        self.name = name
        self.url = url
        self.state: str | None = None
        self.reason = ""
        self.since_ns = boottime_ns()
        self.engine: Engine | None = None
        self.lease: Lease | None = None
        self.in_flight = 0
        self.last_correct_ns: int | None = None
        self.idle_ns = 0
        """When the last request that was under way ended."""
        self.answered_ns = 0
        """When the latest of those users asked for whom its engine has generated an answer to its end."""
        self.wrong_while_ready = 0
        """Wrong verifications among the last ones since it became ready; above 0 it serves under suspicion."""
        self.doubted = False
        """It answered wrongly among users' requests: another slot gets the next ones, so that it can be asked alone."""
        self.carried: set[Callable[[str], None]] = set()
        """Told why when readiness ends: what is under way to this slot."""
        self._observers = observers

    @property
    def ready(self) -> bool:
        return self.state == "ready"

    @property
    def serves(self) -> bool:
        """Whether requests may go to it: it holds a lease, also while it drains."""
        return self.lease is not None

    def enter(self, state: str, reason: str) -> None:
        """Go to a state other than ``ready``; staying where it is only updates the reason. Draining keeps the lease.

        Raises:
            ImpossibleTransitionError: there is no such step.
        """
        if state == self.state:
            self.reason = reason
            return
        if state == "ready":
            raise ImpossibleTransitionError(self.name, self.state, state)
        self._step(state, reason, self.lease if state == "draining" else None)

    def open(self, lease: Lease) -> None:
        """Become ready. Only ever called with the lease that a correct set of answers has earned.

        Raises:
            ImpossibleTransitionError: the slot is not being verified.
        """
        self.wrong_while_ready = 0
        self._step("ready", "verified" if lease.verified else "override" if lease.overridden else "unverified", lease)

    def withdraw(self, reason: str) -> None:
        """Drain on an operator's order: requests under way go on, others go elsewhere.

        Raises:
            ImpossibleTransitionError: it drains already.
        """
        self._step("draining", reason, None)

    def revoke(self, reason: str) -> bool:
        """End readiness at once; returns whether there was any."""
        if self.ready:
            self._step("suspect", reason, None)
        elif self.lease is not None:  # draining
            self.lease, self.reason = None, reason
        else:
            return False
        for tell in tuple(self.carried):
            tell(reason)
        return True

    def _step(self, state: str, reason: str, lease: Lease | None) -> None:
        if state not in TRANSITIONS[self.state]:
            raise ImpossibleTransitionError(self.name, self.state, state)
        step = Transition(self, self.state, state, reason, boottime_ns())
        self.state, self.reason, self.since_ns, self.lease = state, reason, step.at_ns, lease
        self.doubted = False
        for observer in self._observers:
            observer(step)
