"""HTTP as the gate reads it: uvicorn's quick parser, and none of what two servers might read differently.

Refused, though the parser lets it pass (RFC 9112): heads without end, targets that name another server, requests with
more or less than one ``Host``. Left out: trailers, which uvicorn would add to the headers. An offer to change the
protocol is declined, with the body that the parser would drop. To a client of HTTP/1.0 a response without a length ends
with its connection; uvicorn would send it the chunks of HTTP/1.1.
"""

import asyncio
from typing import Final

import httptools
from starlette.types import Message
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

HEAD_BYTES_MAX: Final = 64 << 10
"""h11's limit, and more than other servers take."""
HEAD_LIMIT_S: Final = 60.0
"""From a connection's beginning, or that of a head of which more is yet to come, to the head's end; nginx's number."""
HOSTS: Final = {"1.0": (0, 1), "1.1": (1,)}
"""How many ``Host`` a request may have."""
CODINGS: Final[dict[str, tuple[list[bytes], ...]]] = {"1.0": ([],), "1.1": ([], [b"chunked"])}
_TOO_LARGE: Final = STATUS_LINE[431] + b"content-length: 0\r\nconnection: close\r\n\r\n"
_LATE: Final = STATUS_LINE[408] + b"content-length: 0\r\nconnection: close\r\n\r\n"
_FRAMING: Final = (b"content-length", b"transfer-encoding")


class StrictProtocol(HttpToolsProtocol):
    """One connection. What a callback of the parser raises is answered 400, and the connection closed."""

    _head_bytes = 0
    _in_head = False
    _offer = False
    _declining = False
    _running: RequestResponseCycle | None = None
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_LIMIT_S, self._head_is_late)

    def _head_is_late(self) -> None:
        if self._answers:
            self._expect_head()
        else:
            self._refuse(_LATE)

    @property
    def _answers(self) -> bool:
        """Whether a response is under way, or owed to a request that is whole: nothing else may be written then."""
        running = self._running
        if running is None or running.response_complete:
            return False
        return running.response_started or not running.more_body

    def _refuse(self, response: bytes) -> None:
        if not (self._answers or self.transport.is_closing()):
            self.transport.write(response)
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        if self._answers:
            self.transport.close()
        else:
            super().send_400_response(msg)

    def _forget_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX:
                self._refuse(_TOO_LARGE)
                return
        try:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                self._decline(data[offer.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        if self._in_head and self._head_timer is None:
            self._expect_head()

    def _decline(self, rest: bytes) -> None:
        """Go on with another parser, which has seen no offer in this request's head."""
        framing = [b"%b: %b\r\n" % pair for pair in self.headers if pair[0] in _FRAMING]
        self.parser = httptools.HttpRequestParser(self)
        self._offer, self._declining = False, True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n%b" % (b"".join(framing), rest))

    def on_message_begin(self) -> None:
        if not self._declining:
            super().on_message_begin()
            self._in_head, self._head_bytes = True, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # not of a trailer
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._declining:
            self._declining = False
            return
        self._in_head = False
        self._forget_head()
        version = self.parser.get_http_version()
        hosts = sum(name == b"host" for name, _ in self.headers)
        codings = [value.lower() for name, value in self.headers if name == b"transfer-encoding"]
        elsewhere = not self.url.startswith(b"/") or self.parser.get_method() == b"CONNECT"
        if elsewhere or hosts not in HOSTS.get(version, ()) or codings not in CODINGS.get(version, ()):
            raise ValueError("not a request that can be read in one way only")
        self._offer = self.parser.should_upgrade()
        super().on_headers_complete()
        self.cycle.transport = Together(self.transport)
        if version == "1.0":
            self.cycle.__class__ = _EndsWithConnection

    def on_message_complete(self) -> None:
        if not self._offer:
            super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget_head()
        if self._running is not None and self._running is not self.cycle:  # others wait behind it, in a pipeline
            self._running.disconnected = True
            self._running.message_event.set()


class Together(asyncio.Transport):
    """A response's way to its client: what is written first, its head, goes out with what follows at once.

    uvicorn writes both by themselves, and every write wakes the client.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._begun = False
        self._held = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._begun:
            held, self._held = self._held, b""
            self._transport.write(held + data if held else data)
        else:
            self._begun, self._held = True, bytes(data)
            asyncio.get_running_loop().call_soon(self._release)

    def _release(self) -> None:
        if self._held:
            self.write(b"")

    def close(self) -> None:
        self._release()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()


class _EndsWithConnection(RequestResponseCycle):
    """A response to HTTP/1.0."""

    _unbounded = False

    async def send(self, message: Message) -> None:  # type: ignore[override]
        if message["type"] == "http.response.start":
            self._unbounded = not any(name.lower() == b"content-length" for name, _ in message["headers"])
            if self._unbounded:
                self.chunked_encoding = False
        elif self._unbounded:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)  # type: ignore[arg-type]
