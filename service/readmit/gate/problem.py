"""Why the gate does not pass a request on: RFC 9457 problem documents that are OpenAI error objects as well."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

from starlette.types import Send

MEDIA_TYPE: Final = "application/problem+json"


@dataclass(frozen=True)
class Problem:
    """One refusal.

    Attributes:
        status: the HTTP status.
        kind: the last part of the problem's type, ``urn:readmit:problem:KIND``.
        detail: one sentence for people.
        retry_after_s: for ``Retry-After``, None for none.
        close: whether the connection should not be used again.
        facts: further members, such as ``phase`` and ``elapsed_s``.
    """

    status: int
    kind: str
    detail: str
    retry_after_s: int | None = None
    close: bool = False
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def error(self) -> dict[str, Any]:
        """The ``error`` object that OpenAI clients expect."""
        kind = "server_error" if self.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
        if self.status == HTTPStatus.TOO_MANY_REQUESTS:
            kind = "rate_limit_error"
        return {"message": self.detail, "type": kind, "param": None, "code": self.kind.replace("-", "_")}

    def document(self, instance: str) -> dict[str, Any]:
        """The problem document. ``instance`` is the path that was asked for."""
        return {
            "type": f"urn:readmit:problem:{self.kind}",
            "title": self.kind.replace("-", " ").capitalize(),
            "status": self.status,
            "detail": self.detail,
            "instance": instance,
            **self.facts,
            "error": self.error,
        }

    def body(self, instance: str) -> bytes:
        """The problem document as JSON."""
        return json.dumps(self.document(instance)).encode()

    def headers(self) -> dict[str, str]:
        """The response's headers, without its length."""
        headers = {"Content-Type": MEDIA_TYPE, "Cache-Control": "no-store"}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(self.retry_after_s)
        if self.close:
            headers["Connection"] = "close"
        return headers

    async def send(self, send: Send, instance: str, extra: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """Answer with this problem."""
        body = self.body(instance)
        headers = [(name.lower().encode(), value.encode()) for name, value in self.headers().items()]
        headers += [(b"content-length", str(len(body)).encode()), *extra]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
