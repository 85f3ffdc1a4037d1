"""Golden questions without an answer: who is late, and who hangs."""

import asyncio
import signal
from pathlib import Path

import pytest
from starlette.types import Message
from tests.readmit.gate.dying import running
from tests.readmit.gate.harness import ScriptedEngine, ending, probe_file, until

from readmit.gate.app import create_app
from readmit.gate.process import Engine
from readmit.gate.settings import GateSettings, SlotSettings
from readmit.gate.silence import Silence
from readmit.gate.slots import Slot
from weightcache.journal import boottime_ns

URL = "http://127.0.0.1:1"
S = 1_000_000_000
SETTINGS = GateSettings((SlotSettings("a", URL),), hang_limit_s=30, busy_hang_limit_s=300)


@pytest.fixture
def slot() -> Slot:
    return Slot("a", URL)


@pytest.fixture
def silence(slot: Slot) -> Silence:
    return Silence(slot, SETTINGS)


def hangs(silence: Silence, asked_ago_s: float, *, stopped: bool = False) -> bool:
    return silence.hangs(boottime_ns() - round(asked_ago_s * S), stopped=stopped)


def test_an_idle_engine_hangs_sooner_than_a_busy_one(slot: Slot, silence: Silence) -> None:
    assert not hangs(silence, 29)
    silence.end()
    assert hangs(silence, 31)
    slot.in_flight = 50
    silence.end()
    assert not hangs(silence, 299)
    assert silence.lasts


def test_users_who_are_answered_do_not_excuse_it_for_ever(slot: Slot, silence: Silence) -> None:
    """They asked before the question, and their answers go on."""
    slot.in_flight, slot.answered_ns = 1, boottime_ns() - 400 * S
    assert not hangs(silence, 290)
    assert hangs(Silence(slot, SETTINGS), 301)


def test_who_asked_later_and_is_answered_is_no_excuse(slot: Slot, silence: Silence) -> None:
    slot.in_flight, slot.answered_ns = 1, boottime_ns() - 20 * S
    assert hangs(silence, 31)


def test_work_that_ended_a_moment_ago_is_no_hang(slot: Slot, silence: Silence) -> None:
    slot.in_flight = 1
    assert not hangs(silence, 200)
    slot.in_flight, slot.idle_ns = 0, boottime_ns()
    assert not hangs(silence, 40), "it was put while others were under way"
    assert not hangs(silence, 0), "from here on it is idle"


def test_a_stopped_engine_is_busy_with_nothing(slot: Slot, silence: Silence) -> None:
    slot.in_flight = 1
    assert hangs(silence, 31, stopped=True)


def test_a_process_that_a_signal_holds_still_is_known() -> None:
    with running("import sys; print('up', flush=True); sys.stdin.read()") as process:
        engine = Engine.of(process.pid)
        assert engine is not None
        assert not engine.stopped
        process.send_signal(signal.SIGSTOP)
        until(lambda: engine.stopped, "it to be stopped")
        assert not engine._replace(start_ticks=engine.start_ticks + 1).stopped
        process.send_signal(signal.SIGCONT)
        until(lambda: not engine.stopped, "it to go on")


@pytest.mark.parametrize(
    ("limits", "orders", "number"),
    [
        ({"busy_hang_limit_s": 0.6}, {"hangs_on": "The capital of France is"}, None),
        ({"hang_limit_s": 0.4}, {}, signal.SIGSTOP),
    ],
    ids=["leaves-the-question", "stopped"],
)
async def test_a_stream_does_not_speak_for_its_engine(
    tmp_path: Path, limits: dict[str, float], orders: dict[str, str], number: int | None
) -> None:
    engine = ScriptedEngine()
    slots = (SlotSettings("a", engine.url, supervised=False),)
    limits = {"verify_interval_s": 0.1, "probe_limit_s": 0.2, "drain_notice_s": 0.0, **limits}
    app = create_app(GateSettings(slots, probes=probe_file(tmp_path / "probes.json"), **limits))
    path, chunks = "/v1/endless", 0
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal chunks
        chunks += len(message.get("body", b"")) > 0
        await asyncio.sleep(0.01)

    with ending(engine):
        async with app.router.lifespan_context(app), asyncio.timeout(60):
            (slot,) = app.state.gate.slots
            while not slot.ready:  # noqa: ASYNC110 - brought about by another process
                await asyncio.sleep(0.02)
            user = asyncio.create_task(app({**scope, "headers": []}, receive, send))
            while not chunks:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.02)
            engine.tell(**orders)
            if number is not None:
                engine.process.send_signal(number)
            await user
            registry = app.state.gate.metrics.registry
            assert registry.get_sample_value("readmit_gate_revocations_total", {"slot": "a", "reason": "hang"}) == 1
