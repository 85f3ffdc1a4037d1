"""W3C trace context: one trace from the client through the gate to the engine (https://www.w3.org/TR/trace-context-2/)."""

import re
import secrets
from typing import Final, NamedTuple

_TRACEPARENT: Final = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class Trace(NamedTuple):
    """The gate's own span of a trace: ids in hexadecimal digits."""

    trace_id: str
    span_id: str
    flags: str

    @classmethod
    def continued(cls, traceparent: bytes | None) -> "Trace":
        """A new span in the trace that a ``traceparent`` header names; in a new trace when it is absent or invalid."""
        match = _TRACEPARENT.fullmatch(traceparent or b"")
        span_id = secrets.token_hex(8)
        if match is None or match[1] == b"ff" or (match[1] == b"00" and match[5]):
            return cls(secrets.token_hex(16), span_id, "01")
        trace_id, parent = match[2].decode(), match[3].decode()
        if not int(trace_id, 16) or not int(parent, 16):
            return cls(secrets.token_hex(16), span_id, "01")
        return cls(trace_id, span_id, match[4].decode())

    def header(self) -> str:
        """The value of ``traceparent`` for the engine, and of ``traceresponse`` for the client."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags}"
