"""The gate itself: slots, who watches them, and whether a request may pass."""

import asyncio
import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry

from readmit.gate.chronicle import Chronicle
from readmit.gate.life import Means
from readmit.gate.metrics import GateMetrics
from readmit.gate.outlook import Outlook
from readmit.gate.problem import Problem
from readmit.gate.records import Records
from readmit.gate.remedies import Remedies
from readmit.gate.settings import GateSettings
from readmit.gate.slots import Slot, Transition
from readmit.gate.verifier import ProbeFile, Verifier
from readmit.gate.watch import Watch
from weightcache.journal import boottime_ns

LOOK_S: Final = 1.0
"""How often a ready slot's lease is compared with the journal."""
_NEARNESS: Final = {"verifying": 3, "loading": 2, "suspect": 1}


class Refusal(NamedTuple):
    """Why a request may not pass, as a metric label and as an answer."""

    outcome: str
    problem: Problem


class Gate:
    """Everything of one gate but its HTTP routes.

    Args:
        settings: what the operator chose.
        registry: for this gate's metrics.
    """

    def __init__(self, settings: GateSettings, registry: CollectorRegistry) -> None:
        names = [slot.name for slot in settings.slots]
        self.settings = settings
        self.metrics = GateMetrics(registry, names)
        self.chronicle = Chronicle(settings.journal, settings.node, names, Records(settings.runtime_dir))
        self.probes = ProbeFile(settings.probes)
        self.slots = [Slot(slot.name, slot.url, (self._journal, self.metrics.transition)) for slot in settings.slots]
        means = Means(
            settings,
            Verifier(self.probes, settings.unverified_ok, settings.probe_headers),
            self.chronicle,
            Remedies(settings.runtime_dir, settings.cache_socket),
            self.metrics,
            self.slots,
        )
        self.watches = {
            slot.name: Watch(slot, chosen.supervised and self.chronicle.kept, means)
            for slot, chosen in zip(self.slots, settings.slots, strict=True)
        }
        self.draining = False
        """Not ready any more, for whoever asks; requests still pass."""
        self.refusing = False
        """Requests do not pass any more."""
        self.was_ready = False
        """Whether some slot has been ready since the gate started."""
        self.last_request_ns: int | None = None
        """Boottime of the latest request to ``/v1``, admitted or not."""
        self.failure: BaseException | None = None
        """An error of the gate's own, after which it must not go on."""
        self._task: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def ready(self) -> bool:
        """Whether some slot is ready and the gate does not drain."""
        return not self.draining and any(slot.ready for slot in self.slots)

    @property
    def probe_set_suspect(self) -> bool:
        """Whether several ready slots answer wrongly: then it is more likely the golden answers that are wrong."""
        return sum(slot.ready and slot.wrong_while_ready > 0 for slot in self.slots) > 1

    @property
    def in_flight(self) -> int:
        return sum(slot.in_flight for slot in self.slots)

    def start(self) -> None:
        """Begin to watch the slots, in the background: the gate answers from its first moment."""
        for slot in self.slots:
            slot.enter("starting", "gate_started")
        self._task = asyncio.create_task(self._run(), name="gate")

    async def drain(self) -> None:
        """Leave in order: not ready, serve on while that gets around, refuse, let running requests finish."""
        served = any(slot.serves for slot in self.slots)
        self.draining = True
        for watch in self.watches.values():
            watch.drain()
        if served:
            await asyncio.sleep(self.settings.drain_notice_s)
        self.refusing = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.settings.drain_limit_s):
                await self._idle.wait()

    async def stop(self) -> None:
        """Release everything."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        for slot in self.slots:
            if slot.state != "draining":
                slot.enter("draining", "drain")
            slot.enter("stopped", "drain")
        await asyncio.to_thread(self.chronicle.close)

    def refusal(self, trace_id: str) -> Refusal | None:
        """Why a request may not pass now, None if it may."""
        self.last_request_ns = boottime_ns()
        if self.refusing:
            problem = Problem(
                503, "draining", "This gate is shutting down.", 1, close=True, facts={"trace_id": trace_id}
            )
            return Refusal("draining", problem)
        if not any(slot.serves for slot in self.slots):
            return Refusal("not_ready", self.not_ready(trace_id))
        if self.in_flight >= self.settings.max_in_flight:
            limit = self.settings.max_in_flight
            detail = f"{limit} requests are under way, and no more are taken on."
            return Refusal("overloaded", Problem(429, "overloaded", detail, 1, facts={"trace_id": trace_id}))
        return None

    def choose(self, tried: Sequence[Slot] = ()) -> Slot | None:
        """The slot that a request goes to: the first that serves and has not been tried."""
        return next((slot for slot in self.slots if slot.serves and slot not in tried), None)

    @contextlib.contextmanager
    def carrying(self, slot: Slot) -> Iterator[None]:
        """Count a request while it is under way."""
        slot.in_flight += 1
        self._idle.clear()
        self.metrics.in_flight.inc()
        try:
            yield
        finally:
            slot.in_flight -= 1
            self.metrics.in_flight.dec()
            if not self.in_flight:
                self._idle.set()

    def refused(self, slot: Slot) -> None:
        """A slot's engine took no connection."""
        self.watches[slot.name].refused()

    def doubt(self, slot: Slot) -> None:
        """A slot's engine failed a request."""
        self.watches[slot.name].doubt()

    def outlook(self, slot: Slot) -> Outlook:
        """What can be said about a slot now."""
        self.chronicle.poll()
        return Outlook.of(slot, self.watches[slot.name].finding, self.chronicle)

    def not_ready(self, trace_id: str | None = None) -> Problem:
        """The answer while no slot is ready, about the slot that is nearest to it."""
        outlook = self.outlook(max(self.slots, key=lambda slot: _NEARNESS.get(slot.state or "", 0)))
        facts = {
            "slot": outlook.slot,
            "state": outlook.state,
            "phase": outlook.phase,
            "reason": outlook.reason,
            "elapsed_s": outlook.elapsed_s,
            "expected_s": outlook.expected_s,
            "path": outlook.path,
            "miss_reason": outlook.miss_reason,
            "episode_id": outlook.episode_id,
            "trace_id": outlook.episode_id or trace_id,
        }
        remaining: float = self.settings.retry_after_s
        if outlook.expected_s is not None:
            remaining = outlook.expected_s - outlook.elapsed_s
        explained = f" ({outlook.message})" if outlook.message else ""
        detail = f"No engine answers correctly: slot {outlook.slot} is {outlook.state}, {outlook.reason}{explained}."
        return Problem(503, "not-ready", detail, max(1, math.ceil(remaining)), facts=facts)

    def no_connection(self, trace_id: str) -> Problem:
        """The answer when slots are ready but take no connection."""
        detail = "The engine takes no connection."
        return Problem(503, "no-connection", detail, self.settings.retry_after_s, facts={"trace_id": trace_id})

    async def _run(self) -> None:
        try:
            await self._read_the_past()
            async with asyncio.TaskGroup() as group:
                for watch in self.watches.values():
                    group.create_task(watch.run())
                group.create_task(self._look())
        except Exception as error:
            # Whatever it was, nobody watches the slots any more: what they answer is not to be trusted.
            self.failure = error
            self.draining = self.refusing = True
            raise

    async def _read_the_past(self) -> None:
        for pause in itertools.chain((0.1,), itertools.repeat(LOOK_S)):
            if await asyncio.to_thread(self.chronicle.rewind):
                return
            await asyncio.sleep(pause)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self.chronicle.poll()
            for watch in self.watches.values():
                watch.check_lease()

    def _journal(self, step: Transition) -> None:
        self.was_ready = self.was_ready or step.state == "ready"
        slot = step.slot
        facts: dict[str, object] = {"previous": step.previous, "reason": step.reason}
        if slot.engine is not None:
            facts |= {"pid": slot.engine.pid, "start_ticks": slot.engine.start_ticks}
        if slot.lease is not None:
            facts |= {"generation": slot.lease.generation}
        self.chronicle.write(slot.name, "slot_state", step.state, facts, at_ns=step.at_ns)
