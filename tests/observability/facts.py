"""What the journal says, by SQL alone: nothing here replays events, and nothing is shared with what is tested.

Times are Unix nanoseconds of the events themselves; every question is about what happened up to ``now``.
"""

import sqlite3
from pathlib import Path
from typing import Any, Final

Found = dict[tuple[tuple[str, str], ...], float]
"""Values by labels, as Prometheus gives them."""

MONTH_NS: Final = 30 * 86_400 * 1_000_000_000

_VIEWS: Final = """
CREATE TEMP VIEW opened AS
  SELECT node, slot, episode, coalesce(json_extract(attributes, '$.cause'), name) cause, wall_ns opened_ns,
         min(wall_ns, coalesce(wall_ns - boottime_ns + json_extract(attributes, '$.fault_boottime_ns'), wall_ns))
         fault_ns
  FROM events WHERE kind = 'episode_open';
CREATE TEMP VIEW closed AS
  SELECT o.node, o.slot, o.episode, o.cause, o.fault_ns, c.wall_ns closed_ns, c.name outcome,
         json_extract(c.attributes, '$.verified') verified, json_extract(c.attributes, '$.path') told_path,
         (c.wall_ns - o.fault_ns) / 1e9 seconds
  FROM opened o JOIN events c ON c.node = o.node AND c.episode = o.episode AND c.kind = 'episode_close';
CREATE TEMP VIEW rank_results AS
  SELECT node, episode, attempt, coalesce(rank, 0) r,
         CASE WHEN sum(name = 'miss') THEN 'miss' ELSE max(name) END result
  FROM events WHERE kind = 'lookup' GROUP BY 1, 2, 3, 4;
CREATE TEMP VIEW loading_ranks AS
  SELECT DISTINCT node, episode, attempt, coalesce(rank, 0) r
  FROM events WHERE kind = 'phase_begin' AND name = 'load_weights';
CREATE TEMP VIEW attempt_paths AS
  SELECT node, episode, attempt,
         CASE WHEN count(DISTINCT result) > 1 THEN CASE WHEN sum(result = 'hit') THEN 'partial' ELSE 'miss' END
              WHEN max(result) = 'hit' AND EXISTS (
                SELECT 1 FROM loading_ranks l WHERE (l.node, l.episode, l.attempt) = (m.node, m.episode, m.attempt)
                AND l.r NOT IN (SELECT r FROM rank_results x
                                WHERE (x.node, x.episode, x.attempt) = (m.node, m.episode, m.attempt))) THEN 'unknown'
              ELSE max(result) END path
  FROM rank_results m GROUP BY 1, 2, 3;
CREATE TEMP VIEW episode_paths AS
  SELECT node, episode,
         CASE WHEN count(DISTINCT path) = 1 THEN max(path)
              WHEN sum(path IN ('hit', 'partial')) THEN 'partial' ELSE 'miss' END path
  FROM attempt_paths WHERE path != 'unknown' GROUP BY 1, 2;
CREATE TEMP TABLE recoveries AS
  SELECT c.*, coalesce(told_path, p.path, 'unknown') path
  FROM closed c LEFT JOIN episode_paths p ON p.node = c.node AND p.episode = c.episode;
CREATE TEMP VIEW last_misses AS
  SELECT node, episode, json_extract(attributes, '$.reason') reason, json_extract(attributes, '$.detail') detail,
         row_number() OVER (PARTITION BY node, episode ORDER BY attempt DESC, coalesce(rank, 0)) place
  FROM events WHERE kind = 'lookup' AND name = 'miss';
"""


class Facts:
    """Questions to a journal of several nodes.

    Args:
        journal: the SQLite file.
        now_s: the present, in Unix seconds.
    """

    def __init__(self, journal: Path, now_s: int) -> None:
        self._connection = sqlite3.connect(journal)
        self._connection.executescript(_VIEWS)
        self.now_ns = now_s * 1_000_000_000
        self.since_ns = self.now_ns - MONTH_NS

    def rows(self, query: str, **values: Any) -> list[tuple[Any, ...]]:
        """Rows of a query, which may name ``:now`` and ``:since``."""
        return self._connection.execute(query, {"now": self.now_ns, "since": self.since_ns, **values}).fetchall()

    def value(self, query: str, **values: Any) -> float:
        """One number, 0 for none."""
        return float(self.rows(query, **values)[0][0] or 0)

    def by(self, labels: str, query: str, **values: Any) -> Found:
        """Numbers by labels: the query's columns in order, the last one the number."""
        names = labels.split()
        return {
            tuple(sorted((name, str(it)) for name, it in zip(names, row, strict=False) if it is not None)): float(
                row[-1]
            )
            for row in self.rows(query, **values)
        }

    def events(self, labels: str, columns: str, where: str) -> Found:
        """How many events of the month there are by labels."""
        query = (
            f"SELECT {columns}, count(*) FROM events WHERE wall_ns > :since AND wall_ns <= :now AND {where} GROUP BY "
        )
        places = ", ".join(str(number) for number in range(1, len(labels.split()) + 1))
        return self.by(labels, query + places)

    def recovered(self, labels: str, columns: str, number: str = "count(*)", where: str = "1") -> Found:
        """A number of the month's recoveries by labels."""
        places = ", ".join(str(place) for place in range(1, len(labels.split()) + 1))
        period = "closed_ns > :since AND closed_ns <= :now"
        return self.by(
            labels, f"SELECT {columns}, {number} FROM recoveries WHERE {period} AND {where} GROUP BY {places}"
        )
