"""One client's connection, seen from the daemon: frames in and out on asyncio, descriptors included.

asyncio's streams drop descriptors that are passed along, so this works on the socket itself.
"""

import asyncio
import socket
from collections.abc import Sequence
from typing import Final

from weightcache.errors import ResourceError
from weightcache.frames import (
    HEADER,
    Peer,
    body_length,
    check_descriptors,
    close_all,
    decode_request,
    encode,
    peer_of,
    receive_some,
    send_frame,
)
from weightcache.messages import Reply, Request

EXCHANGE_LIMIT_S: Final = 10.0
"""From a frame's first byte to its last, and for a reply to be taken: a peer slower than this is not served."""
SILENCE_LIMIT_S: Final = 10.0
"""How long a connection that holds nothing may stay silent."""
_CROWDED_PAUSE_S: Final = 0.01


class Hangup(Exception):
    """The connection ends here: the client is gone, or too slow to be served (``late``)."""

    def __init__(self, why: str, *, late: bool = False) -> None:
        super().__init__(why)
        self.late = late


class Channel:
    """Frames on one accepted connection.

    Args:
        connection: the channel closes it.
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
            CacheMiss: what came is no request (``protocol``), or descriptors were lost (``resource``).
        """
        descriptors: list[int] = []
        try:
            async with asyncio.timeout(None if may_be_silent else SILENCE_LIMIT_S):
                header = await self._some(HEADER.size, descriptors)
            async with asyncio.timeout(EXCHANGE_LIMIT_S):
                header += await self._exactly(HEADER.size - len(header), descriptors)
                request = decode_request(await self._exactly(body_length(header), descriptors))
            check_descriptors(request, descriptors)
        except TimeoutError as error:
            close_all(descriptors)
            raise Hangup("silent beyond the limit", late=True) from error
        except OSError as error:
            close_all(descriptors)
            raise Hangup(str(error)) from error
        except BaseException:
            close_all(descriptors)
            raise
        return request, descriptors

    async def send(self, reply: Reply, descriptors: Sequence[int] = ()) -> None:
        """Send a reply; the caller keeps the descriptors.

        Raises:
            Hangup: the client hung up, or did not take the reply within `EXCHANGE_LIMIT_S`.
            ResourceError: the descriptors cannot be sent.
        """
        rest = memoryview(encode(reply))
        crowded: ResourceError | None = None
        try:
            async with asyncio.timeout(EXCHANGE_LIMIT_S):
                while rest:
                    try:
                        sent = send_frame(self.connection, rest, descriptors)
                    except BlockingIOError:
                        await self._ready(write=True)
                    except ResourceError as error:
                        crowded = error  # others' descriptors are on the way; they arrive soon
                        await asyncio.sleep(_CROWDED_PAUSE_S)
                    else:
                        rest, descriptors, crowded = rest[sent:], (), None
        except TimeoutError as error:
            raise crowded or Hangup("took no reply within the limit", late=True) from error
        except OSError as error:
            raise Hangup(str(error)) from error

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
