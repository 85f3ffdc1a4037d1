"""Passes requests on to the engine: plain ASGI, bodies unread, one connection to the engine for each request.

What a client must be able to rely on: a response that ends cleanly is whole. When an engine dies in the middle of one,
an event stream gets an error event, and the connection is broken off rather than ended. (For a client that speaks
HTTP/1.0, as nginx does unless told otherwise, a response may end with its connection; there only the event tells.)
"""

import asyncio
import errno
import json
import time
from collections.abc import AsyncIterator, Iterable
from typing import Final

import aiohttp
from starlette.types import Message, Receive, Scope, Send
from yarl import URL

from readmit.gate.gate import Gate
from readmit.gate.problem import Problem
from readmit.gate.slots import Slot
from readmit.gate.trace import Trace

Headers = list[tuple[bytes, bytes]]

HOP_BY_HOP: Final = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding"
    b" upgrade".split()
)
"""Headers that concern one connection (RFC 9110, section 7.6.1)."""
OURS: Final = frozenset((b"host", b"expect", b"accept-encoding", b"traceparent"))
"""Request headers that the gate answers for: an event must not wait in a compressor until its block is full."""
CONNECT_LIMIT_S: Final = 2.0
"""An engine on this node that does not take a connection in this time has a full queue."""


class Proxy:
    """The ASGI application behind ``/v1``.

    Args:
        gate: says where a request may go.
    """

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Break off what is still open."""
        if self._session is not None:
            await self._session.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1011})
            return
        trace = Trace.continued(_header(scope["headers"], b"traceparent"))
        outcome = await self._answer(scope, receive, send, trace)
        self.gate.metrics.requests.labels(outcome).inc()

    async def _answer(self, scope: Scope, receive: Receive, send: Send, trace: Trace) -> str:
        tried: list[Slot] = []
        while (refusal := self.gate.refusal(trace.trace_id)) is None:
            slot = self.gate.choose(tried)
            if slot is None:
                break
            try:
                with self.gate.carrying(slot):
                    return await _Exchange(self, slot, scope, receive, send, trace).run()
            except _NotTaken as error:
                # Not a byte has left the client's request: another slot may have it.
                tried.append(slot)
                if error.refused:
                    self.gate.refused(slot)
                else:
                    self.gate.doubt(slot)
        problem = refusal.problem if refusal is not None else self.gate.no_connection(trace.trace_id)
        await problem.send(send, scope["path"], [_traceresponse(trace)])
        return "engine_refused" if tried or refusal is None else refusal.outcome

    @property
    def session(self) -> aiohttp.ClientSession:
        """The client; made on the running event loop."""
        if self._session is None:
            # No connection is used twice: one that the engine is about to close would lose a request that may not be
            # repeated, and on a new one nobody but the process that listens now can answer.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(force_close=True, limit=0),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(sock_connect=CONNECT_LIMIT_S),
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            )
        return self._session


class _Exchange:
    """One request and its response."""

    def __init__(self, proxy: Proxy, slot: Slot, scope: Scope, receive: Receive, send: Send, trace: Trace) -> None:
        self._proxy = proxy
        self._settings = proxy.gate.settings
        self._slot = slot
        self._scope = scope
        self._upload = _Upload(scope["headers"], receive)
        self._send = send
        self._trace = trace
        self._complete = False

    async def run(self) -> str:
        """Carry it out, or drop it as soon as the client has gone; returns how it ended.

        Raises:
            _NotTaken: the engine took no connection.
        """
        carried = asyncio.create_task(self._carry())
        disconnected = asyncio.create_task(self._upload.disconnected())
        try:
            await asyncio.wait({carried, disconnected}, return_when=asyncio.FIRST_COMPLETED)
            if carried.done() or self._complete:
                return await carried
            return "client_gone"
        finally:
            # Cancelling closes the connection to the engine, which is how the engine learns that nobody waits.
            carried.cancel()
            disconnected.cancel()
            await asyncio.wait({carried, disconnected})

    async def _carry(self) -> str:
        gate, began = self._proxy.gate, time.monotonic()
        try:
            async with asyncio.timeout(self._settings.first_byte_limit_s):
                response = await self._request()
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise _NotTaken(refused=isinstance(error, OSError) and error.errno == errno.ECONNREFUSED) from error
        except TimeoutError:
            gate.doubt(self._slot)
            limit = f"{self._settings.first_byte_limit_s:g} s"
            await self._fail(Problem(504, "engine-late", f"The engine has not begun its response within {limit}."))
            return "first_byte_late"
        except (aiohttp.ClientError, OSError) as error:
            gate.doubt(self._slot)
            detail = f"The engine broke off before it had answered ({type(error).__name__})."
            await self._fail(Problem(502, "engine-died", f"{detail} The request may have been worked on."))
            return "engine_died"
        gate.metrics.first_byte.observe(time.monotonic() - began)
        try:
            return await self._relay(response)
        finally:
            response.close()

    async def _request(self) -> aiohttp.ClientResponse:
        scope = self._scope
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        headers = [(_text(name), _text(value)) for name, value in _end_to_end(scope["headers"]) if name not in OURS]
        return await self._proxy.session.request(
            scope["method"],
            URL(self._slot.url.rstrip("/") + target.decode("ascii"), encoded=True),
            headers=[*headers, ("traceparent", self._trace.header())],
            data=self._upload.chunks() if self._upload.expected else None,
            allow_redirects=False,
        )

    async def _relay(self, response: aiohttp.ClientResponse) -> str:
        headers = [(name.lower(), value) for name, value in response.raw_headers]
        kept = [*_end_to_end(headers), _traceresponse(self._trace)]
        await self._send({"type": "http.response.start", "status": response.status, "headers": kept})
        tail = b""
        try:
            while True:
                async with asyncio.timeout(self._settings.idle_limit_s):
                    chunk = await response.content.readany()
                if not chunk:
                    break
                # Waits while the client reads more slowly than the engine writes; the engine then waits as well.
                await self._send(_body(chunk, more=True))
                tail = (tail + chunk)[-2:]
        except TimeoutError:
            self._proxy.gate.doubt(self._slot)
            message = f"The engine has sent nothing for {self._settings.idle_limit_s:g} s."
            await self._cut_off(headers, tail, Problem(504, "engine-stalled", message))
            return "stalled"
        except (aiohttp.ClientError, OSError):
            self._proxy.gate.doubt(self._slot)
            message = "The engine died in the middle of this response."
            await self._cut_off(headers, tail, Problem(502, "engine-died", message))
            return "cut_off"
        self._complete = True
        await self._send(_body(b"", more=False))
        return "answered"

    async def _fail(self, problem: Problem) -> None:
        await problem.send(self._send, self._scope["path"], [_traceresponse(self._trace)])
        self._complete = True

    async def _cut_off(self, headers: Headers, tail: bytes, problem: Problem) -> None:
        """Say so in an event stream. Whatever it is, it stays unfinished, so that the server breaks the connection."""
        stream = (_header(headers, b"content-type") or b"").startswith(b"text/event-stream")
        if stream and _header(headers, b"content-length") is None and _header(headers, b"content-encoding") is None:
            event = b"event: error\ndata: " + json.dumps({"error": problem.error}).encode() + b"\n\n"
            await self._send(_body(event if tail in (b"\n\n", b"") else b"\n\n" + event, more=True))


class _Upload:
    """The request's body on its way to the engine, and the client's end of the connection."""

    def __init__(self, headers: Headers, receive: Receive) -> None:
        length = _header(headers, b"content-length")
        self.expected = _header(headers, b"transfer-encoding") is not None or length not in (None, b"0")
        self._receive = receive
        self._gone = False
        self._read = asyncio.Event()
        if not self.expected:
            self._read.set()

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body, as the client sends it."""
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._gone = True
                self._read.set()
                await asyncio.Event().wait()  # until cancelled: an upload must not end as if it were whole
            if chunk := message.get("body", b""):
                yield chunk
            more = message.get("more_body", False)
        self._read.set()

    async def disconnected(self) -> None:
        """Wait until the client has gone."""
        await self._read.wait()
        while not self._gone:
            self._gone = (await self._receive())["type"] == "http.disconnect"


class _NotTaken(Exception):
    """The engine took no connection. ``refused`` is False where it, or this machine, only had no room for one."""

    def __init__(self, *, refused: bool) -> None:
        self.refused = refused
        super().__init__(refused)


def _end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Headers without those that concern one connection, among them what ``Connection`` names."""
    pairs = list(headers)
    named = {token.strip().lower() for name, value in pairs if name == b"connection" for token in value.split(b",")}
    return [(name, value) for name, value in pairs if name not in HOP_BY_HOP and name not in named]


def _header(headers: Iterable[tuple[bytes, bytes]], wanted: bytes) -> bytes | None:
    return next((value for name, value in headers if name == wanted), None)


def _traceresponse(trace: Trace) -> tuple[bytes, bytes]:
    return b"traceresponse", trace.header().encode()


def _text(value: bytes) -> str:
    try:
        return value.decode()  # aiohttp sends headers as UTF-8
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _body(chunk: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": chunk, "more_body": more}
