"""Follows one slot: finds its engine process, watches it live, and ends readiness the moment it dies."""

import asyncio
import contextlib
from typing import Final

from yarl import URL

from readmit.gate.life import Life, Means, port_open
from readmit.gate.process import Engine, listener
from readmit.gate.slots import Slot
from readmit.gate.verifier import Finding
from weightcache.journal import boottime_ns

POLL_S: Final = 0.03
"""How often the journal is looked at for a new engine process; a look costs about 10 microseconds."""
ASIDE_S: Final = 1.0
"""How often a drained slot is looked at: nobody waits for it."""


class Watch:
    """Follows one slot.

    Args:
        slot: its state.
        supervised: whether the journal names its engine's process.
        means: what it works with.
    """

    def __init__(self, slot: Slot, supervised: bool, means: Means) -> None:
        self.slot = slot
        self._supervised = supervised
        self._means = means
        self._task: asyncio.Task[None] | None = None
        self._admitted = asyncio.Event()
        self._admitted.set()
        self._life: Life | None = None
        self._living: asyncio.Task[None] | None = None

    @property
    def finding(self) -> Finding | None:
        """What the latest verification of the present engine found."""
        return self._life.finding if self._life is not None else None

    async def run(self) -> None:
        """Follow one engine process after the other, until cancelled."""
        self._task = asyncio.current_task()
        while True:
            engine = await self._engine()
            if self._admitted.is_set():
                await self._follow(engine)

    def doubt(self) -> None:
        """Verify soon: somebody saw this engine fail."""
        if self._life is not None:
            self._life.doubt.set()

    def refused(self) -> None:
        """Somebody was refused: nobody listens, so nobody answers."""
        self.slot.revoke("engine_refused")
        self.doubt()

    def drain(self) -> None:
        """Stop verifying. The process that serves is still watched: its death ends the lease."""
        self.slot.enter("draining", "drain")
        ended = self._living if self.slot.serves else self._task
        if ended is not None:
            ended.cancel()

    @property
    def withdrawn(self) -> bool:
        """Whether an operator has drained the slot."""
        return not self._admitted.is_set()

    def withdraw(self) -> None:
        """Send requests elsewhere until `readmit` is called, whatever becomes of the engine."""
        self._admitted.clear()
        self.slot.withdraw("operator_drain")
        self._end_life()

    def readmit(self) -> None:
        """Ask the engine again, and let it in when it answers correctly."""
        self.slot.enter("starting", "undrained")
        self._admitted.set()

    def check_lease(self) -> None:
        """End what rests on a process that the keeper has replaced, or on weights that are others by now."""
        chronicle, lease = self._means.chronicle, self.slot.lease
        current = chronicle.engine(self.slot.name) if self._supervised else None
        if current is not None and self.slot.engine not in (None, current):
            self._lose("engine_replaced")
        elif lease is not None and lease.generation not in (None, chronicle.generation(self.slot.name)):
            self.slot.revoke("generation_changed")
            self.doubt()
        elif lease is not None and self.slot.ready:
            # Events that a busy database had sent to a spool come late: an episode of the past may show up open.
            chronicle.close_episode(self.slot.name, lease.verified, lease.granted_ns)

    async def _engine(self) -> Engine | None:
        """Wait for the slot's process; None for one that listens out of our sight."""
        chronicle, url = self._means.chronicle, self.slot.url
        unseen = False
        while True:
            await self._admission()
            if self._supervised:
                chronicle.poll()
                if (engine := chronicle.engine(self.slot.name)) is not None:
                    return engine
            elif await port_open(url, self._means.settings.probe_limit_s):
                engine = await asyncio.to_thread(listener, URL(url).host or "", URL(url).port or 80)
                # Looked for twice: one that was replaced during the first look would be followed blindly.
                if engine is not None or unseen:
                    return engine
                unseen = True
            else:
                unseen = False
            await asyncio.sleep(POLL_S)

    async def _admission(self) -> None:
        """Wait while the slot is drained. An engine that recovers meanwhile has recovered, though nobody asks it."""
        while self.withdrawn:
            await self._recover_aside()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ASIDE_S):
                    await self._admitted.wait()

    async def _recover_aside(self) -> None:
        """End the open recovery of a drained slot if its engine answers correctly: else it would seem to last."""
        chronicle, name, limit_s = self._means.chronicle, self.slot.name, self._means.settings.probe_limit_s
        chronicle.poll()
        engine = chronicle.engine(name)
        if engine is None or chronicle.episode(name) is None or not await port_open(self.slot.url, limit_s):
            return
        finding = await self._means.verifier.examine(self.slot.url, engine, limit_s, chronicle.weights(name))
        if finding.result == "correct" and chronicle.engine(name) == engine:
            now = boottime_ns()
            chronicle.write(name, "phase_begin", "semantic_verify", at_ns=finding.asked_ns)
            chronicle.write(name, "phase_end", "semantic_verify", at_ns=now)
            chronicle.close_episode(name, finding.probe_set is not None, now)

    async def _follow(self, engine: Engine | None) -> None:
        """Follow one process to its end."""
        life = self._life = Life(self.slot, engine, self._supervised, self._means, self._lose)
        self.slot.engine = engine
        self.slot.enter("loading", "engine_started")
        living = self._living = asyncio.create_task(life.run(), name=f"life of slot {self.slot.name}")
        try:
            with engine.watched(lambda: self._lose("engine_exited")) if engine else contextlib.nullcontext():
                await asyncio.wait({living})
                if self.slot.serves:  # it drains
                    await life.over.wait()
        finally:
            living.cancel()
            await asyncio.wait({living})
            self._life = self._living = self.slot.engine = None
        if not living.cancelled():
            living.result()
        if engine is not None and not engine.alive:
            await engine.gone()  # until then its port may still be open

    def _lose(self, reason: str) -> None:
        """The process is not the slot's engine any more."""
        if not self.slot.revoke(reason) and self.slot.state != "draining":
            self.slot.enter("starting", reason)
        self._end_life()

    def _end_life(self) -> None:
        if self._life is not None and self._living is not None:
            self._life.over.set()
            self._living.cancel()
