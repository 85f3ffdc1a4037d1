"""Which slot requests go to, and which one takes over from it.

One slot is active; the others that are ready stand by. A slot that lost its place does not get it back by being ready
again: it stands by behind its successor, so that one fault moves the traffic once.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, NamedTuple

from readmit.gate.chronicle import Chronicle
from readmit.gate.process import Engine
from readmit.gate.slots import Lease, Slot, Transition
from weightcache.episodes import Episode
from weightcache.journal import boottime_ns

log = logging.getLogger("readmit.gate")

DELIBERATE: Final = frozenset({"drain", "operator_drain", "override_ended", "probes_changed"})
"""Reasons to take a slot out of service that are nobody's fault."""
FAULT_LIMIT_S: Final = 600.0
"""How long it may take until the fault behind a takeover is known: an engine that refuses may turn out to hang."""
_LOOK_S: Final = 0.03


class Takeover(NamedTuple):
    """A slot lost its readiness, by the engine it then had, and another has its place since boottime ``at_ns``."""

    lost: str
    engine: Engine | None
    successor: Slot
    lease: Lease
    at_ns: int


class Succession:
    """The order of the slots of one gate.

    Args:
        slots: in order of preference.
        chronicle: where takeovers are written down.
        prove: waits for a slot's next correct answer; returns whether it came before the slot was lost.
    """

    def __init__(
        self, slots: Sequence[Slot], chronicle: Chronicle, prove: Callable[[Slot], Coroutine[Any, Any, bool]]
    ) -> None:
        self.active: Slot | None = None
        """Where requests go; None while no slot is ready."""
        self._slots = slots
        self._chronicle = chronicle
        self._prove = prove
        self._takeovers: asyncio.Queue[Takeover] = asyncio.Queue()

    def choose(self, tried: Sequence[Slot] = ()) -> Slot | None:
        """The slot that a request goes to: the active one, or another that serves and has not been tried.

        One that is doubted only gets what no other can have.
        """
        active = self.active
        if active is not None and active.serves and active not in tried and not active.doubted:
            return active
        rest = [slot for slot in self._slots if slot.serves and slot not in tried]
        return min(rest, key=lambda slot: (slot.doubted, slot is not active), default=None)

    def follow(self, step: Transition) -> None:
        """Take in a slot's step. The place is passed on in the same moment in which it is lost."""
        if step.slot.ready:
            self.active = self.active or step.slot
        if step.slot is not self.active or step.slot.serves:
            return
        self.active = next((slot for slot in self._slots if slot.ready), None)
        if self.active is not None and self.active.lease is not None:
            log.warning("slot %s takes over from slot %s: %s", self.active.name, step.slot.name, step.reason)
            if step.reason not in DELIBERATE:
                takeover = Takeover(step.slot.name, step.slot.engine, self.active, self.active.lease, step.at_ns)
                self._takeovers.put_nowait(takeover)

    async def keep_account(self) -> None:
        """Write every takeover from a fault to the journal, until cancelled."""
        async with asyncio.TaskGroup() as accounts:
            while True:
                accounts.create_task(self._account_for(await self._takeovers.get()))

    async def _account_for(self, takeover: Takeover) -> None:
        """Have the successor prove itself, see what the fault was, and write both down."""
        if not await self._prove(takeover.successor):
            return  # it is lost as well, and has a recovery of its own
        proved_ns = boottime_ns()
        with contextlib.suppress(TimeoutError):  # nothing recovers: stopped on purpose, or nobody restarts it
            async with asyncio.timeout(FAULT_LIMIT_S):
                fault = await self._fault(takeover)
            self._chronicle.take_over(takeover.successor.name, takeover.lease, fault, takeover.at_ns, proved_ns)

    async def _fault(self, takeover: Takeover) -> Episode:
        known_ns = takeover.at_ns
        if takeover.engine is not None and not takeover.engine.alive:
            # Whoever restarts it knows of its death when that is over, seconds after the gate if it had much memory.
            await takeover.engine.gone()
            known_ns = boottime_ns()
        while True:
            if (fault := self._chronicle.fault(takeover.lost, known_ns)) is not None:
                return fault
            await asyncio.sleep(_LOOK_S)
