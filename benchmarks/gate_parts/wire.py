"""A client that costs little: HTTP/1.1 on plain connections, so that what is measured is the proxy."""

import asyncio
import re
import time
from typing import NamedTuple

from gate_parts.upstream import EVENT

COMPLETION = b'{"model": "m", "prompt": "The capital of France is", "max_tokens": 1}'
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class Reply(NamedTuple):
    """One response. ``first_s`` is the time to its first byte."""

    status: int
    head: bytes
    body: bytes
    seconds: float
    first_s: float


class Wire:
    """One connection to one server, opened on first use and again whenever the server has closed it."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self._address = host, int(port)
        self.reader: asyncio.StreamReader | None = None
        self.writer: asyncio.StreamWriter | None = None

    async def open(self) -> None:
        """Connect."""
        self.reader, self.writer = await asyncio.open_connection(*self._address, limit=1 << 20)

    def close(self) -> None:
        """Disconnect."""
        if self.writer is not None:
            self.writer.close()
        self.reader = self.writer = None

    async def ask(self, method: str, target: str, body: bytes = b"") -> Reply:
        """One request and its whole response.

        Raises:
            OSError, asyncio.IncompleteReadError: the connection broke.
        """
        if self.reader is None or self.reader.at_eof():
            self.close()
            await self.open()
        assert self.reader is not None
        assert self.writer is not None
        kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
        began = time.perf_counter()
        self.writer.write(f"{method} {target} HTTP/1.1\r\nHost: gate\r\n{kind}\r\n".encode() + body)
        head = await self.reader.readuntil(b"\r\n\r\n")
        first = time.perf_counter() - began
        length = _LENGTH.search(head)
        content = await (self.reader.readexactly(int(length[1])) if length else self._chunks(self.reader))
        took = time.perf_counter() - began
        if b"\r\nconnection: close" in head.lower():
            self.close()
        return Reply(int(head[9:12]), head, content, took, first)

    async def events(self, target: str) -> int:
        """Read an event stream to its end; returns how many events came."""
        await self.open()
        assert self.reader is not None
        assert self.writer is not None
        self.writer.write(f"GET {target} HTTP/1.1\r\nHost: gate\r\nConnection: close\r\n\r\n".encode())
        payload = 0
        while piece := await self.reader.read(1 << 20):
            payload += piece.count(b"x")  # how a proxy divides them into chunks is its own affair
        self.close()
        return payload // EVENT.count(b"x")

    @staticmethod
    async def _chunks(reader: asyncio.StreamReader) -> bytes:
        content = b""
        while size := int(await reader.readline(), 16):
            content += (await reader.readexactly(size + 2))[:-2]
        await reader.readline()
        return content
