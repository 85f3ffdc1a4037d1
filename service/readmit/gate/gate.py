"""The gate itself: slots, who watches them, and whether a request may pass."""

import asyncio
import contextlib
import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry

from readmit.gate import cost, foresight
from readmit.gate.chronicle import Chronicle
from readmit.gate.cost import Cost
from readmit.gate.foresight import NextStart
from readmit.gate.gpu_memory import Nvml
from readmit.gate.hold import Hold
from readmit.gate.life import Means
from readmit.gate.metrics import GateMetrics
from readmit.gate.neglect import Neglect
from readmit.gate.outlook import Outlook
from readmit.gate.override import Override, Overrides
from readmit.gate.probe_files import ProbeFiles
from readmit.gate.problem import Problem
from readmit.gate.records import Records
from readmit.gate.recovery import Recoveries
from readmit.gate.remedies import Remedies
from readmit.gate.settings import GateSettings
from readmit.gate.slots import Slot, Transition
from readmit.gate.succession import Succession
from readmit.gate.upload import Upload
from readmit.gate.verifier import Verifier
from readmit.gate.watch import Watch
from weightcache.journal import boottime_ns

log = logging.getLogger("readmit.gate")

LOOK_S: Final = 1.0
"""How often a ready slot's lease is compared with the journal."""
GIVE_WAY_S: Final = 0.02
"""Before a successor is asked: requests that the fault sent back go first, where an engine answers one at a time."""
PROOF_PAUSE_S: Final = 0.2
"""Until a slot that has taken over and not answered correctly is asked again."""
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
        self.probes = ProbeFiles(settings.probes)
        self.slots = [
            Slot(slot.name, slot.url, (self._journal, self.metrics.transition, self._follow)) for slot in settings.slots
        ]
        self.succession = Succession(self.slots, self.chronicle, self._prove)
        self.hold = Hold(settings.max_wait_s, settings.max_queue)
        self.overrides = Overrides(self.chronicle)
        self.neglect = Neglect(names, settings.neglect_limit_s, settings.eject_unanswered)
        self._verifier = Verifier(self.probes, settings.unverified_ok, settings.probe_headers)
        means = Means(
            settings,
            self._verifier,
            self.chronicle,
            Remedies(settings.runtime_dir, settings.cache_socket),
            self.metrics,
            self.slots,
            self.overrides,
            self.neglect,
        )
        self.watches = {
            slot.name: Watch(slot, chosen.supervised and self.chronicle.kept, means)
            for slot, chosen in zip(self.slots, settings.slots, strict=True)
        }
        self.recoveries = Recoveries()
        """Past ones, as the status tells them."""
        self.costs: dict[str, Cost] = {}
        """What the engine of each slot cost when it was last looked at."""
        self._gpus = Nvml()
        self.next_starts: dict[str, NextStart | None] = {}
        """Whether the next start of each slot would hit, as far as that is known."""
        self.draining = False
        """Not ready any more, for whoever asks; requests still pass."""
        self.refusing = False
        """Requests do not pass any more."""
        self.remembers = False
        """What operators had ordered before it began is in force: orders may be given."""
        self.was_ready = False
        """Whether some slot has been ready since the gate started."""
        self.last_request_ns: int | None = None
        """Boottime of the latest request to ``/v1``, admitted or not."""
        self.failure: BaseException | None = None
        """An error of the gate's own, after which it must not go on."""
        self._task: asyncio.Task[None] | None = None
        self._opened = asyncio.Event()
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
    def probes_trouble(self) -> str | None:
        """What is wrong with the files of golden answers, for people."""
        if self.probes.error is not None:
            return str(self.probes.error)
        kept = (self.probes.outdated(self.chronicle.weights(slot.name)) for slot in self.slots)
        return next(filter(None, kept), None)

    @property
    def in_flight(self) -> int:
        """Requests that are being passed on."""
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
        self.hold.dismiss()
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
        """The slot that a request goes to: the active one, or the next that serves where that was tried."""
        return self.succession.choose(tried)

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
            slot.idle_ns = boottime_ns()
            self.metrics.in_flight.dec()
            if not self.in_flight:
                self._idle.set()

    def publish(self) -> None:
        """Bring the gauges up to date."""
        metrics, override = self.metrics, self.overrides.current
        metrics.fleet(self.slots, admitting=not self.draining, probe_set_suspect=self.probe_set_suspect)
        metrics.override_ends.set(override.ends_s if override is not None and self.overrides.active else 0)
        for slot in self.slots:
            metrics.cost(slot, self.costs.get(slot.name))
            metrics.unanswered.labels(slot.name).set(self.neglect.requests(slot.name))

    def refused(self, slot: Slot) -> None:
        """A slot's engine took no connection."""
        self.watches[slot.name].refused()

    def doubt(self, slot: Slot) -> None:
        """A slot's engine failed a request."""
        self.watches[slot.name].doubt()

    def neglected(self, slot: Slot, upload: Upload) -> None:
        """A request got no first byte of a slot's engine, and was given up."""
        self.neglect.left(slot.name, upload)
        if self.neglect.faults(slot.name):
            self.doubt(slot)

    def begin_override(self, reason: str, user: str, ttl_s: float) -> Override:
        """Let engines in whatever they answer, for so many seconds."""
        override = self.overrides.begin(reason, user, ttl_s)
        for watch in self.watches.values():
            watch.doubt()
        return override

    def end_override(self, reason: str, user: str) -> None:
        """Have every engine that was let in by the override answer correctly, or leave."""
        self.overrides.end(reason, user)
        for slot in self.slots:
            if slot.lease is not None and slot.lease.overridden:
                slot.revoke("override_ended")
                self.watches[slot.name].doubt()

    def slot(self, name: str) -> Slot:
        """The slot of this name; KeyError when there is none."""
        return self.watches[name].slot

    def withdraw(self, name: str, user: str, *, force: bool) -> Problem | None:
        """Drain a slot: requests under way go on, others go elsewhere. Returns why not, where it is not done."""
        watch = self.watches.get(name)
        if watch is None:
            return self._no_such(name)
        if watch.withdrawn:
            return Problem(409, "drained", f"Slot {name} is drained already.")
        if self.draining:
            return Problem(409, "draining", "This gate is shutting down.")
        if watch.slot.ready and not force and sum(slot.ready for slot in self.slots) == 1:
            detail = (
                f"No other slot is ready: draining {name} would end the service. With --force it is done all the same."
            )
            return Problem(409, "last-slot", detail)
        log.warning("slot %s is drained by %s", name, user, extra={"slot": name})
        watch.withdraw()
        return None

    def readmit(self, name: str, user: str) -> Problem | None:
        """Take a drained slot back: once it answers correctly. Returns why not, where it is not done."""
        watch = self.watches.get(name)
        if watch is None:
            return self._no_such(name)
        if self.draining:
            return Problem(503, "draining", "This gate is shutting down.", 1)
        if not watch.withdrawn:
            return Problem(409, "not-drained", f"Slot {name} is not drained.")
        log.warning("slot %s is taken back by %s", name, user, extra={"slot": name})
        watch.readmit()
        return None

    def _no_such(self, name: str) -> Problem:
        return Problem(404, "no-such-slot", f"There is no slot {name}; there are {', '.join(self.watches)}.")

    def outlook(self, slot: Slot) -> Outlook:
        """What can be said about a slot now."""
        self.chronicle.poll()
        return Outlook.of(slot, self.watches[slot.name].finding, self.chronicle, self._foreseen_path(slot.name))

    def _foreseen_path(self, slot: str) -> str | None:
        """By which path a slot would recover: as the weight cache says, or as the last time where it has no say."""
        if self.settings.cache_socket is not None and slot not in self.next_starts:
            return None  # it is being asked
        next_start = self.next_starts.get(slot)
        return self.chronicle.last_path(slot) if next_start is None else next_start.path

    def not_ready(self, trace_id: str | None = None) -> Problem:
        """The answer while no slot is ready, about the slot that is nearest to it."""
        outlooks = [self.outlook(slot) for slot in self.slots]
        outlook = max(outlooks, key=lambda it: _NEARNESS.get(it.state or "", 0))
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
        known = [it.ready_in_s for it in outlooks if it.ready_in_s is not None]
        remaining = min(known, default=self.settings.retry_after_s)
        # What a golden question found may hold the answer to it, and paths of this machine.
        explained = f" ({outlook.message})" if outlook.message and self.settings.explain_refusals else ""
        detail = f"No engine answers correctly: slot {outlook.slot} is {outlook.state}, {outlook.reason}{explained}."
        if outlook.reason == "given_up":
            detail += f" Nobody starts it again: see readmit status, and then readmit restart {outlook.slot}."
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
                group.create_task(self.succession.keep_account())
                group.create_task(self._weigh())
                if self.settings.cache_socket is not None:
                    group.create_task(self._foresee(self.settings.cache_socket))
        except Exception as error:
            # Whatever it was, nobody watches the slots any more: what they answer is not to be trusted.
            self.failure = error
            self.draining = self.refusing = True
            raise

    async def _read_the_past(self) -> None:
        for pause in itertools.chain((0.1,), itertools.repeat(LOOK_S)):
            if await asyncio.to_thread(self.chronicle.rewind):
                break
            await asyncio.sleep(pause)
        for slot in self.chronicle.drained:
            self.watches[slot].withdraw()
        self.overrides.resume()
        self.remembers = True

    async def _look(self) -> None:
        told: str | None = None
        while True:
            await asyncio.sleep(LOOK_S)
            self.chronicle.poll()
            if (trouble := self.probes_trouble) not in (None, told):
                log.warning("%s", trouble)
            told = trouble
            if self.overrides.current is not None and not self.overrides.active:
                self.end_override("expired", self.overrides.current.user)
            for watch in self.watches.values():
                watch.check_lease()

    async def _prove(self, slot: Slot) -> bool:
        """Wait for a correct answer of a slot that has taken over; False when it is lost before that.

        Whether it must leave for what it answers is not decided here.
        """
        await asyncio.sleep(GIVE_WAY_S)
        while (lease := slot.lease) is not None:
            limit, weights = self.settings.probe_limit_s, self.chronicle.weights(slot.name)
            finding = await self._verifier.examine(slot.url, slot.engine, limit, weights, turn=0, overridden=True)
            for verdict in finding.verdicts:
                self.metrics.verdict(slot, verdict)
                self.chronicle.write(slot.name, "probe", verdict.result, verdict.facts())
            if slot.lease is lease and (finding.result == "correct" or not lease.verified):
                return True
            await asyncio.sleep(PROOF_PAUSE_S)
        return False

    async def _weigh(self) -> None:
        """Keep `costs` up to date: of an engine that has just become ready at once, of the others now and then."""
        while True:
            self._opened.clear()
            for slot in self.slots:
                if (engine := slot.engine) is not None and slot.ready:
                    measured = await cost.measure(engine, slot.url, self._gpus)
                    if engine == slot.engine:
                        self.costs[slot.name] = measured
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(cost.EVERY_S):
                    await self._opened.wait()

    async def _foresee(self, socket: Path) -> None:
        """Keep `next_starts` up to date."""
        while True:
            self.next_starts = await foresight.foresee_all(socket, self.chronicle.asked)
            await asyncio.sleep(foresight.EVERY_S)

    def _follow(self, step: Transition) -> None:
        self.succession.follow(step)
        self.hold.follow(step)
        if step.slot.ready:
            self._opened.set()
        elif step.state in ("starting", "loading"):
            self.costs.pop(step.slot.name, None)  # of an engine that is gone

    def _journal(self, step: Transition) -> None:
        self.was_ready = self.was_ready or step.state == "ready"
        slot = step.slot
        facts: dict[str, object] = {"previous": step.previous, "reason": step.reason}
        if slot.engine is not None:
            facts |= {"pid": slot.engine.pid, "start_ticks": slot.engine.start_ticks}
        if slot.lease is not None:
            facts |= {"generation": slot.lease.generation, "probe_set": slot.lease.probe_set}
        self.chronicle.write(slot.name, "slot_state", step.state, facts, at_ns=step.at_ns)
