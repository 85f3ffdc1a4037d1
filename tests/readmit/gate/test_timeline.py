"""Recoveries as bars."""

import re
from typing import Any

from readmit.gate.timeline import attempts, bar, legend, stylesheet
from weightcache.vocabulary import PHASES, UNATTRIBUTED


def recovery(*pieces: tuple[str, int | None, float, float]) -> dict[str, Any]:
    segments = [{"phase": it[0], "attempt": it[1], "begin_s": it[2], "end_s": it[3]} for it in pieces]
    phases: dict[str, float] = {}
    for phase, _, begin, end in pieces:
        phases[phase] = phases.get(phase, 0.0) + end - begin
    return {"segments": segments, "phases_s": phases}


def test_a_bars_pieces_are_as_wide_as_their_phases_are_long() -> None:
    drawn = bar(recovery(("spawn", 1, 0, 2), ("import", 1, 2, 5)), scale_s=10)
    assert re.findall(r'class="p-(\w+)" x="([\d.]+)" y="0" width="([\d.]+)"', drawn) == [
        ("spawn", "0.0", "200.0"),
        ("import", "200.0", "300.0"),
    ]
    assert 'aria-label="spawn 2.00 s, import 3.00 s"' in drawn


def test_the_limit_is_drawn_where_it_lies_within_the_scale() -> None:
    one = recovery(("spawn", 1, 0, 2))
    assert 'class="limit" x1="400.0"' in bar(one, 10, 4)
    assert "limit" not in bar(one, 10, 11)
    assert "limit" not in bar(one, 10)


def test_a_recovery_without_duration_can_be_drawn() -> None:
    assert "<rect" not in bar(recovery(), 0)
    assert 'width="1.0"' in bar(recovery(("detect", None, 0, 0)), 0)


def test_what_no_phase_covers_belongs_to_the_attempt_before() -> None:
    pieces = (("detect", None, 0, 1), ("spawn", 1, 1, 2), (UNATTRIBUTED, None, 2, 3), ("backoff", 2, 3, 4))
    (first, one), (second, two) = attempts(recovery(*pieces))
    assert (first, second) == (1, 2)
    assert one["phases_s"] == {"detect": 1, "spawn": 1, UNATTRIBUTED: 1}
    assert two["phases_s"] == {"backoff": 1}


def test_every_phase_has_a_colour_and_the_legend_shows_those_that_occur() -> None:
    colours = re.findall(r"\.p-(\w+) \{ --phase: (hsl\([^)]*\)); \}", stylesheet())
    assert [phase for phase, _ in colours] == [*PHASES, UNATTRIBUTED]
    assert len({colour for _, colour in colours}) == len(colours)
    shown = legend([recovery(("import", 1, 0, 1)), recovery(("spawn", 1, 0, 1))])
    assert re.findall(r'<li class="p-(\w+)">', shown) == ["spawn", "import"]
