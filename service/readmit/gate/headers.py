"""Headers: which of them pass, in either direction."""

import re
from collections.abc import Iterable
from typing import Final

import aiohttp

Headers = list[tuple[bytes, bytes]]

HOP_BY_HOP: Final = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding"
    b" upgrade".split()
)
"""Headers that concern one connection (RFC 9110, section 7.6.1)."""
OURS: Final = frozenset((b"host", b"expect", b"accept-encoding", b"traceparent", b"tracestate"))
"""Request headers that the gate answers for: an event must not wait in a compressor until its block is full."""
SAID_ANEW: Final = frozenset((b"date", b"traceresponse"))
"""Response headers of which the gate writes its own: there may be one of each."""
FINAL: Final = range(200, 600)
"""Statuses of an answer (RFC 9110, section 15). After any other, such as 101, a client would read on as it sees fit."""
_CONTROL: Final = re.compile(rb"[\x00-\x08\n-\x1f\x7f]")
"""What no header's value may contain, and aiohttp lets pass."""


def header_of(headers: Iterable[tuple[bytes, bytes]], wanted: bytes) -> bytes | None:
    """The value of a header, its name in lower case; None where there is none."""
    return next((value for name, value in headers if name == wanted), None)


def end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Headers without those that concern one connection, among them what ``Connection`` names."""
    pairs = list(headers)
    named = {token.strip().lower() for name, value in pairs if name == b"connection" for token in value.split(b",")}
    return [(name, value) for name, value in pairs if name not in HOP_BY_HOP and name not in named]


def is_answer(response: aiohttp.ClientResponse) -> bool:
    """Whether what an engine has begun to say can be passed on as an answer."""
    return response.status in FINAL and not _CONTROL.search(b"".join(value for _, value in response.raw_headers))


def as_text(value: bytes) -> str:
    """A header for aiohttp, which sends it as UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")
