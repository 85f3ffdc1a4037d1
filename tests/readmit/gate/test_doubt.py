"""Wrong answers of an engine that is never idle."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

import pytest
from starlette.types import Message
from tests.readmit.gate.harness import ScriptedEngine, ending, probe_file

from readmit.gate.app import create_app
from readmit.gate.gate import Gate
from readmit.gate.settings import GateSettings, SlotSettings
from readmit.gate.slots import Slot

Busy = tuple[Gate, Slot, ScriptedEngine, "asyncio.Task[None]"]


@pytest.fixture
async def busy(tmp_path: Path) -> AsyncIterator[Busy]:
    """Two slots, and a user whose request keeps the active one's engine from ever being idle."""
    engines = {name: ScriptedEngine() for name in "ab"}
    slots = tuple(SlotSettings(name, engine.url, supervised=False) for name, engine in engines.items())
    limits = {"verify_interval_s": 0.1, "drain_notice_s": 0.0}
    app = create_app(GateSettings(slots, probes=probe_file(tmp_path / "probes.json"), **limits))
    path = "/v1/silent"
    scope = {"type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "query_string": b""}

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(_: Message) -> None:
        """Nobody reads it."""

    with ending(*engines.values()):
        async with app.router.lifespan_context(app), asyncio.timeout(60):
            gate: Gate = app.state.gate
            await until(lambda: all(slot.ready for slot in gate.slots))
            active = gate.choose()
            assert active is not None
            user = asyncio.create_task(app({**scope, "headers": []}, receive, send))
            await until(lambda: active.in_flight == 1)
            yield gate, active, engines[active.name], user
            user.cancel()
            with suppress(asyncio.CancelledError):
                await user


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - brought about by another process
        await asyncio.sleep(0.02)


async def test_it_gets_no_more_requests_and_is_taken_out_once_it_is_asked_alone(busy: Busy) -> None:
    gate, active, engine, user = busy
    engine.tell(answer=" London")
    await until(lambda: gate.choose() is not active)
    assert active.ready, "in a batch the same engine may round another way"
    user.cancel()
    await until(lambda: not active.ready)
    registry = gate.metrics.registry
    wrong = {"slot": active.name, "reason": "wrong_answer"}
    assert registry.get_sample_value("readmit_gate_revocations_total", wrong) == 1


async def test_it_gets_them_again_with_its_next_right_answer(busy: Busy) -> None:
    gate, active, engine, _ = busy
    engine.tell(answers=[" London"])
    await until(lambda: gate.choose() is not active)
    await until(lambda: gate.choose() is active)
    engine.tell(answer=" London")
    registry = gate.metrics.registry
    wrong = {"slot": active.name, "result": "wrong"}
    await until(lambda: (registry.get_sample_value("readmit_gate_probes_total", wrong) or 0) >= 3)
    assert gate.choose() is active, "found right once, it is not doubted again at once"
