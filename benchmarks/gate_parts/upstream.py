"""An upstream that answers at once, so that the proxy before it is all there is to measure.

``/v1/completions`` is whole, ``/v1/stream`` writes events as fast as they are taken, ``/v1/first`` one event,
``/v1/trickle`` one event a second. Plain asyncio protocols: nothing here costs a tenth of what a proxy costs.
"""

import asyncio
import json
import sys

ANSWER = json.dumps({"choices": [{"text": " Paris", "logprobs": None}]}).encode()
EVENT = b"data: " + b"x" * 92 + b"\n\n"
EVENTS = 20_000
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
END = b"0\r\n\r\n"
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(ANSWER), ANSWER)
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Upstream(asyncio.Protocol):
    """One connection; requests come one after the other, each in as many pieces as it likes."""

    def __init__(self) -> None:
        self._received = b""
        self._writable = asyncio.Event()
        self._writable.set()
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, rest = self._received.partition(b"\r\n\r\n")
        if not end:
            return
        lengths = [line[15:] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        length = int(lengths[0]) if lengths else 0
        if len(rest) < length:
            return
        self._received = rest[length:]
        self._answer(head.split(b" ", 2)[1])

    def _answer(self, target: bytes) -> None:
        match target:
            case b"/v1/stream":
                self._task = asyncio.create_task(self._flood())
            case b"/v1/first":
                self._transport.write(STREAM + CHUNK + END)
            case b"/v1/trickle":
                self._task = asyncio.create_task(self._trickle())
            case _:
                self._transport.write(WHOLE)

    async def _flood(self) -> None:
        self._transport.write(STREAM)
        for number in range(EVENTS):
            self._transport.write(CHUNK)
            if not self._writable.is_set():
                await self._writable.wait()
            elif number % 50 == 0:
                await asyncio.sleep(0)
        self._transport.write(END)
        self._transport.close()  # the client reads to the end of the connection

    async def _trickle(self) -> None:
        self._transport.write(STREAM)
        while True:
            self._transport.write(CHUNK)
            await asyncio.sleep(1)


async def main(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Upstream, "127.0.0.1", port, backlog=2048)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
