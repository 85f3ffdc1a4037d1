"""W3C trace context. Cases of its own test suite are among these (https://github.com/w3c/trace-context)."""

import pytest

from readmit.gate.trace import Trace

ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
GOOD = f"00-{ID}-{PARENT}-01"


def continued(*headers: tuple[str, str]) -> Trace:
    return Trace.continued([(name.encode(), value.encode()) for name, value in headers])


@pytest.mark.parametrize(
    ("sent", "flags"),
    [(GOOD, "01"), (f"00-{ID}-{PARENT}-00", "00"), (f"00-{ID}-{PARENT}-ff", "03"), (f"cc-{ID}-{PARENT}-01-what", "01")],
)
def test_a_trace_is_continued_by_a_span_of_its_own(sent: str, flags: str) -> None:
    trace = continued(("traceparent", sent), ("tracestate", "a=1,b=2"), ("tracestate", "c=3"))
    assert (trace.trace_id, trace.flags, trace.states) == (ID, flags, (b"a=1,b=2", b"c=3"))
    assert trace.span_id != PARENT
    assert trace.header() == f"00-{ID}-{trace.span_id}-{flags}"


@pytest.mark.parametrize(
    "parents",
    [
        [],
        [GOOD, GOOD],
        [GOOD.upper()],
        [f"ff-{ID}-{PARENT}-01"],
        [f"00-{ID}-{PARENT}-01-what"],
        [f"00-{ID}-{'0' * 16}-01"],
        [f"00-{'0' * 32}-{PARENT}-01"],
        [f"{GOOD},{GOOD}"],
        [f" {GOOD}"],
    ],
)
def test_what_names_no_trace_begins_one_and_its_state_is_left_out(parents: list[str]) -> None:
    trace = continued(*(("traceparent", parent) for parent in parents), ("tracestate", "a=1"))
    assert trace.trace_id != ID
    assert trace.states == ()
    assert trace.flags == "01"
