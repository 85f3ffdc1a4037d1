"""The worst of a window, for any number of windows, from a short queue."""

from collections import deque
from collections.abc import Mapping
from typing import Final

WINDOWS_S: Final[Mapping[str, float]] = {"24h": 86_400.0, "7d": 604_800.0, "30d": 2_592_000.0}


class Worst:
    """Remembers of the recoveries in the longest window those that are the worst of some window that ends now.

    Of two recoveries the later one is in every window that the earlier one is in; so an earlier one that was not longer
    can be forgotten, and what is left falls from the front to the back.
    """

    def __init__(self) -> None:
        self.recoveries: deque[tuple[int, float]] = deque()

    def add(self, closed_ns: int, seconds: float) -> None:
        """Take in a recovery."""
        while self.recoveries and self.recoveries[-1][1] <= seconds:
            self.recoveries.pop()
        self.recoveries.append((closed_ns, seconds))

    def within(self, window_s: float, now_ns: int) -> float:
        """The duration in seconds of the worst recovery that closed in the last ``window_s``; 0 without any."""
        longest = max(WINDOWS_S.values())
        while self.recoveries and self.recoveries[0][0] < now_ns - longest * 1e9:
            self.recoveries.popleft()
        return next((seconds for closed_ns, seconds in self.recoveries if closed_ns >= now_ns - window_s * 1e9), 0.0)
