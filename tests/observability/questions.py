"""Questions to Prometheus, and what came of them."""

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from tests.observability import expressions
from tests.observability.facts import Found
from tests.observability.figures import Answer

CLOSE: Final = 1e-6
ROUGHLY: Final = 0.03
"""For what recorded rates go into, which are evaluated between two scrapes, and lack some of a counter's first step."""


class Question(NamedTuple):
    """An expression and what it should say."""

    name: str
    expr: str
    answer: Answer
    always: bool
    """Whether it can be asked at any moment, and not only at the end."""
    tolerance: float = CLOSE
    """How far values may be from the facts, relatively."""
    lag_s: int = 0
    """How old what it reads is."""

    @classmethod
    def of(cls, name: str, expr: str, answer: Answer, always: bool = True) -> "Question":
        """One on what was recorded a minute before; a rule on recorded rates has its own way to say so."""
        recorded = any(":" in metric for metric in expressions.names(expr))
        lag_s = 60 if recorded and not name.startswith("job") else 0
        return cls(name, expr, answer, always, ROUGHLY if recorded else CLOSE, lag_s)


class Verdict:
    """What came of the questions."""

    def __init__(self) -> None:
        self.questions: set[str] = set()
        """By name."""
        self.compared = 0
        """At how many moments, of all questions."""
        self.wrong: dict[str, str] = {}
        """The first wrong answer by question."""
        self.empty: dict[str, str] = {}
        """Of those, where nothing came back though something should have."""
        self.answered: set[str] = set()
        """Questions that had any answer at any moment."""

    def compare(self, question: Question, at_s: float, found: Found, expected: Found) -> None:
        self.compared += 1
        self.questions.add(question.name)
        if found:
            self.answered.add(question.name)
        if _equal(found, expected, question.tolerance):
            return
        text = (
            f"at {at_s:.0f} {question.expr}\n  found    {_told(found, expected)}\n  expected {_told(expected, found)}"
        )
        self.wrong.setdefault(question.name, text)
        if expected and not found:
            self.empty.setdefault(question.name, text)


def _equal(found: Found, expected: Found, tolerance: float) -> bool:
    nothing = 1e-5 if tolerance == CLOSE else 2e-3
    return found.keys() == expected.keys() and all(
        math.isclose(value, expected[labels], rel_tol=tolerance, abs_tol=nothing) for labels, value in found.items()
    )


def _told(these: Found, those: Found) -> str:
    """What differs, in a few words."""
    different = {dict(labels).__str__(): value for labels, value in these.items() if those.get(labels) != value}
    return ", ".join(f"{labels}: {value:g}" for labels, value in sorted(different.items())[:6]) or "nothing"


def by_moment(series: Mapping[Any, list[Any]]) -> dict[int, Found]:
    found: dict[int, Found] = {}
    for labels, values in series.items():
        kept = tuple((name, value) for name, value in labels if name not in ("__name__", "job"))
        for at, value in values:
            found.setdefault(round(at), {})[kept] = value
    return found
