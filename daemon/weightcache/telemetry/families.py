"""Counters and histograms whose every member exists at 0 from the start.

They are plain numbers, fed by replay and read at a scrape. `prometheus_client`'s own instruments would export a member
only once it was used, so that the first miss of a kind could not be seen as an increase.
"""

import bisect
import itertools
import logging
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from prometheus_client.core import CounterMetricFamily, Exemplar, HistogramMetricFamily

log = logging.getLogger(__name__)

ANY: Final = ((),)
"""The members of a family without labels."""


class Trace(NamedTuple):
    """What an exemplar points to: a trace, and when it ended, in Unix seconds."""

    id: str
    at_s: float


class Counter:
    """A counter over closed lists.

    Args:
        name: with ``_total``.
        text: what a reader should know.
        labels: the names of its labels.
        members: every combination of label values there can be.
    """

    def __init__(
        self, name: str, text: str, labels: Sequence[str] = (), members: Iterable[tuple[str, ...]] = ANY
    ) -> None:
        self.name, self.text, self.labels = name, text, labels
        self.values: dict[tuple[str, ...], float] = dict.fromkeys(members, 0.0)
        self._exemplars: dict[tuple[str, ...], Exemplar] = {}

    def step(self, *member: str, by: float = 1.0, trace: Trace | None = None) -> None:
        """Count; a member off the closed lists comes from another release's journal, and is logged instead."""
        if member not in self.values:
            log.warning("%s has no member %s", self.name, dict(zip(self.labels, member, strict=False)))
            return
        self.values[member] += by
        if trace:
            self._exemplars[member] = Exemplar({"trace_id": trace.id}, by, trace.at_s)

    def state(self) -> dict[str, Any]:
        """What was counted, as plain data."""
        exemplars = [[member, list(exemplar)] for member, exemplar in self._exemplars.items()]
        return {"values": list(self.values.items()), "exemplars": exemplars}

    def restore(self, state: dict[str, Any]) -> None:
        """Count on from a `state`. A member that is not on the closed lists any more is not exported any more."""
        found = {tuple(member): value for member, value in state["values"]}
        self.values |= {member: value for member, value in found.items() if member in self.values}
        exemplars = {tuple(member): Exemplar(*exemplar) for member, exemplar in state["exemplars"]}
        self._exemplars |= {member: it for member, it in exemplars.items() if member in self.values}

    def collect(self) -> CounterMetricFamily:
        family = CounterMetricFamily(self.name, self.text, labels=self.labels)
        for member, value in self.values.items():
            family.add_metric(member, value, exemplar=self._exemplars.get(member))
        return family


class Histogram:
    """A classic histogram over one closed list.

    Args:
        name: with its unit.
        text: what a reader should know.
        label: the name of its label, or None.
        members: the values of the label.
        bounds: upper bounds, rising, without infinity.
    """

    def __init__(
        self, name: str, text: str, label: str | None, members: Iterable[str], bounds: Sequence[float]
    ) -> None:
        self.name, self.text, self.bounds = name, text, bounds
        self.labels = [label] if label else []
        keys: Iterable[tuple[str, ...]] = ((member,) for member in members) if label else ANY
        self._counts: dict[tuple[str, ...], list[int]] = {key: [0] * (len(bounds) + 1) for key in keys}
        self._sums = dict.fromkeys(self._counts, 0.0)
        self._exemplars: dict[tuple[tuple[str, ...], int], Exemplar] = {}
        self._les = [*map(str, map(float, bounds)), "+Inf"]

    def observe(self, *member: str, value: float, trace: Trace | None = None) -> None:
        """Count a value in the bucket of the lowest bound that is not below it."""
        if member not in self._counts:
            log.warning("%s has no member %s", self.name, member)
            return
        bucket = bisect.bisect_left(self.bounds, value)
        self._counts[member][bucket] += 1
        self._sums[member] += value
        if trace:
            self._exemplars[member, bucket] = Exemplar({"trace_id": trace.id}, value, trace.at_s)

    def state(self) -> dict[str, Any]:
        """What was observed, as plain data."""
        exemplars = [[member, list(exemplar)] for (member, _), exemplar in self._exemplars.items()]
        counted = {"counts": list(self._counts.items()), "sums": list(self._sums.items())}
        return {"bounds": self.bounds, **counted, "exemplars": exemplars}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a `state`. What was counted below a bound that is gone counts below the next higher one."""
        places = [bisect.bisect_left(self.bounds, bound) for bound in state["bounds"]] + [len(self.bounds)]
        for member, counts in state["counts"]:
            if (mine := self._counts.get(tuple(member))) is not None:
                for place, count in zip(places, counts, strict=True):
                    mine[place] += count
        sums = {tuple(member): value for member, value in state["sums"]}
        self._sums |= {member: value for member, value in sums.items() if member in self._sums}
        for member, (labels, value, at_s) in state["exemplars"]:
            if tuple(member) in self._counts:
                place = bisect.bisect_left(self.bounds, value)
                self._exemplars[tuple(member), place] = Exemplar(labels, value, at_s)

    def collect(self) -> HistogramMetricFamily:
        family = HistogramMetricFamily(self.name, self.text, labels=self.labels)
        for member, counts in self._counts.items():
            buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
            for bucket, total in enumerate(itertools.accumulate(counts)):
                exemplar = self._exemplars.get((member, bucket))
                buckets.append((self._les[bucket], total, exemplar) if exemplar else (self._les[bucket], total))
            family.add_metric(member, buckets, self._sums[member])
        return family
