"""The page at ``/``: what serves, what recovers, how recoveries went. Rendered here, no script needed."""

from collections.abc import Iterable, Mapping
from html import escape
from string import Template
from typing import Any, Final

HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}
_REFRESH_S: Final = 5
_SHOWN: Final = 12
"""Recoveries on the page; ``/api/status`` has all that are remembered."""

_PAGE: Final = Template(
    """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="refresh" content="$refresh">
<title>$title</title>
<style>
:root { color-scheme: light dark; --line: light-dark(#d8dce2, #343a44); --dim: light-dark(#5a6270, #9aa3b2);
  --good: light-dark(#0b6b3a, #5fd394); --bad: light-dark(#a3261b, #ff8d80); --page: light-dark(#fff, #14171c);
  --text: light-dark(#1a1d21, #e8eaee); }
body { margin: 2rem auto; max-width: 68rem; padding: 0 1rem; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: 0; } h2 { font-size: 1rem; margin: 2rem 0 .5rem; }
p { margin: .3rem 0; } .dim { color: var(--dim); } .good { color: var(--good); } .bad { color: var(--bad); }
div { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .35rem .9rem .35rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--dim); font-weight: 500; }
</style>
<h1 class="$mood">$title</h1>
<p class="dim">$subtitle</p>
$warnings
<h2>Slots</h2>
$slots
<h2>Recoveries</h2>
<p>$figures</p>
$recoveries
</html>
"""
)


def render(report: Mapping[str, Any]) -> str:
    """The page for a report of `readmit.gate.status`."""
    if report["draining"]:
        title, mood = "Shutting down", "bad"
    elif report["ready"]:
        title, mood = f"Serving from slot {report['serving']}", "good"
    else:
        title, mood = "Not ready: no engine answers correctly", "bad"
    probes = report["probes"]
    golden = f"{probes['count']} golden answers of {probes['model']}" if probes["count"] else "no golden answers"
    return _PAGE.substitute(
        refresh=_REFRESH_S,
        title=escape(title),
        mood=mood,
        subtitle=escape(f"Node {report['node']}, {golden}, {report['in_flight']} requests in flight"),
        warnings="".join(f'<p class="bad">{escape(text)}</p>' for text in _warnings(report)),
        slots=_table(
            ("slot", "state", "for", "recovering for", "phase", "path", "last correct answer", "says"),
            (_slot_row(slot) for slot in report["slots"]),
        ),
        figures=escape(_figures(report["lookups"])),
        recoveries=_table(
            ("slot", "cause", "path", "miss reason", "outcome", "seconds", "of that"),
            (_recovery_row(recovery) for recovery in report["recoveries"][:_SHOWN]),
        ),
    )


def _warnings(report: Mapping[str, Any]) -> Iterable[str]:
    if any(slot["verified"] is False for slot in report["slots"]):
        yield "Open without golden answers: nobody knows whether the model answers correctly."
    if report["probes"]["suspect"]:
        yield "Several ready slots answer wrongly: the golden answers are doubted, not the engines."
    if report["probes"]["error"]:
        yield report["probes"]["error"]
    if report["journal"]["error"]:
        yield f"The journal cannot be read: {report['journal']['error']}"


def _slot_row(slot: Mapping[str, Any]) -> tuple[str, ...]:
    recovering = slot["episode_id"] is not None
    expected = f" of about {slot['expected_s']:.1f}" if slot["expected_s"] is not None else ""
    correct = slot["last_correct_s"]
    return (
        slot["slot"],
        f"{slot['state']} ({slot['reason']})",
        f"{slot['since_s']:.0f} s",
        f"{slot['elapsed_s']:.1f} s{expected}" if recovering else "",
        str(slot["phase"]) if recovering else "",
        str(slot["path"]) if recovering else "",
        f"{correct:.0f} s ago" if correct is not None else "never",
        slot["message"],
    )


def _recovery_row(recovery: Mapping[str, Any]) -> tuple[str, ...]:
    longest = sorted(recovery["phases_s"].items(), key=lambda pair: -pair[1])[:3]
    reason = recovery["reason"] or ""
    return (
        recovery["slot"],
        recovery["cause"],
        recovery["path"],
        f"{reason} ({recovery['detail']})" if recovery["detail"] else reason,
        f"{recovery['outcome']}{'' if recovery['verified'] is not False else ' (unverified)'}",
        f"{recovery['total_s']:.2f}",
        ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in longest),
    )


def _figures(lookups: Mapping[str, Any]) -> str:
    if lookups["hit_rate"] is None:
        return "No engine has asked for resident weights yet."
    text = f"Hit rate {lookups['hit_rate']:.0%}: {lookups['hits']} hits, {lookups['misses']} misses"
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(lookups["reasons"].items()))
    return f"{text} ({reasons})." if reasons else f"{text}."


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{escape(text)}" for text in heads)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}' for cell in row)}" for row in rows)
    return f"<div><table><tr>{head}{body}</table></div>"
