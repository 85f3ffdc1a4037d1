"""The live part: a real node is scraped while an engine dies, and what Prometheus then says is what its journal says.

What clients ask of a gate is in no journal; here the clients count it themselves.
"""

import contextlib
import math
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from tests.observability import answers, expressions
from tests.observability.facts import Facts, Found
from tests.observability.figures import Answer, label, members
from tests.observability.lab import Lab
from tests.observability.questions import Question, Verdict, by_moment
from tests.observability.servers import ROOT, Prometheus, prometheus, wait_for
from tests.readmit.nodes import place

from readmit.gate.metrics import REQUEST_OUTCOMES
from readmit.probes import RESULTS
from weightcache.slo import Objectives
from weightcache.vocabulary import SLOT_STATES

CONFIG: Final = """\
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: [{rules}/readmit.rules.yaml, {rules}/readmit.alerts.yaml]
scrape_configs:
  - job_name: readmit
    static_configs: [{{targets: ["127.0.0.1:{daemon}"], labels: {{instance: live}}}}]
  - job_name: readmit-gate
    static_configs: [{{targets: ["127.0.0.1:{gate}"], labels: {{instance: live}}}}]
"""
OUTCOMES: Final = {200: "answered", 503: "not_ready"}
CALM_S: Final = 0.4
"""A scrape is compared where the journal is silent for so long around it: what a process counts just before it journals
it would be on one side only."""


class Live:
    """A node's run, as seen by its clients, by Prometheus and by its journal.

    Args:
        lab: the node, not yet started.
        server: a Prometheus that scrapes it.
    """

    def __init__(self, lab: Lab, server: Prometheus) -> None:
        self.lab, self.server = lab, server
        self.asked: Counter[str] = Counter()
        self.slowest_s = 0.0
        lab.up()
        wait_for(lambda: sum(server.query("up").values()) == 2, "both are scraped")
        self.began_s = self._calm("readmit_gate_ready")
        self._run()
        self.gate_s, self.daemon_s = self._calm("readmit_gate_ready"), self._calm("readmit_build_info")
        self.facts = Facts(self._journal, Objectives(), self.began_s)

    def _run(self) -> None:
        """Start, be refused or not, be answered, lose an engine beside another one."""
        self._ask(2)
        for slot in self.lab.slots:
            self.lab.until_closed(slot, 1)
        self._ask(5)
        assert self.lab.fault("a").path == "hit"
        self._ask(3)

    def _ask(self, times: int) -> None:
        for _ in range(times):
            began = time.monotonic()
            outcome = OUTCOMES[self.lab.ask()]
            self.asked[outcome] += 1
            if outcome == "answered":
                self.slowest_s = max(self.slowest_s, time.monotonic() - began)

    def _calm(self, metric: str) -> float:
        """The time of a scrape from now on around which the journal is silent."""
        after_s = time.time()
        found: list[float] = []

        def scraped() -> bool:
            series = self.server.api("query", query=f"{metric}[{math.ceil(time.time() - after_s) + 1}s]")["result"]
            times = [float(at) for each in series for at, _ in each["values"]]
            with contextlib.closing(sqlite3.connect(self._journal)) as connection:
                events = connection.execute("SELECT wall_ns / 1e9 FROM events WHERE wall_ns / 1e9 > ?", [after_s - 1])
                told = [at for (at,) in events]
            ripe = [at for at in times if after_s + CALM_S < at < time.time() - 2 * CALM_S]
            found.extend(at for at in ripe if all(abs(at - it) > CALM_S for it in told))
            return bool(found)

        wait_for(scraped, f"a scrape of {metric} between two events")
        return found[0]

    @property
    def _journal(self) -> Path:
        return self.lab.state_dir / "journal.sqlite3"

    # What was asked of the gate. --------------------------------------------------------------------------------------

    def gate_questions(self) -> Iterator[Question]:
        """Of the gate's dashboard, over exactly the time of the run."""
        for query in expressions.queries():
            if query.dashboard == "readmit-gate":
                expr = expressions.plain(query.expr, span=self.span, rate_interval=self.span, job="readmit-gate")
                # An age of a second or two, and its moment is noted apart from the journal's.
                tolerance = 0.25 if query.panel == "Since the last correct answer" else 0.05
                yield Question(str(query), expr, GATE[query.panel, query.letter](self), False, tolerance)

    @property
    def span(self) -> str:
        """The time of the run, from a scrape to a scrape."""
        return f"{round((self.gate_s - self.began_s) * 1000)}ms"

    def counted(self, labels: str, columns: str, where: str) -> Found:
        return self.facts.events(labels, columns, where, (self.gate_s - self.began_s) / 60)

    def verify(self, verdict: Verdict) -> None:
        """Compare the gate's dashboard, what is true of the node at a moment, exemplars and rules."""
        for question in self.gate_questions():
            self._compare(verdict, question, self.gate_s)
        for query in expressions.queries():
            answer = answers.EVER.get(str(query))
            expr = expressions.plain(query.expr, job="readmit")
            if answer and "[" not in expr and not any(":" in name for name in expressions.names(expr)):
                self._compare(verdict, Question(f"{query} @ live", expr, answer, False, 0.05), self.daemon_s)
        self._exemplars(verdict)
        self._rules(verdict)

    def _compare(self, verdict: Verdict, question: Question, at_s: float) -> None:
        data = self.server.api("query", query=question.expr, time=f"{at_s:.3f}")["result"]
        found = by_moment({tuple(sorted(it["metric"].items())): [[0, float(it["value"][1])]] for it in data}).get(0, {})
        verdict.compare(question, at_s, found, question.answer(self.facts.at(at_s)))

    def _exemplars(self, verdict: Verdict) -> None:
        """The latest recovery of each bucket has one, which leads to its trace and has its seconds.

        One before it has one too, unless both were over between the same two scrapes.
        """
        query = "readmit_time_to_semantic_readiness_seconds_bucket"
        told = self.server.api("query_exemplars", query=query, start=self.began_s - 600, end=time.time())
        found = {
            label(path=series["seriesLabels"]["path"], trace_id=it["labels"]["trace_id"]): float(it["value"])
            for series in told
            for it in series["exemplars"]
        }
        checked = "SELECT path, episode, seconds{} FROM recoveries r WHERE outcome = 'ready' AND verified {}"
        bucket = "GROUP BY path, (SELECT min(b.seconds) FROM bounds b WHERE b.seconds >= r.seconds)"
        self.facts.at(time.time())
        latest = {
            label(path=path, trace_id=episode): seconds
            for path, episode, seconds, _ in self.facts.rows(checked.format(", max(closed_ns)", bucket))
        }
        every = self.facts.by("path trace_id", checked.format("", ""))
        expected = {key: seconds for key, seconds in every.items() if key in latest or key in found}
        verdict.compare(
            Question("exemplars @ live", query, lambda facts: expected, False), self.daemon_s, found, expected
        )

    def _rules(self, verdict: Verdict) -> None:
        """The files load, and nothing in them is in error."""
        groups = self.server.api("rules")["groups"]
        found = Counter(rule["health"] for group in groups for rule in group["rules"])
        count = len(expressions.RULES) + len(expressions.ALERTS)
        loaded = {label(health="loaded"): float(sum(found.values())), label(health="err"): float(found["err"])}
        question = Question("rules @ live", "/api/v1/rules", lambda facts: {}, False)
        verdict.compare(question, self.daemon_s, loaded, {label(health="loaded"): count, label(health="err"): 0})

    def moved(self) -> set[str]:
        """Names of samples that had more than one value."""
        data = self.server.api("query", query='{__name__=~"(readmit|weightcache)_.+"}[1h]')["result"]
        return {it["metric"]["__name__"] for it in data if len({value for _, value in it["values"]}) > 1}

    def series(self) -> int:
        """How many series this node with two slots has, daemon and gate."""
        query = 'count({__name__=~"(readmit|weightcache)_.+"})'
        return round(self.server.query(query, self.daemon_s)[()])


def _states(live: Live) -> Answer:
    places = " ".join(f"WHEN '{name}' THEN {place}" for place, name in enumerate(SLOT_STATES, 1))
    query = "SELECT slot, name, max(id) FROM e WHERE kind = 'slot_state' AND at_ns <= :now GROUP BY 1"
    return lambda facts: facts.by("instance slot", f"SELECT 'live', slot, CASE name {places} END FROM ({query})")


def _last_correct(live: Live) -> Answer:
    query = (
        "SELECT max(age) FROM (SELECT (:now - max(at_ns)) / 1e9 AS age FROM e "
        "WHERE kind = 'probe' AND name = 'correct' AND at_ns <= :now GROUP BY slot)"
    )
    return lambda facts: facts.one(query)


def _first_byte(live: Live) -> Answer:
    """Each answer was counted, in no bucket above what its client waited; below that only the gate knows."""

    def answer(facts: Facts) -> Found:
        expr = f"sum by (le) (increase(readmit_gate_first_byte_seconds_bucket[{live.span}]))"
        counts = {float(dict(it)["le"]): count for it, count in live.server.query(expr, live.gate_s).items()}
        enough = min(le for le in counts if le >= live.slowest_s)
        assert counts[enough] == counts[math.inf] == live.asked["answered"]
        return live.server.query(f"histogram_quantile(0.95, {expr})", live.gate_s)

    return answer


def _requests(live: Live) -> Answer:
    every = dict.fromkeys((label(outcome=name) for name in REQUEST_OUTCOMES), 0.0)
    return lambda facts: every | {label(outcome=name): float(count) for name, count in live.asked.items()}


def _probes(live: Live) -> Answer:
    every = (label(result=name) for name in RESULTS)
    return lambda facts: members(live.counted("result", "name", "kind = 'probe'"), *every)


def _probe_mean(live: Live) -> Answer:
    query = (
        "SELECT avg(json_extract(attributes, '$.seconds')) FROM e WHERE kind = 'probe' "
        "AND name IN ('correct', 'wrong') AND at_ns > :begin AND at_ns <= :now"
    )
    return lambda facts: facts.one(query, begin=round(live.began_s * 1e9))


def _openings(live: Live) -> Answer:
    every = (label(slot=slot) for slot in live.lab.slots)
    return lambda facts: members(live.counted("slot", "slot", "kind = 'slot_state' AND name = 'ready'"), *every)


def _revocations(live: Live) -> Answer:
    reason = "json_extract(attributes, '$.reason')"
    where = "kind = 'slot_state' AND json_extract(attributes, '$.previous') = 'ready'"
    return lambda facts: live.counted("slot reason", f"slot, {reason}", where)


def _value(value: float, **labels: str) -> Callable[[Live], Answer]:
    return lambda live: lambda facts: {label(**labels): value}


GATE: Final[Mapping[tuple[str, str], Callable[[Live], Answer]]] = {
    ("State of each slot", "A"): _states,
    ("Gate ready", "A"): _value(1),
    ("Open without golden answers", "A"): _value(0),
    ("Golden answers doubted", "A"): _value(0),
    ("Override, time left", "A"): _value(0),
    ("Since the last correct answer", "A"): _last_correct,
    ("Requests by how they ended", "A"): _requests,
    ("Requests in flight", "A"): _value(0, instance="live"),
    ("First byte, p95", "A"): _first_byte,
    ("Golden questions", "A"): _probes,
    ("Mean time of a golden answer", "A"): _probe_mean,
    ("Openings and revocations", "A"): _openings,
    ("Openings and revocations", "B"): _revocations,
}
"""What the gate's panels show, by panel and query."""


@contextlib.contextmanager
def live(folder: Path) -> Iterator[Live]:
    """A run of a node and the Prometheus that watched it."""
    with place(Lab) as lab:
        lab.configure("a", "b", node="live")
        config = CONFIG.format(rules=ROOT / "alerts", daemon=lab.metrics_port, gate=lab.gate_port)
        with prometheus(folder, config) as server:
            yield Live(lab, server)
