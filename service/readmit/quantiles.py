"""How much a few recoveries can say about the slow ones.

The worst of n recoveries is at least the p-quantile with a probability of ``1 - p ** n``; a quantile of fewer than it
takes for 95 % is a guess, and is not shown.
"""

import math
from collections.abc import Sequence
from typing import Final

QUANTILES: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
_CONFIDENCE: Final = 0.95


def needed(quantile: float) -> int:
    """The least number of recoveries that say something about a quantile: 29 for 0.9, 59 for 0.95, 299 for 0.99."""
    return math.ceil(math.log(1 - _CONFIDENCE) / math.log(quantile))


def tell(seconds: Sequence[float], quantile: float) -> float | str:
    """The quantile of durations (nearest rank), or a sentence that says why there is none."""
    enough = needed(quantile)
    if len(seconds) < enough:
        return f"insufficient data (n={len(seconds)}, need {enough})"
    return sorted(seconds)[math.ceil(quantile * len(seconds)) - 1]
