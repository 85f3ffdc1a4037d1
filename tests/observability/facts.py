"""What the journal says, by SQL alone: nothing here replays events, and nothing is shared with what is tested.

Only what somebody promised or configured comes from outside the journal: thresholds, budgets, histogram bounds.
"""

import functools
import sqlite3
from pathlib import Path
from typing import Any, Final

from weightcache.slo import Objectives
from weightcache.vocabulary import PATHS, PHASES, PLANNED_CAUSES

Found = dict[tuple[tuple[str, str], ...], float]
"""Values by labels, as Prometheus gives them."""

SECOND: Final = 1_000_000_000
MONTH_S: Final = 30 * 86_400
_SQL: Final = Path(__file__).with_name("facts.sql")


class Facts:
    """Questions to a journal of several nodes, as of a moment that `at` sets.

    Args:
        journal: the SQLite file.
        objectives: what the nodes promised.
        began_s: when Prometheus began to scrape them, in Unix seconds.
    """

    def __init__(self, journal: Path, objectives: Objectives, began_s: float) -> None:
        self._connection = sqlite3.connect(f"file:{journal}?mode=ro", uri=True)
        self._given("thresholds", "path, seconds", list(objectives.thresholds_s.items()))
        self._given("budgets", "path, events", list(objectives.late_events.items()))
        self._given("limits", "phase, seconds", list(objectives.phase_limits_s.items()))
        self._given("promises", "clock, ratio", list(objectives.ready_ratio.items()))
        self._given("bounds", "le, seconds", [*((str(it), it) for it in objectives.bounds_s()), ("+Inf", 9e18)])
        self._given("planned_causes", "cause", [(cause,) for cause in sorted(PLANNED_CAUSES)])
        self._given("phases", "phase, place", [(phase, place) for place, phase in enumerate(PHASES, 1)])
        self._given("paths", "path", [(path,) for path in PATHS])
        self._connection.executescript(_SQL.read_text())
        self._ran = functools.cache(self._ran_until)  # many questions are about the same moments
        self.outage_threshold_s = objectives.outage_threshold_s
        self.began_s = began_s
        self.now_s: float = 0
        overlapping = "SELECT count(*) FROM episodes WHERE closed_id IS NULL AND next_opened_id IS NOT NULL"
        assert self.one(overlapping)[()] == 0, "an episode that its slot's next one closed: not recorded so far"

    def at(self, now_s: float) -> "Facts":
        """The same at a moment, in Unix seconds."""
        self.now_s = now_s
        self._connection.execute("UPDATE moment SET now_ns = ?", [round(now_s * SECOND)])
        return self

    def rows(self, query: str, **values: Any) -> list[tuple[Any, ...]]:
        """Rows of a query, which may name ``:now`` and ``:since``, a month before."""
        now_ns = round(self.now_s * SECOND)
        given = {"now": now_ns, "since": now_ns - MONTH_S * SECOND, **values}
        return self._connection.execute(query, given).fetchall()

    def one(self, query: str, **values: Any) -> Found:
        """One number without labels, 0 for none."""
        return {(): float(self.rows(query, **values)[0][0] or 0)}

    def by(self, labels: str, query: str, **values: Any) -> Found:
        """Numbers by labels: the query's columns in order, the last one the number. An empty label is none."""
        names = labels.split()
        return {
            tuple(sorted((name, str(it)) for name, it in zip(names, row, strict=False) if it not in (None, ""))): float(
                row[-1] or 0
            )
            for row in self.rows(query, **values)
        }

    def events(self, labels: str, columns: str, where: str, minutes: float = MONTH_S / 60) -> Found:
        """How many events there are by labels, in the last minutes, by default a month's."""
        query = f"SELECT {columns}, count(*) FROM e WHERE at_ns > :begin AND at_ns <= :now AND {where} GROUP BY "
        return self.by(labels, query + _places(labels), begin=self.ago(minutes))

    def recovered(
        self, labels: str, columns: str, number: str = "count(*)", where: str = "1", minutes: float = MONTH_S / 60
    ) -> Found:
        """A number of the recoveries that ended in the last minutes by labels."""
        query = f"SELECT {columns}, {number} FROM recoveries WHERE closed_ns > :begin AND {where} GROUP BY "
        return self.by(labels, query + _places(labels), begin=self.ago(minutes))

    def ran(self, what: str, ago_s: float = 0, by: str = "clock", where: str = "1") -> dict[Any, float]:
        """Seconds that clocks ran until so many seconds ago: ``burned`` or ``observed``, by columns of ``clocks``."""
        return self._ran(what, self.ago(ago_s / 60), by, where)

    def _ran_until(self, what: str, moment: int, by: str, where: str) -> dict[Any, float]:
        begin = "max(begin_ns, grace_ns)" if what == "burned" else "begin_ns"
        state = "state = 'unready'" if what == "burned" else "state != 'stopped'"
        query = (
            f"SELECT {by}, sum(max(0, min(coalesce(end_ns, {moment}), {moment}) - {begin}) "
            f"* ({state} AND known_ns <= {moment})) / 1e9 FROM clocks WHERE {where} GROUP BY {by}"
        )
        return {row[:-1] if len(row) > 2 else row[0]: float(row[-1]) for row in self.rows(query)}

    def ago(self, minutes: float) -> int:
        """The time so many minutes before the moment, in nanoseconds."""
        return round((self.now_s - minutes * 60) * SECOND)

    def _given(self, table: str, columns: str, rows: list[tuple[Any, ...]]) -> None:
        self._connection.execute(f"CREATE TEMP TABLE {table} ({columns})")
        marks = ", ".join("?" for _ in columns.split())
        self._connection.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)


def _places(labels: str) -> str:
    return ", ".join(str(place) for place in range(1, len(labels.split()) + 1))
