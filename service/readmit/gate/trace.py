"""W3C trace context: one trace from the client through the gate to the engine (https://www.w3.org/TR/trace-context-2/)."""

import re
import secrets
from collections.abc import Iterable
from typing import Final, NamedTuple

_TRACEPARENT: Final = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_FLAGS: Final = 0b11
"""Sampled, and random trace id. Others may mean anything in versions to come, and are not passed on."""


class Trace(NamedTuple):
    """The gate's own span of a trace: ids in hexadecimal digits, and what vendors say of it (``tracestate``)."""

    trace_id: str
    span_id: str
    flags: str
    states: tuple[bytes, ...] = ()

    @classmethod
    def continued(cls, headers: Iterable[tuple[bytes, bytes]]) -> "Trace":
        """A new span in the trace of a request's headers; in a new trace where they name none, or more than one."""
        parents, states = [], []
        for name, value in headers:
            if name == b"traceparent":
                parents.append(value)
            elif name == b"tracestate":
                states.append(value)
        match = _TRACEPARENT.fullmatch(parents[0]) if len(parents) == 1 else None
        span_id = secrets.token_hex(8)
        if match is None or match[1] == b"ff" or (match[1] == b"00" and match[5]):
            return cls(secrets.token_hex(16), span_id, "01")
        trace_id, parent = match[2].decode(), match[3].decode()
        if not int(trace_id, 16) or not int(parent, 16):
            return cls(secrets.token_hex(16), span_id, "01")
        return cls(trace_id, span_id, f"{int(match[4], 16) & _FLAGS:02x}", tuple(states))

    def header(self) -> str:
        """The value of ``traceparent`` for the engine, and of ``traceresponse`` for the client."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags}"
