"""What an engine had sent before it died."""

import asyncio
import socket
import time
from types import SimpleNamespace
from typing import Any

import uvloop
from starlette.types import Message

from readmit.gate.proxy import _Exchange
from readmit.gate.slots import Slot
from readmit.gate.trace import Trace
from readmit.gate.upload import Upload


def test_it_is_read_also_where_the_gate_did_not_run_for_a_while() -> None:
    """Its arrival and the end of the gate's patience are then due at once, and the event loop has timers first."""
    ours, theirs = socket.socketpair()

    async def receive() -> Message:
        raise AssertionError

    async def read() -> bytes:
        scope = {"method": "GET", "headers": []}
        gate: Any = SimpleNamespace(settings=None)
        pool: Any = None
        exchange = _Exchange(
            gate, Slot("a", "http://127.0.0.1:1"), pool, scope, Upload(scope, receive), pool, Trace.continued([])
        )
        reader, writer = await asyncio.open_connection(sock=ours)
        reading = asyncio.create_task(exchange._within(60.0, reader.read(100)))
        await asyncio.sleep(0)
        exchange._eject("engine_exited")
        theirs.send(b"last words")
        time.sleep(0.02)  # noqa: ASYNC251 - nothing in this process is to run meanwhile
        try:
            return await reading
        finally:
            writer.close()

    with theirs:
        assert uvloop.run(read()) == b"last words"
