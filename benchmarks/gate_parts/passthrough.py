"""The least that uvicorn and aiohttp can do as a proxy, to be measured beside the gate: no checks, no limits."""

import sys
from typing import Any

import aiohttp
import uvicorn

KEPT = (b"content-type", b"content-length")
session: list[aiohttp.ClientSession] = []


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] != "http":
        return
    if not session:
        session.append(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False))
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    headers = {name.decode(): value.decode() for name, value in scope["headers"] if name not in (b"host", *KEPT[1:])}
    target = sys.argv[2] + scope["raw_path"].decode()
    async with session[0].request(scope["method"], target, data=body or None, headers=headers) as response:
        kept = [(name.lower(), value) for name, value in response.raw_headers if name.lower() in KEPT]
        await send({"type": "http.response.start", "status": response.status, "headers": kept})
        async for chunk in response.content.iter_any():
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error", access_log=False, lifespan="off")
