"""Collectors with a mistake in them, for the proof to find: what is scraped is altered on its way to Prometheus."""

import re
from collections.abc import Iterable, Iterator
from typing import Final, Literal, get_args

Mistake = Literal["hit_miss", "units", "labels"]
MISTAKES: Final[tuple[Mistake, ...]] = get_args(Mistake)
_SWAPPED: Final = {"hit": "miss", "miss": "hit"}


def altered(how: Mistake, lines: Iterable[str]) -> Iterator[str]:
    """Lines of OpenMetrics as a collector with a mistake would have written them.

    ``hit_miss`` swaps hits and misses, ``units`` has milliseconds for seconds, ``labels`` has another label's name.
    """
    for line in lines:
        if how == "hit_miss":
            yield re.sub(r'(path|result)="(hit|miss)"', lambda it: f'{it[1]}="{_SWAPPED[it[2]]}"', line)
        elif how == "labels":
            yield re.sub(r"\bpath=", "route=", line)
        else:
            yield _in_milliseconds(line)


def _in_milliseconds(line: str) -> str:
    name = line.partition("{")[0]
    if "_seconds" not in name or "timestamp" in name or name.endswith(("_bucket", "_count")):
        return line
    series, value, at = line.rsplit(" ", 2)
    return f"{series} {float(value) * 1000!r} {at}"
