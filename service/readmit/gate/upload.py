"""A request's body on its way to the engine, and the client's end of the connection."""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator
from typing import Final

from starlette.types import Receive, Scope

from readmit.gate.headers import header_of

SAFE_METHODS: Final = frozenset(("GET", "HEAD", "OPTIONS"))
"""Requests that may be repeated (RFC 9110, section 9.2.1)."""
KEPT_BYTES: Final = 1 << 20
"""How much of a body is kept to be sent again; a prompt of this length is a book."""


class Upload:
    """One request's body.

    A request may be repeated if its method says so or its client does, with an ``Idempotency-Key``, and as long as its
    body is short enough to be kept.
    """

    def __init__(self, scope: Scope, receive: Receive) -> None:
        headers = scope["headers"]
        length = header_of(headers, b"content-length")
        self.expected = header_of(headers, b"transfer-encoding") is not None or length not in (None, b"0")
        self.generates = scope["method"] not in SAFE_METHODS
        """Whether an engine has to work on it; a list of models proves nothing."""
        self.repeatable = not self.generates or header_of(headers, b"idempotency-key") is not None
        self.whole_s: float | None = None
        """When all of it had come in, by the monotonic clock; None before."""
        self._scope = scope
        self._first = b""
        self._receive = receive
        self.gone = False
        """The client has gone."""
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._more = self.expected
        self._read = asyncio.Event()
        if not self.expected:
            self._came_in()

    def digest(self) -> bytes:
        """The same for the same request: of its target, and of its body as far as that came in one piece."""
        scope = self._scope
        parts = (scope["raw_path"], scope["query_string"], header_of(scope["headers"], b"content-length"), self._first)
        return hashlib.sha256(repr(parts).encode()).digest()

    async def body(self) -> bytes | AsyncIterator[bytes] | None:
        """What is to be sent: bytes where the client has sent all in one piece, which costs half as much to pass on."""
        if not self.expected:
            return None
        if self._more and not self._kept:
            # Kept also where it may not be repeated: this engine may yet refuse the connection.
            self._kept.append(await self._next())
        return self._chunks() if self._more or len(self._kept) != 1 else self._kept[0]

    async def _chunks(self) -> AsyncIterator[bytes]:
        """The body, as the client sends it; from its beginning also when it has been read before."""
        for chunk in tuple(self._kept):
            yield chunk
        while self._more:
            if chunk := await self._next():
                self._keep(chunk)
                yield chunk

    async def _next(self) -> bytes:
        chunk = await self._piece()
        if chunk is None:
            await asyncio.Event().wait()  # until cancelled: an upload must not end as if it were whole
        assert chunk is not None
        return chunk

    async def _piece(self) -> bytes | None:
        """What comes next; None when the client has gone."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.gone = True
            self._read.set()
            return None
        self._more = message.get("more_body", False)
        if not self._more:
            self._came_in()
        chunk: bytes = message.get("body", b"")
        self._first = self._first or chunk
        return chunk

    def _came_in(self) -> None:
        self.whole_s = time.monotonic()
        self._read.set()

    def _keep(self, chunk: bytes) -> None:
        self._kept_bytes += len(chunk)
        if self.repeatable and self._kept_bytes <= KEPT_BYTES:
            self._kept.append(chunk)
        else:
            self.repeatable = False
            self._kept.clear()

    async def disconnected(self) -> None:
        """Wait until the client has gone."""
        await self._read.wait()
        while not self.gone:
            self.gone = (await self._receive())["type"] == "http.disconnect"

    async def given_up(self) -> None:
        """Wait until the client has gone, while no engine is there to take what it sends.

        Its end of the connection comes after its body. Of that no more is read than is kept.
        """
        while self._more and sum(map(len, self._kept)) < KEPT_BYTES and not self.gone:
            if chunk := await self._piece():
                self._kept.append(chunk)
        await self.disconnected()
