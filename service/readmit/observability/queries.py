"""PromQL that several panels share. Every selector keeps the job and the instance that the reader chose."""

from typing import Final

_CHOSEN: Final = ('job=~"$job"', 'instance=~"$instance"')


def of(metric: str, *matchers: str, **equal: str) -> str:
    """A metric of the chosen jobs and instances."""
    return _selector(metric, *_CHOSEN, *matchers, **equal)


def recorded(metric: str, *matchers: str, **equal: str) -> str:
    """A recorded metric of the chosen jobs; it has no instances any more."""
    return _selector(metric, _CHOSEN[0], *matchers, **equal)


def grown(metric: str, *matchers: str, by: str = "", over: str = "$__range", **equal: str) -> str:
    """How much a counter grew."""
    clause = f" by ({by})" if by else ""
    return f"sum{clause} (increase({of(metric, *matchers, **equal)}[{over}]))"


def ratio(part: str, whole: str) -> str:
    """A share; where there is no whole there is no share, rather than 0/0."""
    return f"{part} / ({whole} > 0)"


def _selector(metric: str, *matchers: str, **equal: str) -> str:
    equalities = [f'{name}="{value}"' for name, value in equal.items()]
    return f"{metric}{{{', '.join([*matchers, *equalities])}}}"
