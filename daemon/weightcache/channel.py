"""One client's connection, seen from the daemon: frames in and out on asyncio, descriptors included.

asyncio's streams drop descriptors that are passed along, so this works on the socket itself.
"""

import asyncio
import os
import socket
from collections.abc import Sequence
from typing import Final

from weightcache.errors import ProtocolError
from weightcache.messages import Reply, Request
from weightcache.protocol import HEADER, Peer, body_length, decode_request, encode, peer_of, receive_some, send_frame

EXCHANGE_LIMIT_S: Final = 10.0
"""From a frame's first byte to its last, and for a reply to be taken: a peer slower than this is not served."""
SILENCE_LIMIT_S: Final = 30.0
"""How long a connection that holds nothing may stay silent."""


class Hangup(Exception):
    """The client is gone, or too slow to be served; its connection ends here."""


class Channel:
    """Frames on one accepted connection.

    Args:
        connection: non-blocking; the channel closes it.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.peer: Peer = peer_of(connection)

    async def receive(self, *, may_be_silent: bool) -> tuple[Request, list[int]]:
        """The next request and the descriptors that came with it, which the caller must close.

        Args:
            may_be_silent: wait for its first byte for as long as it takes; else at most `SILENCE_LIMIT_S`.

        Raises:
            Hangup: the client hung up, or was silent or slow beyond the limits.
            ProtocolError: what came is no request.
        """
        descriptors: list[int] = []
        try:
            async with asyncio.timeout(None if may_be_silent else SILENCE_LIMIT_S):
                header = await self._some(HEADER.size, descriptors)
            async with asyncio.timeout(EXCHANGE_LIMIT_S):
                header += await self._exactly(HEADER.size - len(header), descriptors)
                body = await self._exactly(body_length(header), descriptors)
            request = decode_request(body)
            promised = getattr(request, "descriptors", 0)
            if promised != len(descriptors):
                raise ProtocolError("protocol", "descriptors are missing", expected=promised, found=len(descriptors))
        except BaseException as error:
            for descriptor in descriptors:
                os.close(descriptor)
            if isinstance(error, TimeoutError | OSError):
                raise Hangup(str(error) or "silent beyond the limit") from error
            raise
        return request, descriptors

    async def send(self, reply: Reply, descriptors: Sequence[int] = ()) -> None:
        """Send a reply; the caller keeps the descriptors.

        Raises:
            Hangup: the client hung up, or did not take the reply within `EXCHANGE_LIMIT_S`.
        """
        rest = memoryview(encode(reply))
        try:
            async with asyncio.timeout(EXCHANGE_LIMIT_S):
                while rest:
                    try:
                        sent = send_frame(self.connection, rest, descriptors)
                    except BlockingIOError:
                        await self._ready(write=True)
                        continue
                    rest, descriptors = rest[sent:], ()
        except (TimeoutError, OSError) as error:
            raise Hangup(str(error) or "took no reply within the limit") from error

    async def hung_up(self) -> None:
        """Return when the client hangs up. Must not run beside `receive`."""
        while True:
            await self._ready()
            try:
                if not self.connection.recv(1, socket.MSG_PEEK):
                    return
            except BlockingIOError:
                continue
            except OSError:
                return
            await asyncio.sleep(0.05)  # a request came early; it is read when its turn comes

    def close(self) -> None:
        self.connection.close()

    async def _exactly(self, size: int, descriptors: list[int]) -> bytes:
        received = bytearray()
        while len(received) < size:
            received += await self._some(size - len(received), descriptors)
        return bytes(received)

    async def _some(self, size: int, descriptors: list[int]) -> bytes:
        while True:
            try:
                data = receive_some(self.connection, size, descriptors)
            except BlockingIOError:
                await self._ready()
                continue
            if not data:
                raise Hangup("hung up")
            return data

    async def _ready(self, *, write: bool = False) -> None:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        add, remove = (loop.add_writer, loop.remove_writer) if write else (loop.add_reader, loop.remove_reader)
        add(self.connection, _resolve, ready)
        try:
            await ready
        finally:
            remove(self.connection)


def _resolve(ready: "asyncio.Future[None]") -> None:
    if not ready.done():
        ready.set_result(None)
