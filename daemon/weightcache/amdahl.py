"""Amdahl's account of a recovery: what faster loading of weights can bring, what it brought, and what is left.

With F the share of a cold recovery that loads weights and S the factor by which loading got faster, the recovery gets
``1 / ((1 - F) + F / S)`` times faster, and never more than ``1 / (1 - F)`` times.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

LOAD = "load_weights"


@dataclass(frozen=True)
class Account:
    """A cold recovery and one from resident weights, compared. Times in seconds."""

    cold_s: float
    resident_s: float
    fraction: float
    """F: the share of the cold recovery that loads weights."""
    factor: float
    """S: how much faster the weights are there."""
    predicted: float
    """How much faster the recovery is if nothing else changed."""
    measured: float
    """How much faster it is. What lies between this and `predicted` is change in the other phases."""
    limit: float
    """How much faster it could get if weights took no time at all."""
    next_phase: str | None
    """The longest phase that is left beside the weights: the next one worth work."""
    next_phase_s: float


def speedup(fraction: float, factor: float) -> float:
    """How much faster the whole gets when a ``fraction`` of it (0 to 1) gets ``factor`` times faster."""
    return 1 / ((1 - fraction) + fraction / factor)


def limit(fraction: float) -> float:
    """The bound of `speedup` as the factor grows; infinite where the fraction is everything."""
    return math.inf if fraction >= 1 else 1 / (1 - fraction)


def account(cold: Mapping[str, float], resident: Mapping[str, float]) -> Account:
    """Compare phases in seconds, `UNATTRIBUTED` included, of a cold recovery and of one from resident weights.

    Raises:
        ValueError: one of them has no time in ``load_weights``, so that there is nothing to compare.
    """
    for which, phases in (("cold", cold), ("resident", resident)):
        if not phases.get(LOAD):
            raise ValueError(f"the {which} recovery has no time in {LOAD}: its phases are {sorted(phases)}")
    cold_s, resident_s = sum(cold.values()), sum(resident.values())
    fraction, factor = cold[LOAD] / cold_s, cold[LOAD] / resident[LOAD]
    rest = {name: seconds for name, seconds in resident.items() if name != LOAD}
    next_phase = max(rest, key=lambda name: rest[name], default=None)
    return Account(
        cold_s=cold_s,
        resident_s=resident_s,
        fraction=fraction,
        factor=factor,
        predicted=speedup(fraction, factor),
        measured=cold_s / resident_s,
        limit=limit(fraction),
        next_phase=next_phase,
        next_phase_s=rest[next_phase] if next_phase else 0.0,
    )
