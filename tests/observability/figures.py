"""Figures that several answers rest on, worked out from the journal."""

from collections.abc import Callable, Mapping
from typing import Final

from tests.observability.facts import Facts, Found

from weightcache.vocabulary import PATHS

Answer = Callable[[Facts], Found]

_NEEDED: Final = 59
_HOUR_S: Final = 3600
_WEEK_MIN: Final = 7 * 24 * 60
MONTH_MIN: Final = 30 * 24 * 60
WINDOW_MIN: Final[Mapping[str, int]] = {
    "5m": 1,  # one rate as recorded
    "30m": 30,
    "1h": 60,
    "2h": 120,
    "6h": 360,
    "1d": 1440,
    "3d": 4320,
    "30d": MONTH_MIN,
}
_UNEXPECTED: Final = "cause NOT IN ('first_start', 'scale_out')"
MISSED: Final = "kind = 'lookup' AND name = 'miss'"
REASON: Final = "json_extract(attributes, '$.reason')"
DETAIL: Final = "coalesce(json_extract(attributes, '$.detail'), '')"


def above(found: Found, limit: float = 0) -> Found:
    return {labels: value for labels, value in found.items() if value > limit}


def label(**labels: str) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(labels.items()))


def members(found: Found, *labels: tuple[tuple[str, str], ...]) -> Found:
    """With every member of a closed list there, at 0 where nothing happened."""
    return {**dict.fromkeys(labels, 0.0), **found}


# Recoveries. ---------------------------------------------------------------------------------------------------------


def tail(facts: Facts, days: int, by: str = "") -> Found:
    """The worst recovery that could not use the cache, open ones at their age."""
    counts = (
        "CASE WHEN over THEN closed_ns >= :begin AND path IN ('miss', 'partial') ELSE path IN ('miss', 'partial') OR "
        "path = 'unknown' AND seconds > (SELECT seconds FROM thresholds WHERE path = 'hit') END"
    )
    columns, group = ("node, ", "GROUP BY node") if by else ("", "")
    query = f"SELECT {columns}max(seconds * ({counts})) FROM standing {group}"
    begin = round((facts.now_s - days * 86_400) * 1e9)
    return facts.by(by, query, begin=begin) if by else facts.one(query, begin=begin)


def worst_hit(facts: Facts) -> Found:
    return facts.one("SELECT max(seconds) FROM standing WHERE path = 'hit' AND (over IS NOT 1 OR closed_ns >= :since)")


def verified(facts: Facts, path: str, minutes: float) -> Found:
    """Verified recoveries by a path, by bucket."""
    query = (
        "SELECT le, (SELECT count(*) FROM recoveries r WHERE path = :path AND outcome = 'ready' AND verified "
        "AND closed_ns > :begin AND r.seconds <= b.seconds) FROM bounds b"
    )
    return facts.by("le", query, path=path, begin=facts.ago(minutes))


def p95(path: str) -> Answer:
    """The 95th percentile as Prometheus works it out of buckets, or nothing where it rests on too few."""

    def answer(facts: Facts) -> Found:
        counts = {float(dict(labels)["le"]): count for labels, count in verified(facts, path, MONTH_MIN).items()}
        total = counts[float("inf")]
        if total < _NEEDED:
            return {}
        rank, lower, below = 0.95 * total, 0.0, 0.0
        for le, count in sorted(counts.items()):
            if count >= rank:
                return {(): lower + (le - lower) * (rank - below) / (count - below)}
            lower, below = le, count
        raise AssertionError("the last bucket holds all")

    return answer


def slo_events(facts: Facts) -> Found:
    """Recoveries by path and class; planned ones, and those of a slot stopped on purpose, only when late."""
    late = "seconds > (SELECT t.seconds FROM thresholds t WHERE t.path = r.path)"
    class_ = f"CASE WHEN outcome != 'ready' AND NOT stopped THEN 'failed' WHEN {late} THEN 'late' ELSE 'good' END"
    query = (
        f"SELECT path, class, sum(n) FROM (SELECT path, {class_} AS class, 1 AS n FROM recoveries r "
        f"WHERE NOT (planned OR stopped) OR {late} UNION ALL "
        f"SELECT path, 'late', 1 FROM still WHERE deadline_s * 1e9 < now_ns) GROUP BY 1, 2"
    )
    every = [label(path=path, **{"class": name}) for path in PATHS for name in ("good", "late", "failed")]
    return members(facts.by("path class", query), *every)


def late_or_failed(facts: Facts) -> dict[str, float]:
    counts = dict.fromkeys(PATHS, 0.0)
    for labels, count in slo_events(facts).items():
        counts[dict(labels)["path"]] += count * (dict(labels)["class"] != "good")
    return counts


def budgets(facts: Facts) -> Found:
    """Whole events by path, of all nodes."""
    return facts.by("path", "SELECT path, events * (SELECT count(DISTINCT node) FROM e) FROM budgets")


def started(facts: Facts, causes: str, minutes: float, by: str = "instance", column: str = "node") -> Found:
    query = f"SELECT {column}, count(*) FROM standing WHERE opened_ns > :begin AND cause IN ({causes}) GROUP BY 1"
    return facts.by(by, query, begin=facts.ago(minutes))


def unexpected(facts: Facts, minutes: float, by: str, columns: str) -> Found:
    """Cold starts of slots whose weights could have been resident."""
    query = (
        f"SELECT {columns}, count(*) FROM recoveries JOIN cold_starts USING (node, episode) "
        f"WHERE {_UNEXPECTED} AND closed_ns > :begin GROUP BY {columns}"
    )
    return facts.by(by, query, begin=facts.ago(minutes))


def takeovers(facts: Facts) -> Found:
    """Slots lost while another one was ready. A crash first shows as an exit, at the moment of its fault."""
    state = "(SELECT state FROM slot_pieces s WHERE {} AND s.id < o.opened_id ORDER BY s.id DESC LIMIT 1)"
    lost = (
        "SELECT 1 FROM slot_pieces s WHERE s.node = o.node AND s.slot = o.slot AND s.state = 'ready' "
        "AND s.id < o.opened_id AND s.end_ns >= o.fault_ns AND NOT EXISTS (SELECT 1 FROM episodes x "
        "WHERE x.node = o.node AND x.slot = o.slot AND x.opened_id > s.id AND x.opened_id < o.opened_id)"
    )
    other = state.format("s.node = o.node AND s.slot = z.slot")
    query = (
        f"SELECT count(*) FROM episodes o WHERE opened_ns > :since AND opened_ns <= :now AND EXISTS ({lost}) "
        f"AND EXISTS (SELECT 1 FROM (SELECT DISTINCT node, slot FROM episodes) z "
        f"WHERE z.node = o.node AND z.slot != o.slot AND {other} = 'ready') "
        "AND told_path IS NOT 'standby'"  # that of the slot which took over
    )
    return facts.one(query)


# Time. ---------------------------------------------------------------------------------------------------------------


def rate(facts: Facts, what: str, minutes: float = 5) -> dict[str, float]:
    """By clock, the mean slope of its counter over the last minutes."""
    now, then = facts.ran(what), facts.ran(what, minutes * 60)
    return {clock: (now[clock] - then[clock]) / (minutes * 60) for clock in now}


def smoothed(counter: Callable[[float], dict[str, float]], minutes: int) -> dict[str, float]:
    """The mean of a counter's rates as recorded each minute. Evaluated between two scrapes, each spans four minutes.

    Args:
        counter: its values so many seconds ago.
        minutes: of how many rates.
    """
    # The sum of c(k) - c(k - 4) over all minutes k but the present one telescopes.
    late, early = ([counter(60 * (ago + shift)) for ago in range(1, 5)] for shift in (0, minutes))
    return {
        name: sum(one[name] - other.get(name, 0) for one, other in zip(late, early, strict=True)) / (240 * minutes)
        for name in late[0]
    }


def recorded(facts: Facts, what: str, minutes: int, later_s: int = 0) -> dict[str, float]:
    """The mean of a clock's rates, so many seconds later; where the history is shorter, of what there is."""
    slots_s = facts.one("SELECT min(fault_ns) / 1e9 FROM episodes")[()]
    # A service's clock is there before there are slots.
    there = {"slot": (facts.now_s - slots_s) / 60, "service": (facts.now_s - facts.began_s) / 60}
    means = {
        clock: smoothed(lambda ago_s: facts.ran(what, ago_s - later_s), min(minutes, round(there[clock])))
        for clock in there
    }
    return {clock: mean[clock] for clock, mean in means.items()}


def clocked(values: Mapping[str, float]) -> Found:
    return {label(clock=clock): value for clock, value in values.items()}


def unready_share(facts: Facts, minutes: int, later_s: int = 0) -> dict[str, float]:
    burned, observed = (recorded(facts, what, minutes, later_s) for what in ("burned", "observed"))
    return {clock: burned[clock] / observed[clock] for clock in observed if observed[clock] > 0}


def promises(facts: Facts) -> dict[str, float]:
    return {str(clock): float(ratio) for clock, ratio in facts.rows("SELECT clock, ratio FROM promises")}


def budget_left(facts: Facts) -> Found:
    promised = promises(facts)
    shares = unready_share(facts, MONTH_MIN)
    return clocked({clock: 1 - share / (1 - promised[clock]) for clock, share in shares.items()})


def slot_share(facts: Facts) -> Found:
    """The share of the last hour that each slot was not ready."""
    by, where = "node, slot", "clock = 'slot'"
    shares = {}
    burned = facts.ran("burned", 0, by, where), facts.ran("burned", _HOUR_S, by, where)
    observed = facts.ran("observed", 0, by, where), facts.ran("observed", _HOUR_S, by, where)
    for node, slot in observed[0]:
        whole = observed[0][node, slot] - observed[1][node, slot]
        if whole > 0:
            part = burned[0][node, slot] - burned[1][node, slot]
            shares[label(instance=node, slot=slot)] = part / whole
    return shares


def outage(facts: Facts) -> Found:
    """How long no slot of a node has been ready, where none is."""
    query = (
        "SELECT s.node, (now_ns - min(s.begin_ns)) / 1e9 FROM service_pieces s, moment WHERE s.known_ns <= now_ns "
        "AND s.id > coalesce((SELECT max(x.id) FROM service_pieces x WHERE x.node = s.node AND x.known_ns <= now_ns "
        "AND x.state != 'unready'), 0) GROUP BY s.node"
    )
    return facts.by("instance", query)


def burn(long: str, short: str, factor: float) -> Answer:
    def answer(facts: Facts) -> Found:
        promised = promises(facts)
        # A rate is recorded a minute before the windows that it goes into.
        shares = [unready_share(facts, WINDOW_MIN[window], 60 * (window == "5m")) for window in (long, short)]
        return clocked(
            {
                clock: share
                for clock, share in shares[0].items()
                if all(each.get(clock, 0) > factor * (1 - promised[clock]) for each in shares)
            }
        )

    return answer


# The cache. ----------------------------------------------------------------------------------------------------------


def lookups(facts: Facts, minutes: float, columns: str = "name", labels: str = "result") -> Found:
    return facts.events(labels, columns, "kind = 'lookup' AND name IN ('hit', 'miss')", minutes)


def week(facts: Facts) -> dict[str, float]:
    """Attaches of a week by result, as recorded."""

    def counter(ago_s: float) -> dict[str, float]:
        query = "SELECT result, count(*) FROM lookups WHERE at_ns <= :at AND result IN ('hit', 'miss') GROUP BY 1"
        return {"hit": 0.0, "miss": 0.0, **dict(facts.rows(query, at=round((facts.now_s - ago_s) * 1e9)))}

    return {result: rate * _WEEK_MIN * 60 for result, rate in smoothed(counter, _WEEK_MIN).items()}


def hit_rate(facts: Facts, minutes: float) -> float:
    counts = lookups(facts, minutes)
    return counts.get(label(result="hit"), 0) / sum(counts.values())


_PIECES: Final = """
WITH edges AS (
  SELECT g.id, begin_ns AS at_ns FROM generations g UNION SELECT generation_id, begin_ns FROM leases
  UNION SELECT generation_id, end_ns FROM leases WHERE end_ns IS NOT NULL
  UNION SELECT id, coalesce(end_ns, :now) FROM generations
  UNION SELECT id, :since FROM generations UNION SELECT id, :now FROM generations
), cut AS (
  SELECT id, at_ns AS begin_ns, lead(at_ns) OVER (PARTITION BY id ORDER BY at_ns) AS end_ns FROM edges
), pieces AS (
  SELECT bytes, (p.end_ns - p.begin_ns) / 1e9 AS seconds, json_extract(config, '$.device_capability') AS gpu,
         CASE WHEN EXISTS (SELECT 1 FROM leases l WHERE l.generation_id = p.id AND l.begin_ns <= p.begin_ns
                           AND coalesce(l.end_ns, 9e18) >= p.end_ns) THEN 'leased' ELSE 'idle' END AS use
  FROM cut p JOIN generations g USING (id)
  WHERE p.end_ns <= coalesce(g.end_ns, :now) AND p.begin_ns >= g.begin_ns AND p.begin_ns >= :since AND p.end_ns <= :now
)
"""
"""The month of each resident generation, cut where its first lease begins or its last one ends."""


def rent(facts: Facts) -> Found:
    """GiB-hours of the month, leased by an engine or idle."""
    return facts.by(
        "use", f"{_PIECES} SELECT use, sum(bytes * seconds) / 1024 / 1024 / 1024 / 3600 FROM pieces GROUP BY 1"
    )


def standbys(facts: Facts) -> Found:
    """GPU-hours that a hot standby of every engine on resident weights would have held."""
    return facts.one(f"{_PIECES} SELECT sum(seconds) / 3600 FROM pieces WHERE gpu IS NOT NULL AND use = 'leased'")


_GPUS: Final = (
    "coalesce((SELECT CASE WHEN json_extract(config, '$.device_capability') IS NULL THEN 0 "
    "ELSE json_extract(config, '$.tp_size') * json_extract(config, '$.pp_size') END "
    "FROM lookups l WHERE l.node = r.node AND l.slot = r.slot AND config IS NOT NULL AND l.at_ns <= r.closed_ns "
    "ORDER BY l.id DESC LIMIT 1), 0)"
)
"""How many GPUs the engine of a recovery has; none on a CPU."""


def gpu_lost(facts: Facts) -> Found:
    """GPU-hours of the month's recoveries."""
    return facts.one(f"SELECT sum({_GPUS} * r.seconds) / 3600 FROM recoveries r WHERE closed_ns > :since")


def gpu_saved(facts: Facts) -> Found:
    """GPU-hours that hits spared, against the mean of the cold starts before them that compare."""
    query = f"""
    WITH starts AS (
      SELECT r.node, r.path, r.seconds, r.closed_ns, {_GPUS} AS gpus, (
               SELECT json_array(json_extract(config, '$.checkpoint_digest'), json_extract(config, '$.dtype'),
                                 json_extract(config, '$.tp_size'), json_extract(config, '$.engine'))
               FROM lookups l WHERE l.node = r.node AND l.episode = r.episode ORDER BY l.id DESC LIMIT 1) AS weights, (
               SELECT json_array(json_extract(attributes, '$.starting_state.page_cache'),
                                 json_extract(attributes, '$.starting_state.compile_cache'),
                                 json_extract(attributes, '$.starting_state.kernel_cache'))
               FROM e WHERE e.node = r.node AND e.episode = r.episode AND kind = 'attempt_start'
               ORDER BY e.id LIMIT 1) AS state
      FROM recoveries r WHERE outcome = 'ready' AND r.node IN (
        SELECT node FROM lookups WHERE json_extract(config, '$.device_capability') IS NOT NULL)
    )
    SELECT sum(gpus * max(0, (
             SELECT avg(c.seconds) FROM starts c WHERE (c.node, c.weights, c.state) = (s.node, s.weights, s.state)
             AND c.path IN ('miss', 'off') AND c.closed_ns < s.closed_ns) - seconds)) / 3600
    FROM starts s WHERE path IN ('hit', 'standby') AND closed_ns > :since
    """
    return facts.one(query)


def load_share(facts: Facts) -> float:
    """F: the share of cold recoveries that loads weights."""
    query = (
        "SELECT sum(p.seconds * (phase = 'load_weights')) / sum(p.seconds) FROM recoveries JOIN phase_seconds p "
        "USING (node, episode) WHERE closed_ns > :since AND path IN ('miss', 'off')"
    )
    return facts.one(query)[()]


def began(facts: Facts) -> Found:
    """Recoveries that a scrape of the last minute was the first to show, or to show no longer."""
    fault = "max(fault_ns * (coalesce(closed_ns, 9e18) > :at))"
    query = f"SELECT node, slot, {fault} FROM episodes WHERE opened_ns <= :at GROUP BY 1, 2"
    now = facts.by("instance slot", query, at=facts.ago(0))
    before = facts.by("instance slot", query, at=facts.ago(1))
    return {labels: 1.0 for labels, value in now.items() if labels in before and before[labels] != value}
