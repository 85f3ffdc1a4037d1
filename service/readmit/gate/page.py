"""The page at ``/``: what serves, what recovers, how recoveries went, and why the slow ones were slow.

Rendered here and complete without script; with script it brings itself up to date. Nothing comes from elsewhere.
"""

import base64
import hashlib
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any, Final

from readmit.gate.timeline import attempts, bar, legend, stylesheet
from weightcache import amdahl
from weightcache.vocabulary import PATHS

Facts = Mapping[str, Any]

_HERE: Final = files("readmit.gate")
_STYLE: Final = _HERE.joinpath("page.css").read_text() + stylesheet()
_SCRIPT: Final = _HERE.joinpath("page.js").read_text()
_REFRESH_S: Final = 5
_SHOWN: Final = 12
"""Recoveries on the page; ``/api/status`` has all that are remembered."""


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        f"default-src 'none'; style-src 'sha256-{_hash(_STYLE)}'; script-src 'sha256-{_hash(_SCRIPT)}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

_PAGE: Final = Template(
    """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<noscript><meta http-equiv="refresh" content="$refresh"></noscript>
<link rel="icon" href="data:,">
<title>$title</title>
<style>$style</style>
</head>
<body>
<header id="head" data-live>
<h1 class="$mood">$title</h1>
<p class="dim">$subtitle</p>
$warnings
</header>
<p id="lost" class="warning bad" role="alert" hidden>The gate gives no answer: what is below is no longer true.</p>
<main>
$sections
</main>
<script>$script</script>
</body>
</html>
"""
)


def render(report: Facts) -> str:
    """The page for a report of `readmit.gate.status`."""
    title, mood = _title(report)
    probes = report["probes"]
    golden = (
        f"{_many(probes['count'], 'golden answer')} of {probes['model']}" if probes["count"] else "no golden answers"
    )
    return _PAGE.substitute(
        refresh=_REFRESH_S,
        style=_STYLE,
        script=_SCRIPT,
        title=escape(title),
        mood=mood,
        subtitle=escape(f"Node {report['node']}, {golden}, {_many(report['in_flight'], 'request')} in flight"),
        warnings="".join(f'<p class="warning bad">{escape(text)}</p>' for text in _warnings(report)),
        sections="\n".join(_sections(report)),
    )


def _title(report: Facts) -> tuple[str, str]:
    if report["draining"]:
        return "Shutting down", "bad"
    if report["ready"]:
        return f"Serving from slot {report['serving']}", "good"
    return "Not ready: no engine answers correctly", "bad"


def _warnings(report: Facts) -> Iterator[str]:
    if (override := report["override"]) is not None:
        yield (
            f"Override by {override['user']}: {override['reason']}. Engines are let in whatever they answer, for "
            f"another {override['left_s']:.0f} s."
        )
    elif any(slot["verified"] is False for slot in report["slots"]):
        yield "Open without golden answers: nobody knows whether the model answers correctly."
    if report["probes"]["suspect"]:
        yield "Several ready slots answer wrongly: the golden answers are doubted, not the engines."
    if report["probes"]["error"]:
        yield report["probes"]["error"]
    if report["journal"]["error"]:
        yield f"The journal cannot be read: {report['journal']['error']}"


def _sections(report: Facts) -> Iterator[str]:
    past = report["recoveries"][:_SHOWN]
    yield _section("slots", "Slots", _cards(_slot(slot) for slot in report["slots"]))
    if report["open"]:
        yield _section("open", "Recovering now", "".join(_open(it, report) for it in report["open"]))
    yield _section("figures", "Recoveries", f"<p>{escape(_hit_rate(report['lookups']))}</p>{_figures(report)}")
    if past:
        yield _section("timeline", "The latest, by phase", _timeline(past))
    if missed := [it for it in report["recoveries"] if it["reason"]]:
        yield _section("misses", "Why resident weights were missed", _misses(missed))
    if report["outages"]:
        yield _section("outages", "Service outages", _outages(report["outages"]))
    yield _section("probes", "Golden answers", _probes(report))


def _section(name: str, title: str, content: str) -> str:
    return (
        f'<section id="{name}" data-live aria-labelledby="{name}-title"><h2 id="{name}-title">{title}</h2>'
        f"{content}</section>"
    )


def _cards(cards: Iterable[str]) -> str:
    return f'<ul class="cards">{"".join(cards)}</ul>'


def _slot(slot: Facts) -> str:
    state, mood = f"{slot['state']} ({slot['reason']})", "good" if slot["state"] == "ready" else "wait"
    if slot["state"] == "suspect":
        mood = "bad"
    place = "serves" if slot["active"] else "stands by" if slot["state"] == "ready" else ""
    rows = [("for", _ago(slot["since_s"]))]
    if slot["verified"] is not None:
        rows.append(("answers", "verified" if slot["verified"] else "not known to be right"))
    if slot["last_correct_s"] is not None:
        rows.append(("last correct", f"{_ago(slot['last_correct_s'])} ago"))
    if slot["generation"]:
        rows.append(("weights", f"generation {slot['generation'][:12]}"))
    if (cost := slot["cost"]) is not None:
        rows.append(("costs", _cost(cost)))
    if (next_start := slot["next_start"]) is not None:
        why = f": {next_start['reason']}" if next_start["reason"] else ""
        rows.append(("next start", "would hit" if next_start["would_hit"] else f"would miss{why}"))
    if slot["in_flight"]:
        rows.append(("requests", str(slot["in_flight"])))
    if slot["message"]:
        rows.append(("says", slot["message"]))
    facts = "".join(f"<dt>{escape(name)}<dd>{escape(value)}" for name, value in rows)
    return (
        f'<li class="card"><h3>Slot {escape(slot["slot"])} <span class="dim">{place}</span></h3>'
        f'<p class="{mood}">{escape(state)}</p><dl>{facts}</dl>'
    )


def _cost(cost: Facts) -> str:
    parts = []
    if cost["private_bytes"] is not None:
        parts.append(f"{cost['private_bytes'] >> 20} MiB of its own, {cost['shared_bytes'] >> 20} MiB shared")
    if cost["gpu_bytes"] is not None:
        parts.append(f"{cost['gpu_bytes'] >> 20} MiB on GPUs")
    if cost["kv_tokens"] is not None:
        parts.append(f"room for {cost['kv_tokens']} tokens")
    return ", ".join(parts) or "not known"


def _open(recovery: Facts, report: Facts) -> str:
    slot = next((it for it in report["slots"] if it["slot"] == recovery["slot"]), None)
    expected = slot["expected_s"] if slot else None
    scale = max(recovery["total_s"], expected or 0.0)
    told = [f"phase {slot['phase']}" if slot and slot["phase"] else "", f"path {recovery['path']}", _why(recovery)]
    usual = f' <span class="dim">of about {expected:.1f} s</span>' if expected is not None else ""
    bars = "".join(f'<p class="dim">attempt {number}</p>{bar(part, scale)}' for number, part in attempts(recovery))
    return (
        f'<div class="card"><h3>Slot {escape(recovery["slot"])}, {escape(recovery["cause"])}</h3>'
        f'<p class="clock">{recovery["total_s"]:.1f} s{usual}</p><p>{escape(", ".join(filter(None, told)))}</p>{bars}'
        f"{legend([recovery])}</div>"
    )


def _why(recovery: Facts) -> str:
    if not recovery["reason"]:
        return ""
    return f"{recovery['reason']} ({recovery['detail']})" if recovery["detail"] else recovery["reason"]


def _hit_rate(lookups: Facts) -> str:
    if lookups["hit_rate"] is None:
        return "No engine has asked for resident weights yet."
    n = lookups["hits"] + lookups["misses"]
    return f"Hit rate {lookups['hit_rate']:.0%}: {lookups['hits']} of {n} attaches mapped resident weights."


def _figures(report: Facts) -> str:
    """Time to semantic readiness by path, and the failure tail: never one average over hits and misses."""
    rows = []
    for path in PATHS:
        ended = [it["total_s"] for it in report["recoveries"] if it["path"] == path]
        lasting = [it["total_s"] for it in report["open"] if it["path"] == path]
        ready = [it["total_s"] for it in report["recoveries"] if it["path"] == path and it["outcome"] == "ready"]
        if ended or lasting:
            median = f"{statistics.median(ready):.2f}" if ready else ""
            rows.append((path, str(len(ended) + len(lasting)), median, f"{max(ended + lasting):.2f}"))
    if not rows:
        return "<p>No recovery so far.</p>"
    tail = [it["total_s"] for it in (*report["recoveries"], *report["open"]) if it["path"] in ("miss", "partial")]
    table = _table(("path", "n", "median, s", "worst, s"), rows)
    worst = f"<p>Failure tail, the worst without resident weights: {max(tail):.2f} s.</p>" if tail else ""
    return f"{table}{worst}"


def _timeline(recoveries: Sequence[Facts]) -> str:
    scale = max(recovery["total_s"] for recovery in recoveries)
    limit = _limit_s(recoveries)
    rows = "".join(_recovery(recovery, scale, limit) for recovery in recoveries)
    note = (
        f'<p class="dim">Dashed: {limit:.2f} s, what the latest cold start would take with weights loaded in no time '
        "(Amdahl's limit).</p>"
        if limit is not None
        else ""
    )
    return f'<ol class="recoveries">{rows}</ol>{note}{legend(recoveries)}'


def _limit_s(recoveries: Iterable[Facts]) -> float | None:
    for it in recoveries:
        load = it["phases_s"].get(amdahl.LOAD)
        if it["path"] in ("miss", "off") and it["outcome"] == "ready" and load:
            return float(it["total_s"]) / amdahl.limit(load / it["total_s"])
    return None


def _recovery(recovery: Facts, scale: float, limit: float | None) -> str:
    unverified = ", unverified" if recovery["verified"] is False else ""
    told = (
        f"<strong>{escape(recovery['path'])}</strong>",
        f"slot {escape(recovery['slot'])}",
        escape(recovery["cause"]),
        f"{recovery['total_s']:.2f} s",
        f'<span class="{"good" if recovery["outcome"] == "ready" else "bad"}">{recovery["outcome"]}{unverified}</span>',
        escape(_why(recovery)),
        f'<span class="dim">{_ago(recovery["ended_s"])} ago</span>',
    )
    spans = "".join(f"<span>{text}</span>" for text in told if text)
    phases = _table(("phase", "s"), [(name, f"{seconds:.2f}") for name, seconds in recovery["phases_s"].items()])
    about = f"phases of recovery {recovery['id'][:8]}"
    return (
        f'<li><div class="told">{spans}</div>{bar(recovery, scale, limit)}'
        f'<details id="d-{escape(recovery["id"])}"><summary id="s-{escape(recovery["id"])}" aria-label="{about}">'
        f'<span class="dim">phases</span></summary>{phases}</details>'
    )


def _misses(missed: Sequence[Facts]) -> str:
    reasons: dict[tuple[str, str], list[Facts]] = {}
    for recovery in missed:
        reasons.setdefault((recovery["reason"], recovery["detail"] or ""), []).append(recovery)
    items = []
    for recoveries in sorted(reasons.values(), key=len, reverse=True):
        latest = recoveries[0]
        items.append(
            f"<li><p><strong>{escape(_why(latest))}</strong>, {len(recoveries)} of {len(missed)}</p>"
            f"<p>{escape(latest['message'] or '')}</p><p>What to do: {escape(latest['remedy'] or '')}</p>"
        )
    return f'<ul class="recoveries">{"".join(items)}</ul>'


def _outages(outages: Sequence[Facts]) -> str:
    """The other clock: how long no slot was ready, whatever each engine's own recovery took."""
    rows = [
        (f"{it['seconds']:.2f}", "lasts" if it["ended_s"] is None else f"{_ago(it['ended_s'])} ago")
        for it in outages[:_SHOWN]
    ]
    note = (
        '<p class="dim">Times in which no slot served. An engine that recovers behind a standby is not among them.</p>'
    )
    return _table(("seconds", "ended"), rows) + note


def _probes(report: Facts) -> str:
    probes = report["probes"]
    if not probes["count"]:
        return f"<p>None. {escape(probes['error'] or '')}</p>"
    told = [f"Set {probes['set']}, recorded {probes['recorded_at'] or 'at a time nobody wrote down'}"]
    if probes["checkpoint_digest"]:
        told.append(f"from checkpoint {probes['checkpoint_digest'][:16]}")
    rows = [
        (slot["slot"], verdict["probe"], verdict["result"], f"{verdict['seconds']:.2f}")
        for slot in report["slots"]
        for verdict in slot["verdicts"]
    ]
    table = _table(("slot", "question", "answer", "s"), rows) if rows else ""
    return f"<p>{escape(', '.join(told))}.</p>{table}"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th scope=col>{escape(text)}" for text in heads)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}' for cell in row)}" for row in rows)
    return f"<table><thead><tr>{head}<tbody>{body}</table>"


def _ago(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
