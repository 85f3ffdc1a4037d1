"""The proof on a shorter history, and that mistakes in the collector do not pass it."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.observability import expressions, movement, test_rules
from tests.observability.live import live
from tests.observability.proof import Proof, questions, summary
from tests.observability.sabotage import MISTAKES
from tests.observability.test_rules import NAMES

DAYS = 12
"""Every node's recording twice, so that the last time is examined with a past."""
TOO_FEW = {"readmit-overview/p95 by miss, and n/A"}
"""What says nothing of so few recoveries; forty days have enough."""
NEVER = {"ReadmitDaemonAbsent", "ReadmitTelemetryAbsent", "ReadmitJournalDegraded"}
"""Alerts that nothing recorded sets off; promtool's tests have them fire."""


@pytest.fixture(scope="module")
def proof() -> Iterator[Proof]:
    with tempfile.TemporaryDirectory(prefix="readmit-proof-") as folder:
        yield Proof(Path(folder), DAYS)


def told(wrong: dict[str, str]) -> str:
    return "\n".join(f"{name}\n  {text}" for name, text in wrong.items())


def test_every_query_rule_and_alert_says_what_the_journals_say(proof: Proof, tmp_path: Path) -> None:
    verdict = proof.ask()
    with live(tmp_path) as run:
        run.verify(verdict)
        counted = summary(proof, run, verdict, test_rules.counted())
    assert not verdict.wrong, told(verdict.wrong)
    assert not verdict.empty
    assert {str(query) for query in expressions.queries()} - verdict.answered == TOO_FEW
    assert counted["wrong_values"] == counted["metrics_no_test_moves"] == 0
    assert counted["alerts"] == counted["alerts_tested_silent"] == counted["alerts_tested_firing"] == len(NAMES)
    assert counted["alerts_page"] <= 4
    assert counted["series_per_node"] <= 900
    alerts = {question.name for question in questions() if question.name.partition(" ")[0] in NAMES}
    assert alerts <= verdict.questions
    assert alerts - verdict.answered == NEVER


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_collector_is_found(proof: Proof, mistake: str) -> None:
    assert len(proof.ask_briefly(mistake).wrong) >= 10


def test_what_never_moves_has_a_reason() -> None:
    there = {**expressions.daemon_families(), **expressions.gate_families()}
    assert set(movement.CONSTANT) <= there.keys() - movement.moved()
