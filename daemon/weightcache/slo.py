"""What is promised: thresholds of recovery, shares of time, whole events, and the histogram bounds they lie on.

Standard library only.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from weightcache.errors import ConfigError
from weightcache.vocabulary import PATHS, PHASES

CLOCKS: Final = ("slot", "service")
"""Engine recovery (one slot's readiness) and service outage (no slot of the node is ready)."""

BUDGET_WINDOW_S: Final = 90 * 86_400
"""The window of the budgets in whole events."""

KEPT_DAYS: Final = 90.0
"""How long events stay in the journal: for the whole window of the budgets a report can say what burned them."""

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

READY_RATIO: Final[Mapping[str, float]] = {"slot": 0.99, "service": 0.999}
"""The promised share of observed time that a slot is ready, and that some slot of the node is."""

LATE_EVENTS: Final = 2
"""How many recoveries of a path may be late or fail within `BUDGET_WINDOW_S`, on a node."""

_SLOW_PHASES_S: Final[Mapping[str, float]] = {"load_weights": 600.0, "compile": 600.0, "kernel_warmup": 300.0}
PHASE_LIMITS_S: Final[Mapping[str, float]] = {phase: _SLOW_PHASES_S.get(phase, 120.0) for phase in PHASES}
"""How long a recovery may stay in one phase before it counts as stuck. The published cold start spends 495 s loading
weights, and less than 15 s in any other phase."""

_BOUNDS_S: Final = (0.5, 1, 2, 5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 300, 600, 900, 1800, 3600)


@dataclass(frozen=True)
class Objectives:
    """The promises of one node, by default those of this module."""

    thresholds_s: Mapping[str, float] = field(default_factory=lambda: THRESHOLDS_S)
    outage_threshold_s: float = OUTAGE_THRESHOLD_S
    ready_ratio: Mapping[str, float] = field(default_factory=lambda: READY_RATIO)
    late_events: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(PATHS, LATE_EVENTS))
    phase_limits_s: Mapping[str, float] = field(default_factory=lambda: PHASE_LIMITS_S)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Objectives":
        """The defaults with what is given in their place; of a table, single entries may be.

        Raises:
            ConfigError: ``slo``: there is no such promise, or a value cannot be one.
        """
        default = cls()
        changes = {name: _changed(name, getattr(default, name, None), value) for name, value in given.items()}
        return cls(**changes)

    @classmethod
    def parse(cls, text: str) -> "Objectives":
        """As `of`, from JSON.

        Raises:
            ConfigError: as `of`, or it is no JSON object.
        """
        try:
            given = json.loads(text)
        except ValueError as error:
            raise _unusable("the whole", str(error), "a JSON object") from error
        if not isinstance(given, dict):
            raise _unusable("the whole", text, "a JSON object")
        return cls.of(given)

    def threshold_s(self, path: str, last: str | None) -> float:
        """How long a recovery on this path so far may take.

        Args:
            path: its path; ``unknown`` until the engine has looked for its weights.
            last: the path of the slot's recovery before, None for a slot's first: until it is known better, as fast as
                this slot can be expected to be.
        """
        if path == "unknown":
            path = "off" if last == "off" else "miss" if last is None else "hit"
        return self.thresholds_s[path]

    def bounds_s(self) -> tuple[float, ...]:
        """Bounds of the histograms of recoveries and outages."""
        return bounds_s([*self.thresholds_s.values(), self.outage_threshold_s])


def bounds_s(thresholds_s: Iterable[float] = THRESHOLDS_S.values()) -> tuple[float, ...]:
    """Histogram bounds in seconds; every threshold is one, so that what is late can be counted exactly."""
    return tuple(sorted({*map(float, _BOUNDS_S), *map(float, thresholds_s)}))


def _changed(name: str, default: Any, value: Any) -> Any:
    if default is None:
        raise _unusable(name, name, f"one of {', '.join(each.name for each in fields(Objectives))}")
    if not isinstance(default, Mapping):
        return _positive(name, value)
    if not isinstance(value, Mapping) or not set(value) <= set(default):
        raise _unusable(name, value, f"a table with any of {', '.join(default)}")
    return {**default, **{key: _positive(f"{name}.{key}", each) for key, each in value.items()}}


def _positive(name: str, value: Any) -> float:
    most = 1.0 if name.startswith("ready_ratio") else float("inf")
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < most:
        raise _unusable(name, value, "a number above 0" + (" and below 1" if most == 1 else ""))
    return value


def _unusable(name: str, found: object, expected: str) -> ConfigError:
    return ConfigError(
        "slo",
        f"the promise {name} cannot be kept or broken",
        expected=expected,
        found=found,
        remedy="Correct [slo] in the node's configuration, or --slo",
    )
