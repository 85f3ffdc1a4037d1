"""Follows one slot: finds its engine, asks it until it answers correctly, and keeps asking while it serves."""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

from yarl import URL

from readmit.gate.chronicle import Chronicle
from readmit.gate.metrics import GateMetrics
from readmit.gate.process import Engine, listener
from readmit.gate.remedies import Remedies
from readmit.gate.settings import GateSettings
from readmit.gate.slots import Lease, Slot
from readmit.gate.verifier import Finding, Verifier
from weightcache.journal import boottime_ns

log = logging.getLogger("readmit.gate")

POLL_S: Final = 0.03
"""How often the journal is looked at for a new engine process; a look costs about 10 microseconds."""
PORT_POLL_S: Final = 0.05
"""How often a closed port is tried."""
ERROR_PAUSE_S: Final = 0.5
"""The longest pause after an engine answered with an error: it is still starting."""
WRONG_PAUSES_S: Final = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
"""Between wrong answers of an engine that is not ready; the last one again and again."""
CONFIRM_S: Final = 1.0
"""Until the next verification where one more answer decides."""
BUSY_FACTOR: Final = 3
"""A busy slot is verified this many times less often than an idle one."""


class Watch:
    """Follows one slot.

    Args:
        slot: its state.
        supervised: whether the journal names its engine's process.
        settings: limits and intervals.
        verifier: asks the questions.
        chronicle: the journal.
        remedies: who can help.
        metrics: counts verdicts.
        slots: all slots of the gate, this one included.
    """

    def __init__(
        self,
        slot: Slot,
        supervised: bool,
        settings: GateSettings,
        verifier: Verifier,
        chronicle: Chronicle,
        remedies: Remedies,
        metrics: GateMetrics,
        slots: Sequence[Slot],
    ) -> None:
        self.slot = slot
        self.finding: Finding | None = None
        """What the latest verification found."""
        self._supervised = supervised
        self._settings = settings
        self._verifier = verifier
        self._chronicle = chronicle
        self._remedies = remedies
        self._metrics = metrics
        self._slots = slots
        url = URL(slot.url)
        self._address = url.host or "", url.port or 80
        self._doubt = asyncio.Event()
        self._gone = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._life: asyncio.Task[None] | None = None
        self._answered = False
        self._needed = 1
        self._phase_marked = False
        self._silent_ns: int | None = None
        self._hangs = False
        self._restarting = False

    async def run(self) -> None:
        """Follow one engine process after the other, until cancelled."""
        self._task = asyncio.current_task()
        while True:
            await self._follow(await self._engine())

    def doubt(self) -> None:
        """Verify soon: somebody saw this engine fail."""
        self._doubt.set()

    def refused(self) -> None:
        """Somebody was refused: nobody listens, so nobody answers."""
        self.slot.revoke("engine_refused")
        self._doubt.set()

    def drain(self) -> None:
        """Stop verifying. The process that serves is still watched: its death ends the lease."""
        self.slot.enter("draining", "drain")
        ended = self._life if self.slot.serves else self._task
        if ended is not None:
            ended.cancel()

    def check_lease(self) -> None:
        """End what rests on a process that the keeper has replaced, or on weights that are others by now."""
        current = self._chronicle.engine(self.slot.name) if self._supervised else None
        if current is not None and self.slot.engine not in (None, current):
            self._lose("engine_replaced")
        lease = self.slot.lease
        if lease is not None and lease.generation not in (None, self._chronicle.generation(self.slot.name)):
            self.slot.revoke("generation_changed")
            self._doubt.set()
        elif lease is not None and self.slot.ready:
            # Events that a busy database had sent to a spool come late: an episode of the past may show up open.
            self._chronicle.close_episode(self.slot.name, lease.verified, lease.granted_ns)

    async def _engine(self) -> Engine | None:
        """Wait for the slot's process; None for one that listens out of our sight."""
        while True:
            if self._supervised:
                self._chronicle.poll()
                if (engine := self._chronicle.engine(self.slot.name)) is not None:
                    return engine
            elif await self._port_open():
                return await asyncio.to_thread(listener, *self._address)
            await asyncio.sleep(POLL_S)

    async def _follow(self, engine: Engine | None) -> None:
        """Follow one process to its end."""
        self._answered, self._needed, self._phase_marked = False, 1, False
        self._silent_ns, self._hangs, self._restarting = None, False, False
        self._gone.clear()
        self.slot.engine = engine
        self.slot.enter("loading", "engine_started")
        life = self._life = asyncio.create_task(self._live(engine), name=f"life of {self.slot.name}")
        try:
            with engine.watched(lambda: self._lose("engine_exited")) if engine else contextlib.nullcontext():
                await asyncio.wait({life})
                if self.slot.serves:  # it drains
                    await self._gone.wait()
        finally:
            life.cancel()
            await asyncio.wait({life})
            self._life = self.slot.engine = None
        if not life.cancelled():
            life.result()

    def _lose(self, reason: str) -> None:
        """The process is not the slot's engine any more."""
        if not self.slot.revoke(reason) and self.slot.state != "draining":
            self.slot.enter("starting", reason)
        self._gone.set()
        if self._life is not None:
            self._life.cancel()

    async def _live(self, engine: Engine | None) -> None:
        while True:
            await self._until_correct(engine)
            await self._while_correct(engine)

    async def _until_correct(self, engine: Engine | None) -> None:
        """Ask until all answers are correct, and open. Nothing else opens."""
        good = mistakes = errors = 0
        while True:
            self._chronicle.poll()
            if not await self._port_open():
                if self.slot.state != "loading":
                    self.slot.enter("loading", "port_closed")
                self._note_silence(boottime_ns())
                if self._hangs and self._settings.restart_hung:
                    await self._restart("hang")
                await asyncio.sleep(PORT_POLL_S)
                continue
            self.slot.enter("verifying", "port_open" if self.slot.state != "verifying" else self.slot.reason)
            finding = await self._examine(engine)
            if finding.result in ("correct", "wrong"):
                self._silent_ns, self._hangs = None, False
            match finding.result:
                case "correct":
                    good += 1
                    if good >= self._needed:
                        self._open(engine, finding)
                        return
                    pause = CONFIRM_S
                case "wrong":
                    good = 0
                    self.slot.enter("suspect", "wrong_answer")
                    pause = WRONG_PAUSES_S[min(mistakes, len(WRONG_PAUSES_S) - 1)]
                    mistakes += 1
                    if mistakes >= self._settings.eject_wrong:
                        await self._cure_wrong()
                case "late":
                    self.slot.enter("verifying", "late")
                    self._note_silence(finding.asked_ns)
                    pause = 0.0
                case "no_probes":
                    self.slot.enter("verifying", "no_probes")
                    pause = ERROR_PAUSE_S
                case _:
                    self.slot.enter("verifying", finding.result)
                    if finding.result == "foreign_listener" and not self._supervised:
                        self._lose("engine_replaced")  # then it is that other process that we look at
                    pause = min(ERROR_PAUSE_S, PORT_POLL_S * 1.3**errors)
                    errors += 1
            if self._hangs and self._settings.restart_hung:
                await self._restart("hang")
            await asyncio.sleep(pause)

    def _open(self, engine: Engine | None, finding: Finding) -> None:
        name, now = self.slot.name, boottime_ns()
        self._chronicle.poll()
        lease = Lease(engine, self._chronicle.generation(name), finding.probe_set, now)
        self.slot.open(lease)
        self._answered, self._needed = True, 1
        if self._phase_marked:
            self._chronicle.write(name, "phase_end", "semantic_verify", at_ns=now)
            self._phase_marked = False
        self._chronicle.close_episode(name, lease.verified, now)
        log.info("slot %s is ready (%s)", name, self.slot.reason)

    async def _while_correct(self, engine: Engine | None) -> None:
        """Verify a ready slot on and on; returns when readiness has ended."""
        settings = self._settings
        window: deque[bool] = deque(maxlen=settings.eject_window)
        errors, turn, pause = 0, 0, settings.verify_interval_s
        while await self._due(pause):
            # One question in turn while all is well, all of them once something is not.
            well = self.finding is None or self.finding.result == "correct"
            finding = await self._examine(engine, turn if well else None)
            turn += 1
            lease = self.slot.lease
            if lease is None:
                return
            if finding.probe_set not in (None, lease.probe_set):
                self.slot.revoke("probes_changed")
                return
            pause = settings.verify_interval_s
            if finding.result in ("correct", "wrong"):
                self._silent_ns = None
                # A busy engine batches, and may round another way: only an idle one's mistakes count.
                if finding.result == "correct" or not self.slot.in_flight:
                    window.append(finding.result == "wrong")
                self.slot.wrong_while_ready = sum(window)
            errors = errors + 1 if finding.result == "error" and not finding.busy else 0
            match finding.result:
                case "correct":
                    pass
                case "wrong":
                    pause = min(CONFIRM_S, pause)
                    if sum(window) >= settings.eject_wrong and self._may_eject():
                        self._eject("wrong_answer", "wrong_answer")
                case "late":
                    pause = 0.0
                    self._note_silence(finding.asked_ns)
                case "error" if finding.refused:
                    self.slot.revoke("engine_refused")
                case "error" if finding.busy:
                    pause = min(CONFIRM_S, pause)
                    self._note_silence(finding.asked_ns)
                case "error":
                    pause = min(CONFIRM_S, pause)
                    if errors >= settings.eject_wrong:
                        self._eject("engine_error", "crash")
                case "foreign_listener" | "engine_exited":
                    self.slot.revoke(finding.result)
                case "no_probes":
                    pass  # they were there when it opened; `ProbeFile` keeps them

    async def _due(self, pause: float) -> bool:
        """Wait until the next verification is due; False when readiness ended meanwhile."""
        while self.slot.ready:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._doubt.wait(), pause)
            doubted = self._doubt.is_set()
            self._doubt.clear()
            if doubted or not self.slot.in_flight or self._silent_ns is not None or self._overdue():
                break
        return self.slot.ready

    async def _examine(self, engine: Engine | None, turn: int | None = None) -> Finding:
        # A starting engine's first answer may take its time; one that served is expected to go on.
        limits = (self._settings.probe_limit_s, *([self._settings.hang_limit_s] if self._answered else []))
        finding = await self._verifier.examine(self.slot.url, engine, min(limits), turn=turn)
        name, episode = self.slot.name, self._chronicle.episode(self.slot.name)
        answered = finding.result in ("correct", "wrong", "late")
        if answered and episode is not None and not self._phase_marked:
            # Only now: an engine that answers with an error is still in a phase of its own.
            self._chronicle.write(name, "phase_begin", "semantic_verify", at_ns=finding.asked_ns)
            self._phase_marked = True
        if self.finding is None or finding.message != self.finding.message:
            log.info("slot %s: %s", name, finding.message or "all answers are correct")
        self.finding = finding
        for verdict in finding.verdicts:
            self._metrics.verdict(self.slot, verdict)
            facts = {"seconds": verdict.seconds, "probe": verdict.probe}
            details = {"expected": verdict.expected, "found": verdict.found, "message": verdict.message}
            facts |= {key: value for key, value in details.items() if value is not None}
            if verdict.result != "error" or self.slot.ready:  # errors of a starting engine come by the dozen
                self._chronicle.write(name, "probe", verdict.result, facts)
        if finding.result == "correct":
            self.slot.last_correct_ns = boottime_ns()
            self._metrics.verified(self.slot, time.time())
        return finding

    def _note_silence(self, since_ns: int) -> None:
        """No answer in time. Late is not wrong, until it has lasted too long; then it is a hang."""
        if not self._answered:
            return  # this process never did: that is a slow start
        if self._silent_ns is None:
            self._silent_ns = since_ns
        limit = self._settings.busy_hang_limit_s if self.slot.in_flight else self._settings.hang_limit_s
        if not self._hangs and boottime_ns() - self._silent_ns >= limit * 1e9:
            self._hangs = True
            self._eject("hang", "hang")

    def _eject(self, reason: str, cause: str) -> None:
        log.warning("slot %s is taken out of service: %s", self.slot.name, reason)
        self.slot.revoke(reason)
        self._chronicle.open_episode(self.slot.name, cause, self.slot.last_correct_ns)
        self._needed = self._settings.readmit_after

    async def _restart(self, cause: str) -> None:
        if not self._restarting and self._supervised and self._remedies.can_restart:
            self._restarting = await self._remedies.restart(self.slot.name, cause, self.slot.last_correct_ns)

    async def _cure_wrong(self) -> None:
        """Wrong answers from resident weights: quarantine them, so that the engine's next start reads the disk.

        Weights that came from the disk are left alone: another start would read the same.
        """
        mapped = self._chronicle.mapped(self.slot.name)
        if not (self._settings.cure_wrong and mapped and self._remedies.can_quarantine) or self._restarting:
            return
        context = self._chronicle.context(self.slot.name)
        done = [await self._remedies.quarantine(generation, "wrong_answer", context) for generation in mapped]
        if all(done):
            await self._restart("wrong_answer")

    def _may_eject(self) -> bool:
        others = [slot for slot in self._slots if slot is not self.slot and slot.ready]
        if any(slot.wrong_while_ready for slot in others):
            return False  # several at once: the probe set is suspect, not the fleet
        return bool(others) or self._settings.eject_last

    def _overdue(self) -> bool:
        last = self.slot.last_correct_ns or 0
        return boottime_ns() - last > BUSY_FACTOR * self._settings.verify_interval_s * 1e9

    async def _port_open(self) -> bool:
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(*self._address), self._settings.probe_limit_s)
        except OSError:  # TimeoutError is one
            return False
        writer.close()
        return True
