"""A small engine that does as it is told: it speaks HTTP on plain sockets, so that it can also misbehave.

``POST /script`` with a JSON object changes ``answer``, ``status``, ``delay_s``, ``logprobs``, ``hangs_on`` (a prompt
that is never answered), ``only`` (the one prompt that is) or ``listening`` and returns what was seen so far.
Completions get the next of ``answers``, then ``answer``. The other routes each do one thing to the proxy.
"""

import asyncio
import ctypes
import json
import os
import platform
import socket
import struct
import sys
import threading
import time
from typing import Any

script: dict[str, Any] = {
    "answer": " Paris",
    "answers": [],
    "status": 200,
    "delay_s": 0.0,
    "listening": True,
    "logprobs": None,
    "hangs_on": None,
    "only": None,
}
seen: dict[str, Any] = {"completions": 0, "disconnects": 0, "sent": 0, "requests": []}
listening: dict[str, asyncio.Server] = {}
CHUNK = b"x" * 65536


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while (head := await reader.readuntil(b"\r\n\r\n")) and await respond(head, reader, writer):
            pass
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def respond(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    request, *lines = head.decode("latin-1").strip().split("\r\n")
    method, target, _ = request.split(" ")
    headers = [tuple(line.split(": ", 1)) for line in lines]
    lengths = [value for name, value in headers if name.lower() == "content-length"]
    chunked = any(name.lower() == "transfer-encoding" for name, _ in headers)
    path = target.partition("?")[0]
    if path == "/script":
        script.update(json.loads(await reader.readexactly(int(lengths[0]))))
        whole(writer, 200, {**seen, "pid": os.getpid()})
        if not script["listening"]:
            asyncio.get_running_loop().call_soon(listening["server"].close)
        return False
    if path != "/v1/upload-refused":
        body = await (read_chunks(reader) if chunked else reader.readexactly(int(lengths[0]) if lengths else 0))
        seen["requests"].append({"method": method, "target": target, "headers": headers, "bytes": len(body)})
    match path:
        case "/v1/models":
            whole(writer, 200, {"data": [{"id": "scripted"}]})
        case "/v1/completions":
            seen["completions"] += 1
            prompt = json.loads(body)["prompt"] if script["hangs_on"] or script["only"] else None
            hangs = prompt is not None and (prompt == script["hangs_on"] or script["only"] not in (None, prompt))
            await watched(asyncio.sleep(3600 if hangs else script["delay_s"]), reader)
            answer = script["answers"].pop(0) if script["answers"] else script["answer"]
            whole(writer, script["status"], {"choices": [{"text": answer, "logprobs": script["logprobs"]}]})
        case "/v1/echo":
            text = body.decode("latin-1") if len(body) < 10_000 else ""
            extra = [("X-Engine", "yes"), ("Connection", "x-secret"), ("X-Secret", "hop"), ("Set-Cookie", "a=1")]
            facts = {"method": method, "target": target, "headers": headers, "body": text, "bytes": len(body)}
            whole(writer, 201, facts, [*extra, ("Set-Cookie", "b=2")])
        case "/v1/stream":
            begin(writer, "text/event-stream")
            for number in range(5):
                chunk(writer, f'data: {{"n": {number}}}\n\n'.encode())
                await writer.drain()
                await asyncio.sleep(0.2)
            chunk(writer, b"data: [DONE]\n\n")
            chunk(writer, b"")
        case "/v1/endless":
            begin(writer, "text/event-stream")
            await watched(flood(writer), reader)
        case "/v1/silent":
            await watched(asyncio.sleep(3600), reader)
        case "/v1/stalls":
            begin(writer, "text/event-stream")
            chunk(writer, b'data: {"n": 0}\n\n')
            await watched(asyncio.sleep(3600), reader)
        case "/v1/dies-before":
            os._exit(9)
        case "/v1/dies-slowly":
            die_slowly()
        case "/v1/dies-slowly-within":
            begin(writer, "text/event-stream")
            chunk(writer, b'data: {"n": 0}\n\n')
            await writer.drain()
            die_slowly()
        case "/v1/breaks-before":
            reset(writer)
        case "/v1/dies-within":
            begin(writer, "text/event-stream")
            chunk(writer, b'data: {"n": 0}\n\ndata: {"n"')
            await writer.drain()
            os._exit(9)
        case "/v1/breaks-json":
            head_of(writer, 200, [("Content-Type", "application/json"), ("Content-Length", "1000")])
            writer.write(b'{"half": ')
            await writer.drain()
            reset(writer)
        case "/v1/upload-refused":
            whole(writer, 413, {"error": "too large"})
            while await reader.read(1 << 20):  # closing with unread bytes would reset the connection
                pass
        case _:
            whole(writer, 404, {"error": "no such route"})
    await writer.drain()
    return False


def die_slowly() -> None:
    """Die as one does that has much memory: the main thread is gone, and all connections are still open."""
    threading.Thread(target=time.sleep, args=(3600,)).start()
    ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 9)  # _exit(2) of this thread alone


async def watched(work: Any, reader: asyncio.StreamReader) -> None:
    """Do something, but notice when the other side has gone."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(reader.read(1))
    await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
    if gone.done():
        seen["disconnects"] += 1
        working.cancel()
        raise ConnectionResetError
    gone.cancel()


async def flood(writer: asyncio.StreamWriter) -> None:
    while True:
        chunk(writer, b"data: " + CHUNK + b"\n\n")
        await writer.drain()
        seen["sent"] += len(CHUNK)


async def read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readline()
    await reader.readline()
    return body


def whole(
    writer: asyncio.StreamWriter, status: int, content: object, headers: list[tuple[str, str]] | None = None
) -> None:
    body = json.dumps(content).encode()
    kind = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
    head_of(writer, status, [*kind, *(headers or [])])
    writer.write(body)


def begin(writer: asyncio.StreamWriter, kind: str) -> None:
    head_of(writer, 200, [("Content-Type", kind), ("Transfer-Encoding", "chunked")])


def head_of(writer: asyncio.StreamWriter, status: int, headers: list[tuple[str, str]]) -> None:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
    writer.write(f"HTTP/1.1 {status} Whatever\r\nConnection: close\r\n{lines}\r\n".encode())


def chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def reset(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def main() -> None:
    listening["server"] = await asyncio.start_server(serve, "127.0.0.1", int(sys.argv[-1]))
    print("scripted engine listens", flush=True)
    await asyncio.Event().wait()


asyncio.run(main())
