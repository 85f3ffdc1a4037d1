"""Spans as OTLP in JSON.

https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding: names in lower camel case, ids in hexadecimal, 64-bit
integers as strings, enums as numbers; https://opentelemetry.io/docs/specs/otel/protocol/file-exporter/: one request a
line.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import Link

_KINDS = {"INTERNAL": 1, "SERVER": 2, "CLIENT": 3, "PRODUCER": 4, "CONSUMER": 5}
_SAMPLED = 1


def encode(spans: Sequence[ReadableSpan]) -> str:
    """One ``ExportTraceServiceRequest`` as a line of JSON, without its end. All spans are of one resource and scope."""
    scope = spans[0].instrumentation_scope
    scope_spans = {
        "scope": {"name": scope.name, "version": scope.version} if scope else {},
        "spans": [_span(span) for span in spans],
    }
    resource = {"attributes": _attributes(spans[0].resource.attributes)}
    request = {"resourceSpans": [{"resource": resource, "scopeSpans": [scope_spans]}]}
    return json.dumps(request, separators=(",", ":"))


def _span(span: ReadableSpan) -> dict[str, Any]:
    encoded = {
        **_ids(span.context),
        "name": span.name,
        "kind": _KINDS[span.kind.name],
        "flags": _SAMPLED,
        "startTimeUnixNano": str(span.start_time),
        "endTimeUnixNano": str(span.end_time),
        "attributes": _attributes(span.attributes or {}),
        "links": [_link(link) for link in span.links],
        "status": {"code": span.status.status_code.value, "message": span.status.description or ""},
    }
    if span.parent is not None:
        encoded["parentSpanId"] = f"{span.parent.span_id:016x}"
    return encoded


def _link(link: Link) -> dict[str, Any]:
    return {**_ids(link.context), "attributes": _attributes(link.attributes or {})}


def _ids(context: Any) -> dict[str, str]:
    return {"traceId": f"{context.trace_id:032x}", "spanId": f"{context.span_id:016x}"}


def _attributes(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in attributes.items()]


def _value(value: Any) -> dict[str, Any]:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case list() | tuple():
            return {"arrayValue": {"values": [_value(item) for item in value]}}
        case _:
            return {"stringValue": str(value)}
