"""What an engine says that is no answer: a client gets none of it."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from tests.readmit.gate.harness import free_port, probe_file

from readmit.gate.app import create_app
from readmit.gate.settings import GateSettings, SlotSettings

RIGHT = b'{"choices": [{"text": " Paris", "logprobs": null}]}'
ODD = {
    "/v1/switches": b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: odd\r\n\r\nanything",
    "/v1/beyond": b"HTTP/1.1 700 Odd\r\nContent-Length: 2\r\n\r\nok",
    "/v1/two-lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 5\r\n\r\nhello",
    "/v1/length-and-chunks": b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\n0\r\n\r\n",
    "/v1/control": b"HTTP/1.1 200 OK\r\nX-Odd: a\x01b\r\nContent-Length: 2\r\n\r\nok",
    "/v1/no-http": b"hello\r\n\r\n",
}
HINTS = (
    b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"
    b"HTTP/1.1 200 OK\r\nDate: Mon, 30 Nov 2026 00:00:00 GMT\r\nContent-Length: 2\r\n\r\nok"
)


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    path = head.split(b" ")[1].decode()
    whole = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(RIGHT)
    writer.write(ODD.get(path) or (HINTS if path == "/v1/hints" else whole + RIGHT))
    if path == "/v1/completions":
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        await reader.readexactly(int(length))
    await writer.drain()
    writer.close()


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    port = free_port()
    slots = (SlotSettings("a", f"http://127.0.0.1:{port}", supervised=False),)
    app: FastAPI = create_app(GateSettings(slots, probes=probe_file(tmp_path / "probes.json"), drain_notice_s=0))
    async with (
        await asyncio.start_server(answer, "127.0.0.1", port),
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gate") as client,
        asyncio.timeout(60),
    ):
        while not app.state.gate.ready:  # noqa: ASYNC110 - it asks in its own time
            await asyncio.sleep(0.02)
        yield client


async def test_what_is_no_answer_is_told_as_such(client: httpx.AsyncClient) -> None:
    for path in ODD:
        told = await client.get(path)
        assert (path, told.status_code) == (path, 502)
        assert json.loads(told.content)["error"]["code"] == "engine_died"
    assert (await client.get("/readyz")).status_code == 200, "golden questions are still answered"


async def test_what_comes_before_the_answer_is_not_it(client: httpx.AsyncClient) -> None:
    told = await client.get("/v1/hints")
    assert (told.status_code, told.content, "link" in told.headers) == (200, b"ok", False)
    assert "date" not in told.headers, "the gate's server has its own, and there is but one"
