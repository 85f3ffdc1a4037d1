"""What is promised: thresholds of recovery, the share of time a slot is ready, and the histogram bounds they lie on."""

from collections.abc import Iterable, Mapping
from typing import Final

THRESHOLDS_S: Final[Mapping[str, float]] = {
    "standby": 5.0,
    "hit": 60.0,
    "partial": 600.0,
    "miss": 600.0,
    "off": 600.0,
    "unknown": 600.0,
}
"""From the fault to the first correct answer, by path. The published recoveries of a model of 1 TB took 32 s by hit and
527 s by miss."""

OUTAGE_THRESHOLD_S: Final = 60.0
"""How long a node may be without any ready slot."""

READY_RATIO: Final = 0.99
"""The share of its observed time that a slot is ready."""

_BOUNDS_S: Final = (0.5, 1, 2, 5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 300, 600, 900, 1800, 3600)


def bounds_s(thresholds_s: Iterable[float] = THRESHOLDS_S.values()) -> tuple[float, ...]:
    """Histogram bounds in seconds; every threshold is one, so that what is late can be counted exactly."""
    return tuple(sorted({*map(float, _BOUNDS_S), *map(float, thresholds_s)}))
