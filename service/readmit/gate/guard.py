"""Turns away what nobody behind it should see: what can be read two ways, bodies too large, strangers."""

from functools import lru_cache
from typing import Final
from urllib.parse import unquote_to_bytes

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from readmit.gate.access import Access
from readmit.gate.problem import Problem

_CHALLENGE: Final = (b"www-authenticate", b'Basic realm="readmit", charset="UTF-8"')
"""Not Bearer: browsers ask for a password only where Basic is offered."""


class Guard:
    """ASGI middleware around the whole gate.

    Args:
        app: what is guarded.
        access: who may see the page and the API.
        max_body_bytes: the longest body of a request.
    """

    def __init__(self, app: ASGIApp, access: Access, max_body_bytes: int) -> None:
        self._app = app
        self._access = access
        self._limit = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif not is_plain(scope["raw_path"]):
            detail = "The path of this request leads elsewhere than it says."
            await Problem(400, "bad-path", detail, close=True).send(send, scope["path"])
        elif _is_operators(scope["path"]) and not self._access.may_look(scope):
            detail = "Send the gate's token: Authorization: Bearer TOKEN, or as the password in a browser."
            await Problem(401, "unauthorized", detail).send(send, scope["path"], [_CHALLENGE])
        else:
            await self._limited(scope, receive, send)

    async def _limited(self, scope: Scope, receive: Receive, send: Send) -> None:
        length, chunked = None, False
        for name, value in scope["headers"]:
            if name == b"content-length":
                length = int(value)  # the server has checked that it is a number
            elif name == b"transfer-encoding":
                chunked = True
        if chunked and length is not None:
            # Whoever believes the length takes the rest of the body for the next request, and answers it to another.
            detail = "A body has either a length or chunks."
            await Problem(400, "bad-framing", detail, close=True).send(send, scope["path"])
        elif length is not None and length > self._limit:
            await self._too_large().send(send, scope["path"])
        elif chunked:
            await _Upload(self._app, self._limit, self._too_large()).run(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _too_large(self) -> Problem:
        detail = f"A body may have {self._limit} bytes here (max_body_bytes)."
        return Problem(413, "body-too-large", detail, close=True)


class _Upload:
    """A body of unknown length; too long a one ends as if its client had gone, and the client is told why."""

    def __init__(self, app: ASGIApp, limit: int, problem: Problem) -> None:
        self._app = app
        self._left = limit
        self._problem = problem
        self._begun = False

    async def run(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted() -> Message:
            if self._left < 0:
                return {"type": "http.disconnect"}
            message = await receive()
            self._left -= len(message.get("body", b""))
            return message if self._left >= 0 else {"type": "http.disconnect"}

        async def noted(message: Message) -> None:
            if self._left < 0 and not self._begun:
                return  # the answer to half a body
            self._begun = True
            await send(message)

        await self._app(scope, counted, noted)
        if self._left < 0 and not self._begun:
            await self._problem.send(send, scope["path"])


@lru_cache(maxsize=256)
def is_plain(raw_path: bytes) -> bool:
    """Whether a path names what it seems to: no ``.`` or ``..``, however written, no backslash, no control characters.

    A server behind that resolves such a path would be reached outside of ``/v1``.
    """
    path = raw_path
    for _ in range(3):  # some servers decode twice
        if b"\\" in path or any(byte < 0x20 or byte == 0x7F for byte in path):
            return False
        if any(segment.partition(b";")[0] in (b".", b"..") for segment in path.split(b"/")):
            return False
        if (decoded := unquote_to_bytes(path)) == path:
            break
        path = decoded
    return True


def _is_operators(path: str) -> bool:
    return path in ("", "/") or path == "/api" or path.startswith("/api/")
