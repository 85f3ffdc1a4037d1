"""Recoveries drawn: one bar of phases each, all to one scale. Words are HTML, so that they are legible on a phone."""

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any, Final

from weightcache.vocabulary import PHASES, UNATTRIBUTED

_WIDTH: Final = 1000
_HUES: Final = (0, 30, 210, 190, 250, 170, 140, 320, 20, 345, 70, 265, 45, 285)
"""One for each phase: neighbours differ."""


def stylesheet() -> str:
    """The colours of the phases."""
    rules = [f".p-{phase} {{ --phase: hsl({hue} 62% 52%); }}" for phase, hue in zip(PHASES, _HUES, strict=True)]
    return "\n".join([*rules, f".p-{UNATTRIBUTED} {{ --phase: hsl(220 6% 60%); }}"])


def bar(recovery: Mapping[str, Any], scale_s: float, limit_s: float | None = None) -> str:
    """The phases of one recovery of `readmit.gate.status` as SVG.

    Args:
        recovery: with its segments.
        scale_s: the seconds that the whole width stands for.
        limit_s: where to draw Amdahl's limit, None for nowhere.
    """
    spoken = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in recovery["phases_s"].items())
    drawn = "".join(_piece(segment, scale_s) for segment in recovery["segments"])
    if limit_s is not None and limit_s <= scale_s:
        at = _x(limit_s, scale_s)
        drawn += f'<line class="limit" x1="{at}" x2="{at}" y1="0" y2="16"><title>Amdahl {limit_s:.2f} s</title></line>'
    return (
        f'<svg class="bar" viewBox="0 0 {_WIDTH} 16" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(spoken or "no phase yet")}">{drawn}</svg>'
    )


def attempts(recovery: Mapping[str, Any]) -> Iterable[tuple[int, dict[str, Any]]]:
    """The recovery cut into its attempts. What no phase covers belongs to the attempt before, or to the first."""
    segments = recovery["segments"]
    number = next((segment["attempt"] for segment in segments if segment["attempt"] is not None), 1)
    found: dict[int, dict[str, Any]] = {}
    for segment in segments:
        number = number if segment["attempt"] is None else segment["attempt"]
        part = found.setdefault(number, {"segments": [], "phases_s": {}})
        part["segments"].append(segment)
        seconds = segment["end_s"] - segment["begin_s"]
        part["phases_s"][segment["phase"]] = part["phases_s"].get(segment["phase"], 0.0) + seconds
    return sorted(found.items())


def legend(recoveries: Iterable[Mapping[str, Any]]) -> str:
    """What the colours mean, for the phases that occur."""
    found = {phase for recovery in recoveries for phase in recovery["phases_s"]}
    items = (f'<li class="p-{phase}"><i></i>{phase}' for phase in (*PHASES, UNATTRIBUTED) if phase in found)
    return f'<ul class="legend" aria-label="Colours of the phases">{"".join(items)}</ul>'


def _piece(segment: Mapping[str, Any], scale_s: float) -> str:
    begin, end = _x(segment["begin_s"], scale_s), _x(segment["end_s"], scale_s)
    title = f"{segment['phase']} {segment['end_s'] - segment['begin_s']:.2f} s"
    if segment["attempt"] is not None:
        title += f", attempt {segment['attempt']}"
    return (
        f'<rect class="p-{escape(segment["phase"])}" x="{begin}" y="0" width="{max(end - begin, 1.0):.1f}" height="16">'
        f"<title>{escape(title)}</title></rect>"
    )


def _x(seconds: float, scale_s: float) -> float:
    return round(_WIDTH * seconds / scale_s, 1) if scale_s else 0.0
