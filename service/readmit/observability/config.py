"""What the generated rules and dashboards are made for. A fleet of its own makes them again with other values."""

from dataclasses import dataclass
from typing import Final, NamedTuple

from weightcache.vocabulary import CAUSES, PLANNED_CAUSES

FAULTS: Final = tuple(cause for cause in CAUSES if cause not in PLANNED_CAUSES)
"""Causes that nobody chose."""


class Burn(NamedTuple):
    """One pair of windows: alert when both burn the 30-day budget ``factor`` times faster than it lasts."""

    factor: float
    long: str
    short: str


BURNS: Final = (Burn(14.4, "1h", "5m"), Burn(6, "6h", "30m"), Burn(3, "1d", "2h"), Burn(1, "3d", "6h"))
"""The windows of the SRE workbook, chapter 5: 2 % of the budget in an hour, 5 % in six, 10 % in a day and in three."""

INTERVAL_S: Final = 60
"""Seconds between two evaluations of a recording rule."""

WINDOWS: Final = ("30m", "1h", "2h", "6h", "1d", "3d", "30d")
"""Windows of recorded rates; longer than 5 minutes they are averages of the rates over 5 minutes."""


@dataclass(frozen=True)
class Settings:
    """How a fleet is scraped, and when to speak up where no promise of the node's own says so.

    Args:
        job: the scrape job of the daemons; every query keeps the label, several jobs work side by side.
        gate_job: the scrape job of the gates.
        runbooks: where the runbooks are, with the last slash.
        cold_starts: so many unexpected cold starts of a job in an hour are one problem and not several.
        attempts: so many attempts at one recovery are a loop.
        recoveries: so many recoveries of a node from faults in half an hour are one, too.
        wrong_answers: so many wrong answers of a node in 15 minutes are no rounding.
        hit_rate: the least share of attaches that should map, over a week.
        hit_rate_attaches: with fewer attaches there is no rate.
    """

    job: str = "readmit"
    gate_job: str = "readmit-gate"
    runbooks: str = "alerts/runbooks/"
    cold_starts: int = 3
    attempts: int = 3
    recoveries: int = 3
    wrong_answers: int = 5
    hit_rate: float = 0.9
    hit_rate_attaches: int = 20
