"""The life of one engine process at the gate: asked until it answers correctly, and asked on while it serves."""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from yarl import URL

from readmit.gate.chronicle import Chronicle
from readmit.gate.metrics import GateMetrics
from readmit.gate.neglect import Neglect
from readmit.gate.override import Overrides
from readmit.gate.process import Engine
from readmit.gate.remedies import Remedies
from readmit.gate.settings import GateSettings
from readmit.gate.silence import Silence
from readmit.gate.slots import Lease, Slot
from readmit.gate.verifier import Finding, Verifier
from weightcache.journal import boottime_ns

log = logging.getLogger("readmit.gate")

PORT_POLL_S: Final = 0.05
"""How often a closed port is tried."""
ERROR_PAUSE_S: Final = 0.5
"""The longest pause after an engine answered with an error: it is still starting."""
WRONG_PAUSES_S: Final = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
"""Between wrong answers of an engine that is not ready; the last one again and again."""
CONFIRM_S: Final = 1.0
"""Until the next verification where one more answer decides."""
EXCUSED_S: Final = 300.0
"""How long an engine that is right after all is not doubted again for what it answers among users' requests."""
BUSY_FACTOR: Final = 3
"""A busy slot is verified this many times less often than an idle one."""


@dataclass(frozen=True)
class Means:
    """What the watches of one gate work with. ``slots`` are all of the gate's."""

    settings: GateSettings
    verifier: Verifier
    chronicle: Chronicle
    remedies: Remedies
    metrics: GateMetrics
    slots: Sequence[Slot]
    overrides: Overrides
    neglect: Neglect


class Life:
    """One engine process, as far as it is this slot's.

    Args:
        slot: where it runs.
        engine: the process; None for one that listens out of our sight.
        supervised: whether a keeper would restart it.
        means: what it takes.
        lose: called with a reason when it turns out not to be this slot's engine.
    """

    def __init__(
        self, slot: Slot, engine: Engine | None, supervised: bool, means: Means, lose: Callable[[str], None]
    ) -> None:
        self.slot = slot
        self.engine = engine
        self.finding: Finding | None = None
        """What the latest verification found."""
        self.over = asyncio.Event()
        """Set from outside when the process is not the slot's engine any more."""
        self.doubt = asyncio.Event()
        """Set by whoever saw the engine fail: verify at once."""
        self._silence = Silence(slot, means.settings)
        self._supervised = supervised
        self._means = means
        self._lose = lose
        admitted = means.chronicle.admitted(slot.name)
        before = admitted if admitted is not None and admitted.engine == engine else None
        self._answered = before is not None
        """It has been let in, perhaps by an earlier gate."""
        self._right_by = before.probe_set if before is not None else None
        """The golden answers that it has given, before there may have been others."""
        self._needed = 1
        self._phase_marked = False
        self._hangs = False
        self._excused_ns = 0
        """Until when wrong answers among users' requests are put down to these."""
        self._neglects = False
        """Users wait for it in vain, whatever it says to golden questions; a process does not get over that."""
        self._restarting = False

    async def run(self) -> None:
        """Open the slot and take it out of service, until `over` or cancelled."""
        with contextlib.suppress(_Over):
            while True:
                await self._until_correct()
                await self._while_correct()

    async def _until_correct(self) -> None:
        """Ask until all answers are correct, and open. Nothing else opens."""
        good = mistakes = errors = 0
        while True:
            if (self._hangs or self._neglects or self._never_answered()) and self._means.settings.restart_hung:
                await self._restart("hang")
            self._means.chronicle.poll()
            if not await self._port_open():
                if self.engine is None and not self._supervised:
                    self._lose("port_closed")  # whoever opens it next may be within sight
                    self._check()
                self.slot.enter("loading", "port_closed" if self.slot.state != "loading" else self.slot.reason)
                self._note_silence(boottime_ns())
                await asyncio.sleep(PORT_POLL_S)
                continue
            if self._restarting or (self._neglects and self._dispensable()):
                # Told to end, or of no use to anybody: right answers would not change that.
                await asyncio.sleep(ERROR_PAUSE_S)
                self._check()
                continue
            self.slot.enter("verifying", "port_open" if self.slot.state != "verifying" else self.slot.reason)
            finding = await self._examine()
            if finding.result in ("correct", "wrong"):
                self._silence.end()
                self._hangs = False
            match finding.result:
                case "correct":
                    good += 1
                    if good >= self._needed or self._means.overrides.active:
                        self._open(finding)
                        return
                    pause = CONFIRM_S
                case "wrong" if self._means.overrides.active:
                    self._open(finding)
                    return
                case "wrong":
                    good = 0
                    self.slot.enter("suspect", "wrong_answer")
                    pause = WRONG_PAUSES_S[min(mistakes, len(WRONG_PAUSES_S) - 1)]
                    mistakes += 1
                    if mistakes >= self._means.settings.eject_wrong:
                        await self._cure_wrong()
                case "late":
                    self.slot.enter("verifying", "late")
                    self._note_silence(finding.put_ns)
                    pause = 0.0
                case "no_probes" | "stale_probes":
                    self.slot.enter("verifying", finding.result)
                    pause = ERROR_PAUSE_S
                case _:
                    self.slot.enter("verifying", finding.result)
                    if finding.result == "foreign_listener" and not self._supervised:
                        self._lose("engine_replaced")  # then it is that other process that will be asked
                    pause = min(ERROR_PAUSE_S, PORT_POLL_S * 1.3**errors)
                    errors += 1
            await asyncio.sleep(pause)

    def _open(self, finding: Finding) -> None:
        chronicle, name, now = self._means.chronicle, self.slot.name, boottime_ns()
        chronicle.poll()
        place = self._place  # once the episode is closed it is no longer to be seen
        overridden = finding.overridden or finding.result == "wrong"
        lease = Lease(
            self.engine, chronicle.generation(name), None if overridden else finding.probe_set, now, overridden
        )
        self.slot.open(lease)
        self._answered, self._needed, self._right_by = True, 1, lease.probe_set
        if self._phase_marked:
            chronicle.write(name, "phase_end", "semantic_verify", at_ns=now)
            self._phase_marked = False
        chronicle.close_episode(name, lease.verified, now)
        log.info("ready (%s)", self.slot.reason, extra=place)

    @property
    def _place(self) -> dict[str, Any]:
        """The recovery that the slot is in, for the log."""
        return self._means.chronicle.context(self.slot.name)._asdict()

    async def _while_correct(self) -> None:
        """Verify a ready slot on and on; returns when readiness has ended."""
        settings, name = self._means.settings, self.slot.name
        window: deque[bool] = deque(maxlen=settings.eject_window)
        errors, turn, pause = 0, 0, settings.verify_interval_s
        while await self._due(pause):
            # One question in turn while all is well, all of them once something is not.
            well = self.finding is None or self.finding.result == "correct"
            finding = await self._examine(turn if well else None)
            turn += 1
            lease = self.slot.lease
            if lease is None:
                return
            if not lease.overridden and (finding.probe_set != lease.probe_set or finding.result == "stale_probes"):
                self.slot.revoke("probes_changed")
                return
            pause = settings.verify_interval_s
            if finding.result in ("correct", "wrong"):
                self._silence.end()
                # A busy engine batches, and may round another way: only an idle one's mistakes count.
                if finding.result == "correct" or not self.slot.in_flight:
                    window.append(finding.result == "wrong")
                self.slot.wrong_while_ready = sum(window)
            errors = errors + 1 if finding.result == "error" and not finding.busy else 0
            match finding.result:
                case "correct" if self.slot.doubted:
                    self.slot.doubted, self._excused_ns = False, boottime_ns() + round(EXCUSED_S * 1e9)
                case "correct" if (self._neglects or self._means.neglect.faults(name)) and self._dispensable():
                    self._eject_neglectful()
                case "wrong":
                    pause = min(CONFIRM_S, pause)
                    if sum(window) >= settings.eject_wrong and self._may_eject():
                        self._eject("wrong_answer", "wrong_answer")
                    elif self.slot.in_flight and self._may_eject() and boottime_ns() > self._excused_ns:
                        self.slot.doubted = True
                case "late":
                    pause = 0.0
                    self._note_silence(finding.put_ns)
                case "error" if finding.refused:
                    self.slot.revoke("engine_refused")
                case "error" if finding.busy:
                    pause = min(CONFIRM_S, pause)
                    self._note_silence(finding.put_ns)
                case "error":
                    pause = min(CONFIRM_S, pause)
                    if errors >= settings.eject_wrong:
                        self._eject("engine_error", "crash")
                case "foreign_listener":
                    self.slot.revoke(finding.result)
                case "engine_exited":  # seen before its pidfd told; the same happens either way
                    self._lose(finding.result)
                    self._check()

    async def _due(self, pause: float) -> bool:
        """Wait until the next verification is due; False when readiness ended meanwhile."""
        while self.slot.ready:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self.doubt.wait()
            doubted = self.doubt.is_set()
            self.doubt.clear()
            if doubted or not self.slot.in_flight or self._silence.lasts or self._overdue():
                break
        return self.slot.ready

    def _overdue(self) -> bool:
        last = self.slot.last_correct_ns or 0
        return boottime_ns() - last > BUSY_FACTOR * self._means.settings.verify_interval_s * 1e9

    async def _examine(self, turn: int | None = None) -> Finding:
        means, name = self._means, self.slot.name
        limit = means.settings.probe_limit_s
        if self.slot.ready:  # one that comes back, or has just started, may take its time
            limit = min(limit, means.settings.hang_limit_s)
        finding = await means.verifier.examine(
            self.slot.url,
            self.engine,
            limit,
            means.chronicle.weights(name),
            turn=turn,
            overridden=means.overrides.active,
            asking=self._begin_phase,
        )
        self._check()
        if self._phase_marked and finding.result not in ("correct", "wrong", "late"):
            # An engine that answers with an error is still in a phase of its own.
            means.chronicle.write(name, "phase_end", "semantic_verify", {"error": finding.result})
            self._phase_marked = False
        if self.finding is None or finding.message != self.finding.message:
            log.info("%s", finding.message or "all answers are correct", extra=self._place)
        self.finding = finding
        for verdict in finding.verdicts:
            means.metrics.verdict(self.slot, verdict)
            if verdict.result != "error" or self.slot.ready:  # errors of a starting engine come by the dozen
                means.chronicle.write(name, "probe", verdict.result, verdict.facts())
        if finding.result == "correct":
            self.slot.last_correct_ns = boottime_ns()
            means.metrics.verified(self.slot, time.time())
        return finding

    def _begin_phase(self) -> None:
        """The first golden question is about to be put."""
        chronicle, name = self._means.chronicle, self.slot.name
        if self.slot.ready:
            return  # whatever episode is open, this does not wait for an answer: its end is yet to come
        if not self._phase_marked and chronicle.context(name).episode is not None:
            chronicle.write(name, "phase_begin", "semantic_verify")
            self._phase_marked = True

    def _note_silence(self, put_ns: int) -> None:
        """No answer in time to what was asked at boottime ``put_ns``. Late is not wrong, until it is a hang."""
        if not self._answered:
            return  # this process never did: that is a slow start
        stopped = self.engine is not None and self.engine.stopped
        if self._silence.hangs(put_ns, stopped=stopped) and not self._hangs:
            self._hangs = True
            self._eject("hang", "hang")

    def _never_answered(self) -> bool:
        """Whether it has said nothing since it was started, and no start takes so long."""
        if self._answered or self.engine is None or self.engine.age_s < self._means.settings.start_limit_s:
            return False
        return self.finding is None or self.finding.result in ("late", "error", "foreign_listener")

    @property
    def _others(self) -> list[Slot]:
        """The other slots that are ready."""
        return [slot for slot in self._means.slots if slot is not self.slot and slot.ready]

    def _dispensable(self) -> bool:
        """Whether the service goes on without this slot, or the operator chose that it need not."""
        return not self._means.overrides.active and (bool(self._others) or self._means.settings.eject_last)

    def _may_eject(self) -> bool:
        # Several that answer wrongly at once: the probe set is suspect, not the fleet.
        return self._dispensable() and not any(slot.wrong_while_ready for slot in self._others)

    def _eject(self, reason: str, cause: str) -> None:
        log.warning("taken out of service: %s", reason, extra=self._place)
        self.slot.revoke(reason)
        # An earlier gate had its last correct answer, where there is none.
        known, unanswered = self.slot.last_correct_ns, self._silence.since_ns
        fault = {"fault_clock": "first_unanswered"} if known is None and unanswered is not None else {}
        self._means.chronicle.open_episode(self.slot.name, cause, known or unanswered, **fault)
        self._needed = self._means.settings.readmit_after

    def _eject_neglectful(self) -> None:
        """It answers golden questions and leaves users waiting: to them it hangs, since the first of them asked."""
        neglect, name = self._means.neglect, self.slot.name
        count = neglect.requests(name)
        fault_ns = boottime_ns() - round(neglect.blame(name) * 1e9)
        message = (
            f"it answers golden questions, but gave {count} different requests in a row no first byte. An engine that "
            f"nobody restarts stays out while another slot is ready: readmit restart {name} --cause hang"
        )
        log.warning("taken out of service: %s", message, extra=self._place)
        if self.finding is not None:
            self.finding = self.finding._replace(message=message)
        self.slot.revoke("hang")
        self._means.chronicle.open_episode(name, "hang", fault_ns, fault_clock="first_unanswered", unanswered=count)
        self._needed, self._neglects = self._means.settings.readmit_after, True

    async def _restart(self, cause: str) -> None:
        remedies = self._means.remedies
        if not self._restarting and self._supervised and remedies.can_restart:
            await self._means.chronicle.flushed()  # the keeper must find the episode that is open, not open another
            self._restarting = await remedies.restart(self.slot.name, cause, self.slot.last_correct_ns)
            self._check()

    async def _cure_wrong(self) -> None:
        """Have an engine that answers wrongly restarted, where the next one may do better.

        Resident weights are quarantined, so that it reads the disk. Where they came from the disk it would read the
        same again, which helps one whose memory has gone bad: it was right before. One that gave the right answers
        until there were other golden ones is left alone: more likely it is these that are wrong.
        """
        remedies, chronicle = self._means.remedies, self._means.chronicle
        if not self._means.settings.cure_wrong or self._restarting:
            return
        probe_set = self.finding.probe_set if self.finding is not None else None
        if self._right_by not in (None, probe_set):
            log.warning("wrong by other golden answers than before: its weights are not blamed", extra=self._place)
            return
        mapped = chronicle.mapped(self.slot.name) if remedies.can_quarantine else set()
        context = chronicle.context(self.slot.name)
        cured = all([await remedies.quarantine(generation, "wrong_answer", context) for generation in mapped])
        if cured and (mapped or self._right_by is not None):
            await self._restart("wrong_answer")

    async def _port_open(self) -> bool:
        opened = await port_open(self.slot.url, self._means.settings.probe_limit_s)
        self._check()
        return opened

    def _check(self) -> None:
        # Cancellation ends a life, but whatever was awaited may have swallowed it; the dead must not be admitted.
        if self.over.is_set():
            raise _Over


class _Over(Exception):
    """The process is not the slot's engine any more."""


async def port_open(url: str, limit_s: float) -> bool:
    """Whether anybody takes a connection there."""
    where = URL(url)
    try:
        async with asyncio.timeout(limit_s):
            _, writer = await asyncio.open_connection(where.host, where.port)
    except OSError:  # TimeoutError is one
        return False
    writer.close()
    return True
