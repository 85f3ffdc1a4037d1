"""The generated dashboards: checked in as generated, and as grafana/dashboard-linter wants them."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.observability.expressions import (
    ALERTS,
    DASHBOARDS,
    RULES,
    Query,
    daemon_families,
    gate_families,
    names,
    plain,
    queries,
    selectors,
)
from tests.observability.servers import ROOT, require

from readmit.observability import __main__ as command
from readmit.observability.yaml import dump

QUERIES = list(queries())
PANELS = [(uid, panel) for uid, board in DASHBOARDS.items() for panel in board["panels"]]
EVERY_BOARD = pytest.mark.parametrize("board", DASHBOARDS.values(), ids=DASHBOARDS)
EVERY_PANEL = pytest.mark.parametrize(
    "panel", [it for _, it in PANELS], ids=[f"{uid}/{it['title']}" for uid, it in PANELS]
)
EVERY_QUERY = pytest.mark.parametrize("query", QUERIES, ids=map(str, QUERIES))

FIXED_RANGE = {"readmit-recovery/Share of the last hour that was not ready/A": "its title names the hour"}
"""Queries whose rate has a range of its own, and why."""

UNUSED = {
    "readmit_attempts_started_total": "attempts of a loop; readmit_attempts_total has how they ended",
    "readmit_attempts_total": "for ad-hoc questions; the report shows each attempt",
    "readmit_cold_starts_total": "by detail, for ad-hoc questions; alerts use the unexpected ones",
    "readmit_hits_without_cold_start_total": "says why saved GPU time may be too low",
    "readmit_journal_last_event_timestamp_seconds": "for ad-hoc questions",
    "readmit_journal_lost_events_total": "read by the runbook; readmit_journal_degraded covers it",
    "readmit_journal_salvages_total": "read by the runbook",
    "readmit_journal_spool_bytes": "read by the runbook; readmit_journal_degraded covers it",
    "readmit_process_exits_total": "for ad-hoc questions",
    "readmit_recoveries_late_total": "readmit_slo_events has the window that budgets are counted in",
    "readmit_recoveries_open": "bookkeeping: started minus closed",
    "readmit_recoveries_unverified_total": "for gates that were opened without golden answers",
    "readmit_recovery_phases_total": "divides phase seconds for ad-hoc questions",
    "readmit_service_outage_seconds": "a histogram, for ad-hoc questions",
    "readmit_service_unready_seconds_total": "all of it, planned too; budgets use what burns",
    "readmit_slo_threshold_seconds": "what the node promises, for ad-hoc questions",
    "readmit_spans_dropped_total": "for ad-hoc questions",
    "readmit_spans_exported_total": "for ad-hoc questions",
    "readmit_unready_seconds_total": "all of it, planned too; budgets use what burns",
    "weightcache_capacity_bytes": "for ad-hoc questions; +Inf without a limit",
    "weightcache_quarantines_total": "weightcache_generations has those quarantined now",
    "weightcache_connections_refused_total": "for ad-hoc questions; the daemon's log says who was refused",
    "readmit_gate_engine_gpu_bytes": "for ad-hoc questions; the gate's page shows what an engine costs",
    "readmit_gate_engine_kv_tokens": "for ad-hoc questions; the gate's page shows what an engine costs",
    "readmit_gate_engine_private_bytes": "for ad-hoc questions; the gate's page shows what an engine costs",
    "readmit_gate_slot_unanswered_requests": "the gate's own memory, shown by /readyz?verbose",
    "readmit_gate_slot_wrong_verifications": "the gate's own memory, shown on its page",
}
"""Metrics that no rule and no dashboard reads, and why they exist."""


def test_what_is_checked_in_is_what_is_generated() -> None:
    assert command.main(["dashboards", "--check", "--into", str(ROOT)]) == 0


def test_check_tells_a_file_that_differs(tmp_path: Path) -> None:
    assert command.main(["dashboards", "--into", str(tmp_path)]) == 0
    (tmp_path / "dashboards/readmit-gate.json").unlink()
    assert command.main(["dashboards", "--check", "--into", str(tmp_path)]) == 1


@EVERY_BOARD
class TestBoard:
    def test_is_uneditable_and_has_a_name_that_stays(self, board: dict[str, Any]) -> None:
        assert board["editable"] is False
        assert board["uid"].startswith("readmit-")
        assert board["tags"] == ["readmit"]
        assert board["schemaVersion"] == 39

    def test_has_variables_for_datasource_job_and_instance(self, board: dict[str, Any]) -> None:
        source, job, instance, *others = board["templating"]["list"]
        assert (source["name"], source["type"], source["query"]) == ("datasource", "datasource", "prometheus")
        assert (job["name"], instance["name"]) == ("job", "instance")
        for variable in (job, instance, *others):
            assert variable["type"] == "query"
            assert variable["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert variable["query"]["query"].startswith("label_values(")
            assert variable["refresh"] == 2, "reload when the time changes"
            assert variable["multi"]
            assert variable["includeAll"]
            assert variable["allValue"] == ".+"

    def test_panels_neither_overlap_nor_leave_the_grid(self, board: dict[str, Any]) -> None:
        taken: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            at = panel["gridPos"]
            cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
            assert not cells & taken
            assert at["x"] + at["w"] <= 24
            taken |= cells
        assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"]) <= 20


@EVERY_PANEL
class TestPanel:
    def test_says_what_it_is_and_what_to_do(self, panel: dict[str, Any]) -> None:
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["targets"]

    def test_is_of_a_kind_that_grafana_has_from_10_to_13(self, panel: dict[str, Any]) -> None:
        assert panel["type"] in ("bargauge", "heatmap", "stat", "state-timeline", "table", "timeseries")
        assert "alert" not in panel, "alerts of panels went with Grafana 11"

    def test_links_to_a_runbook(self, panel: dict[str, Any]) -> None:
        (link,) = panel["links"]
        assert (ROOT / link["url"]).is_file()


@EVERY_QUERY
class TestQuery:
    def test_keeps_job_and_instance(self, query: Query) -> None:
        for metric, matchers in selectors(query.expr):
            assert 'job=~"$job"' in matchers
            assert ":" in metric or 'instance=~"$instance"' in matchers, "recorded sums have no instances"
        assert {name for name, _ in selectors(query.expr)} == names(query.expr), "a metric without any matcher"

    def test_counters_grow_and_rates_fit_the_screen(self, query: Query) -> None:
        kinds = {**daemon_families(), **gate_families()}
        for name in names(query.expr):
            if kinds.get(name) in ("counter", "histogram"):
                assert re.search(rf"(rate|increase|changes)\({name}\b", query.expr), f"{name} is a counter"
        if str(query) not in FIXED_RANGE:
            assert set(re.findall(r"\brate\([^\[]*\[([^\]]*)\]", query.expr)) <= {"$__rate_interval"}


def test_promtool_parses_every_query(tmp_path: Path) -> None:
    require("promtool")
    annotations = [it["expr"] for board in DASHBOARDS.values() for it in board["annotations"]["list"]]
    expressions = [plain(query.expr) for query in QUERIES] + [plain(expr) for expr in annotations]
    rules = [{"record": f"q:{number}:q", "expr": expr} for number, expr in enumerate(expressions)]
    file = tmp_path / "queries.yaml"
    file.write_text(dump({"groups": [{"name": "queries", "rules": rules}]}))
    result = subprocess.run(["promtool", "check", "rules", str(file)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


class TestMetrics:
    """What is asked for exists, and what exists is asked for."""

    def used(self) -> set[str]:
        boards = [query.expr for query in QUERIES]
        boards += [it["expr"] for board in DASHBOARDS.values() for it in board["annotations"]["list"]]
        variables = [it["query"]["query"] for b in DASHBOARDS.values() for it in b["templating"]["list"][1:]]
        return {
            name for expr in [*boards, *variables, *(it["expr"] for it in [*RULES, *ALERTS])] for name in names(expr)
        }

    def test_everything_asked_for_exists(self) -> None:
        there = {*daemon_families(), *gate_families(), *(rule["record"] for rule in RULES), "up"}
        assert self.used() - there == set()

    def test_everything_that_exists_is_asked_for_or_has_a_reason(self) -> None:
        there = {re.sub(r"_(bucket|sum|count)$", "", name) for name in {**daemon_families(), **gate_families()}}
        used = {re.sub(r"_(bucket|sum|count)$", "", name) for name in self.used()}
        assert there - used == set(UNUSED)
