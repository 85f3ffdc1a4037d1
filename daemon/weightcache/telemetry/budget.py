"""Recoveries of the last 90 days by how they kept their promise: the budgets in whole events are counted from here."""

from collections import deque
from typing import Final

from weightcache.slo import BUDGET_WINDOW_S

CLASSES: Final = ("good", "late", "failed")

_HOUR_NS: Final = 3_600_000_000_000


class Budget:
    """Counts by class in a sliding window. An hour leaves as a whole, so there are at most 2,161 of them."""

    def __init__(self) -> None:
        self.hours: deque[tuple[int, list[int]]] = deque()

    def add(self, closed_ns: int, class_: str) -> None:
        """Take in a recovery. One that closed before the latest one is counted with it."""
        hour = closed_ns // _HOUR_NS
        if not self.hours or self.hours[-1][0] < hour:
            self.hours.append((hour, [0] * len(CLASSES)))
        self.hours[-1][1][CLASSES.index(class_)] += 1

    def counts(self, now_ns: int) -> dict[str, int]:
        """How many of each class closed in the last `BUDGET_WINDOW_S`, and those of the hour in which it begins."""
        oldest = (now_ns - BUDGET_WINDOW_S * 1_000_000_000) // _HOUR_NS
        while self.hours and self.hours[0][0] < oldest:
            self.hours.popleft()
        return {class_: sum(counts[place] for _, counts in self.hours) for place, class_ in enumerate(CLASSES)}
