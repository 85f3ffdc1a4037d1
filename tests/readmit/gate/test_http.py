"""How the gate reads requests, and writes responses, that its server's own parser would get wrong."""

import asyncio
import json
import socket
from collections.abc import Iterator

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from tests.readmit.gate.harness import Gate, ScriptedEngine, ending, probe_file, until

from readmit.gate import http
from readmit.gate.http import HEAD_BYTES_MAX, StrictProtocol, Together


@pytest.fixture(scope="module")
def gate(engine: ScriptedEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    folder = tmp_path_factory.mktemp("http")
    where = ["--journal", str(folder / "journal.sqlite3"), "--probes", str(probe_file(folder / "probes.json"))]
    gate = Gate("--slot", f"a={engine.url}", "--unsupervised", "--drain-notice", "0", *where)
    with ending(gate):
        gate.until_ready()
        yield gate


@pytest.fixture
def wire(gate: Gate) -> Iterator[socket.socket]:
    host, _, port = gate.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        yield connection


def whole(wire: socket.socket, content: bytes) -> bytes:
    """What comes back until the gate closes the connection."""
    wire.sendall(content)
    return b"".join(iter(lambda: wire.recv(65536), b""))


def test_a_head_without_end_is_cut_short(wire: socket.socket) -> None:
    wire.sendall(b"GET /v1/echo HTTP/1.1\r\nHost: gate\r\nX-A: ")
    with pytest.raises(ConnectionError):  # a reset, for whoever goes on sending
        wire.sendall(b"a" * HEAD_BYTES_MAX * 1024)


def test_an_honest_head_may_be_long(wire: socket.socket) -> None:
    head = b"GET /v1/echo HTTP/1.1\r\nHost: gate\r\nConnection: close\r\nX-A: " + b"a" * (HEAD_BYTES_MAX // 2)
    assert whole(wire, head + b"\r\n\r\n").startswith(b"HTTP/1.1 201")


def test_a_trailer_is_no_header(wire: socket.socket) -> None:
    answer = whole(
        wire,
        b"POST /v1/echo HTTP/1.1\r\nHost: gate\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"3\r\nabc\r\n0\r\nAuthorization: another's\r\n\r\n",
    )
    assert b'"body": "abc"' in answer
    assert b"another" not in answer


@pytest.mark.parametrize(
    ("method", "framing", "body"),
    [
        (b"POST", b"Content-Length: 3\r\n", b"abc"),
        (b"POST", b"Transfer-Encoding: chunked\r\n", b"3\r\nabc\r\n0\r\n\r\n"),
        (b"GET", b"", b""),
    ],
)
def test_an_offer_of_another_protocol_is_declined_and_the_request_answered(
    wire: socket.socket, method: bytes, framing: bytes, body: bytes
) -> None:
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: x\r\n"  # as Java's client does
    plain = b"GET /v1/echo?next HTTP/1.1\r\nHost: gate\r\nConnection: close\r\n\r\n"
    request = b"%b /v1/echo HTTP/1.1\r\nHost: gate\r\n%b%b\r\n%b" % (method, offer, framing, body)
    first, second = whole(wire, request + plain).split(b"HTTP/1.1 ")[1:]
    seen = json.loads(first.partition(b"\r\n\r\n")[2])
    assert seen["body"] == ("abc" if body else "")
    assert not {"upgrade", "http2-settings"} & {name.lower() for name, _ in seen["headers"]}
    assert b'"target": "/v1/echo?next"' in second, "the connection can be used on"


def test_a_client_of_http_1_0_gets_no_chunks(wire: socket.socket) -> None:
    head, _, body = whole(wire, b"GET /v1/stream HTTP/1.0\r\n\r\n").partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"\r\nconnection: close" in head.lower()
    assert body.startswith(b'data: {"n": 0}\n\n')
    assert body.endswith(b"data: [DONE]\n\n")


def test_a_client_that_goes_with_another_request_waiting_is_noticed_by_the_engine(
    gate: Gate, engine: ScriptedEngine
) -> None:
    host, _, port = gate.url.removeprefix("http://").partition(":")
    before = engine.tell()
    with socket.create_connection((host, int(port)), timeout=60) as wire:
        wire.sendall(b"GET /v1/silent HTTP/1.1\r\nHost: gate\r\n\r\nGET /v1/echo HTTP/1.1\r\nHost: gate\r\n\r\n")
        until(lambda: len(engine.tell()["requests"]) > len(before["requests"]), "the first request to arrive")
    until(lambda: engine.tell()["disconnects"] > before["disconnects"], "the engine to see that nobody waits")


class Written(asyncio.Transport):
    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.pieces.append(bytes(data))

    def close(self) -> None:
        self.pieces.append(b"(closed)")


async def test_a_head_and_the_body_that_is_there_go_out_together() -> None:
    wire = Written()
    response = Together(wire)
    response.write(b"head ")
    response.write(b"body")
    response.write(b"more")
    assert wire.pieces == [b"head body", b"more"]


async def test_a_head_does_not_wait_for_a_body() -> None:
    wire = Written()
    Together(wire).write(b"head")
    assert wire.pieces == []
    await asyncio.sleep(0)
    assert wire.pieces == [b"head"]


async def test_a_response_that_is_only_a_head_is_whole_before_its_connection_ends() -> None:
    wire = Written()
    response = Together(wire)
    response.write(b"head")
    response.close()
    assert wire.pieces == [b"head", b"(closed)"]


@pytest.mark.parametrize("begun", [b"", b"GET /v1/echo HTTP/1.1\r\nHost: gate\r\nX-A: "], ids=["silent", "half a head"])
async def test_a_head_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, begun: bytes) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("there was no request")

    monkeypatch.setattr(http, "HEAD_LIMIT_S", 0.2)
    config = uvicorn.Config(app, log_config=None)
    config.load()
    state = uvicorn.Server(config).server_state
    server = await asyncio.get_running_loop().create_server(
        lambda: StrictProtocol(config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    async with server, asyncio.timeout(60):
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(begun)
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
        writer.close()


@pytest.mark.parametrize("next_", [b"\x00\x01 no request\r\n\r\n", b"GET / HTTP/1.1\r\nX: " + b"a" * HEAD_BYTES_MAX])
def test_what_cannot_be_read_is_not_answered_in_the_middle_of_another_answer(wire: socket.socket, next_: bytes) -> None:
    wire.sendall(b"GET /v1/stream HTTP/1.1\r\nHost: gate\r\n\r\n")
    begun = wire.recv(65536)
    try:
        rest = whole(wire, next_)
    except ConnectionError:
        rest = b""
    assert begun.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 4" not in begun + rest
