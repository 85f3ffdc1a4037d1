"""The proof: every query, rule and alert, asked of a real Prometheus and compared with what the journal says.

::

    python -m tests.observability.proof [--days 40]          # SABOTAGE=hit_miss|units|labels must make it fail

The last line is JSON. The exit status is 1 where anything is wrong, empty or untested.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tests.observability import answers, expressions, figures, history, movement, sabotage, test_rules
from tests.observability.facts import Facts, Found
from tests.observability.live import Live, live
from tests.observability.questions import Question, Verdict, by_moment
from tests.observability.servers import Prometheus, prometheus, require

from readmit.observability.rules import recording_rules
from readmit.observability.yaml import dump

CONFIG: Final = "global:\n  evaluation_interval: 1h\n"
STEP_S: Final = 60
"""Between two moments at which every question is asked, and between two scrapes around them."""

LOOKBACK: Final = "--query.lookback-delta=59s"
"""A backfilled series that ends has no mark of staleness; every moment asked for has samples of its own instead."""


PANELS: Final = {str(query): query for query in expressions.queries() if query.dashboard != "readmit-gate"}
"""Queries of panels by name. What clients ask of a gate is in no journal: `live` has its dashboard."""


def questions() -> Iterator[Question]:
    """Of every panel, rule and alert."""
    for name, query in PANELS.items():
        always = name in answers.EVER
        answer = answers.EVER[name] if always else answers.MONTHLY[name]
        yield Question.of(name, expressions.plain(query.expr), answer, always)
    for rule in expressions.RULES:
        clock = rule.get("labels", {}).get("clock")
        name = f"{rule['record']} {clock}" if clock else rule["record"]
        yield Question.of(name, rule["expr"], answers.RULES[name])
    for alert in expressions.ALERTS:
        name = " ".join([alert["alert"], *filter(None, [alert["labels"].get("long")])])
        yield Question.of(name, alert["expr"], answers.ALERTS[name])


class Proof:
    """One history in one Prometheus.

    Args:
        folder: where everything is written.
        days: how long the history is.
    """

    def __init__(self, folder: Path, days: int) -> None:
        require("prometheus", "promtool")
        self.folder, self.days = folder, days
        self.pasts = history.write(folder, days)
        self.began_s = history.END_S - days * history.DAY_S
        self.facts = self._facts("journal")
        self.periods = [(history.END_S, history.END_S)]
        for past in self.pasts:
            begin, end = (at // history.SECOND // STEP_S * STEP_S for at in past.examined)
            self.periods.append((begin - STEP_S, end + 600))
        self._expected: dict[tuple[str, int], Found] = {}

    def _facts(self, name: str) -> Facts:
        return Facts(self.folder / f"{name}.sqlite3", history.OBJECTIVES, self.began_s)

    def ask(self, mistake: str | None = None) -> Verdict:
        """Put everything into a Prometheus of its own and ask it all; with a mistake in the collector, if any."""
        folder = self._fill(mistake)
        rates, *others = recording_rules()
        with prometheus(folder, CONFIG, LOOKBACK) as server:
            self._record(server, folder, [rates], self.began_s, history.END_S)
        with prometheus(folder, CONFIG, LOOKBACK) as server:
            for begin, end in self.periods:
                self._record(server, folder, others, begin - 600, end)
        verdict = Verdict()
        with prometheus(folder, CONFIG, LOOKBACK) as server:
            for question in questions():
                self._ask(server, question, verdict)
            for question in self._surroundings():
                self._ask(server, question, verdict)
            self._variables(server, verdict)
            self._one_node(server, verdict)
        return verdict

    def ask_briefly(self, mistake: str) -> Verdict:
        """With a mistake in the collector, ask only about the end, and only what is not recorded by rules."""
        verdict = Verdict()
        with prometheus(self._fill(mistake), CONFIG, LOOKBACK) as server:
            for question in questions():
                if not any(":" in metric for metric in expressions.names(question.expr)):
                    self._ask(server, question._replace(always=False), verdict)
        return verdict

    def _fill(self, mistake: str | None) -> Path:
        """Put everything where a Prometheus will find it, and say where."""
        folder = self.folder / (mistake or "right")
        for past in self.pasts:
            history.make_blocks(self._text(past, mistake, folder), folder / "data")
        return folder

    def _ask(self, server: Prometheus, question: Question, verdict: Verdict) -> None:
        for begin, end in self.periods if question.always else self.periods[:1]:
            found = by_moment(server.range(question.expr, begin, end, STEP_S))
            for at in range(begin, end + 1, STEP_S):
                verdict.compare(question, at, found.get(at, {}), self._answer(question, at))

    def _answer(self, question: Question, at: int) -> Found:
        key = question.name, at
        if key not in self._expected:
            self._expected[key] = question.answer(self.facts.at(at - question.lag_s))
        return self._expected[key]

    def _surroundings(self) -> Iterator[Question]:
        """Annotations."""
        for uid, board in expressions.DASHBOARDS.items():
            for annotation in board["annotations"]["list"]:
                expr = expressions.plain(annotation["expr"])
                yield Question(f"{uid}/annotation {annotation['name']}", expr, figures.began, True)

    def _variables(self, server: Prometheus, verdict: Verdict) -> None:
        for uid, name, metric, label in expressions.variables():
            if uid == "readmit-gate":
                continue
            found = server.api(
                f"label/{label}/values", **{"match[]": metric, "start": history.END_S - 3600, "end": history.END_S}
            )
            question = Question(f"{uid}/variable {name}", f"label_values({metric}, {label})", figures.began, False)
            self.facts.at(history.END_S)
            expected = answers.VARIABLES[name](self.facts)
            members = [dict.fromkeys(((("value", it),) for it in each), 1.0) for each in (found, expected)]
            verdict.compare(question, history.END_S, *members)

    def _one_node(self, server: Prometheus, verdict: Verdict) -> None:
        """What panels show to whoever has chosen one node; what is recorded has no instances any more."""
        for past in self.pasts:
            facts = self._facts(past.node).at(history.END_S)
            for name, query in PANELS.items():
                expr = expressions.plain(query.expr, instance=past.node)
                question = Question.of(f"{name} @ {past.node}", expr, answers.EVER.get(name) or answers.MONTHLY[name])
                if question.lag_s == 0:
                    found = by_moment(server.range(expr, history.END_S, history.END_S, STEP_S)).get(history.END_S, {})
                    verdict.compare(question, history.END_S, found, question.answer(facts))

    def _text(self, past: history.Past, mistake: str | None, folder: Path) -> Path:
        right = self.folder / f"{past.node}.om"
        if mistake is None:
            return right
        folder.mkdir(parents=True, exist_ok=True)
        wrong = folder / right.name
        with right.open() as lines, wrong.open("w") as file:
            file.writelines(sabotage.altered(mistake, lines))
        return wrong

    def _record(self, server: Prometheus, folder: Path, groups: list[Any], begin: int, end: int) -> None:
        # Where in a minute a group is evaluated hangs on its file's name.
        (folder / "groups.yaml").write_text(dump({"groups": groups}))
        # A request gives at most 11,000 points of a series: a week of minutes.
        options = ["--max-block-duration=168h", "rules", f"--url={server.url}", f"--start={begin}", f"--end={end}"]
        options += ["--output-dir=data", "--eval-interval=60s", "groups.yaml"]
        command = ["promtool", "tsdb", "create-blocks-from", *options]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def summary(proof: Proof, run: Live, verdict: Verdict, tested: dict[str, dict[str, int]]) -> dict[str, int]:
    """What was proven, counted from what there is.

    Args:
        proof: the history.
        run: the node that runs now.
        verdict: what came of the questions to both.
        tested: what `test_rules.counted` says, where those tests pass.
    """
    boards = expressions.DASHBOARDS.values()
    panels = {str(query) for query in expressions.queries()}
    there = {**expressions.daemon_families(), **expressions.gate_families()}
    moved = movement.moved().union(movement.CONSTANT, run.moved(), *(past.moved for past in proof.pasts))
    return {
        "panels": sum(len(board["panels"]) for board in boards),
        "queries": len([name for name in verdict.questions if " @ " not in name]),
        "empty_queries": len(verdict.empty.keys() | panels - verdict.answered),
        "wrong_values": len(verdict.wrong),
        "alerts": len(test_rules.NAMES),
        "alerts_page": len({it["alert"] for it in expressions.ALERTS if it["labels"]["severity"] == "page"}),
        "alerts_tested_silent": sum(bool(counts["silent"]) for counts in tested.values()),
        "alerts_tested_firing": sum(bool(counts["firing"]) for counts in tested.values()),
        "metrics": len(set(map(_family, there))),
        "metrics_no_test_moves": len({_family(name) for name in there.keys() - moved}),
        "series_per_node": run.series(),
    }


def _family(sample: str) -> str:
    return re.sub(r"_(bucket|sum|count)$", "", sample)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.observability.proof", description=__doc__)
    parser.add_argument("--days", type=int, default=40)
    options = parser.parse_args()
    mistake = os.environ.get("SABOTAGE") or None
    if mistake not in (None, *sabotage.MISTAKES):
        parser.error(f"SABOTAGE={mistake}: there are {', '.join(sabotage.MISTAKES)}")
    with tempfile.TemporaryDirectory(prefix="readmit-proof-") as name:
        folder = Path(name)
        proof = Proof(folder, options.days)
        verdict = proof.ask(mistake)
        print(f"{verdict.compared} comparisons with {options.days} days of history", file=sys.stderr)
        with live(folder / "live") as run:
            run.verify(verdict)
            tested = test_rules.counted() if all(map(test_rules.passes, test_rules.TESTS)) else {}
            told = summary(proof, run, verdict, tested)
    for panel in {str(query) for query in expressions.queries()} - verdict.answered:
        print(f"EMPTY {panel}", file=sys.stderr)
    for question, text in verdict.wrong.items():
        print(f"WRONG {question}\n  {text}", file=sys.stderr)
    print(json.dumps(told))
    right = not any(told[name] for name in ("empty_queries", "wrong_values", "metrics_no_test_moves"))
    tested = told["alerts"] == told["alerts_tested_silent"] == told["alerts_tested_firing"]
    return 0 if right and tested else 1


if __name__ == "__main__":
    sys.exit(main())
