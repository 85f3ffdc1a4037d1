"""Requests whose bodies are still on their way when the engine that they are for is lost."""

import asyncio
import signal
from pathlib import Path

import pytest
from starlette.types import Message
from tests.readmit.gate.harness import ScriptedEngine, ending, probe_file

from readmit.gate.app import create_app
from readmit.gate.settings import GateSettings, SlotSettings


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
async def test_they_are_put_to_the_standby(tmp_path: Path, fault: signal.Signals) -> None:
    engines = {name: ScriptedEngine() for name in "ab"}
    slots = tuple(SlotSettings(name, engine.url, supervised=False) for name, engine in engines.items())
    limits = {"verify_interval_s": 0.1, "hang_limit_s": 0.3, "drain_notice_s": 0.0}
    app = create_app(GateSettings(slots, probes=probe_file(tmp_path / "probes.json"), **limits))
    body: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
    sent: list[Message] = []
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/echo",
        "raw_path": b"/v1/echo",
        "query_string": b"",
        "headers": [(b"content-length", b"5")],
    }

    async def receive() -> Message:
        if not body.done():
            return await asyncio.shield(body)
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    with ending(*engines.values()):
        async with app.router.lifespan_context(app), asyncio.timeout(60):
            gate = app.state.gate
            while not all(slot.ready for slot in gate.slots):  # noqa: ASYNC110 - brought about by other processes
                await asyncio.sleep(0.02)
            active = gate.choose()
            (standby,) = (slot for slot in gate.slots if slot is not active)
            asked = asyncio.create_task(app(scope, receive, send))
            while not active.in_flight:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.02)
            engines[active.name].process.send_signal(fault)
            while not standby.in_flight:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.02)
            body.set_result({"type": "http.request", "body": b"hello"})
            await asked
            assert sent[0]["status"] == 201
            requests = engines[standby.name].tell()["requests"]
            assert [request["bytes"] for request in requests if request["target"] == "/v1/echo"] == [5]
