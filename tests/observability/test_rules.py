"""The generated rule files: checked in as generated, sound to promtool, and tested there for silence and for firing."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.observability.servers import ROOT, require

from readmit.observability import __main__ as command
from readmit.observability.alerts import Alerts
from readmit.observability.config import Settings
from readmit.observability.rules import recording_rules
from readmit.observability.yaml import dump

RULES = [rule for group in recording_rules() for rule in group["rules"]]
ALERTS = [rule for group in Alerts(Settings()).groups() for rule in group["rules"]]
NAMES = sorted({alert["alert"] for alert in ALERTS})
TESTS = sorted((ROOT / "alerts/tests").glob("*.test.yaml"))


def promtool(*arguments: str) -> str:
    require("promtool")
    result = subprocess.run(["promtool", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("what", ["rules"])
def test_what_is_checked_in_is_what_is_generated(what: str) -> None:
    assert command.main([what, "--check", "--into", str(ROOT)]) == 0


def test_check_tells_a_file_that_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["rules", "--into", str(tmp_path)]) == 0
    assert command.main(["rules", "--check", "--into", str(tmp_path)]) == 0
    assert command.main(["rules", "--check", "--into", str(tmp_path), "--cold-starts", "4"]) == 1
    assert "readmit.alerts.yaml is not what is generated" in capsys.readouterr().err


def test_promtool_finds_nothing_wrong() -> None:
    said = promtool("check", "rules", "alerts/readmit.rules.yaml", "alerts/readmit.alerts.yaml")
    assert f"{len(RULES)} rules found" in said
    assert f"{len(ALERTS)} rules found" in said


def passes(file: Path) -> bool:
    return "SUCCESS" in promtool("test", "rules", str(file))


@pytest.mark.parametrize("file", TESTS, ids=lambda file: file.name)
def test_promtool_tests(file: Path) -> None:
    assert passes(file)


def counted() -> dict[str, dict[str, int]]:
    """How often each alert is tested to be silent and to fire."""
    counts = {name: {"silent": 0, "firing": 0} for name in NAMES}
    for file in TESTS:
        for test in yaml.safe_load(file.read_text())["tests"]:
            for it in test.get("alert_rule_test", ()):
                counts[it["alertname"]]["firing" if it["exp_alerts"] else "silent"] += 1
            for it in test.get("promql_expr_test", ()):
                for name in re.findall(r'ALERTS\{alertname="(\w+)"', it["expr"]):
                    counts[name]["firing" if it["exp_samples"] else "silent"] += 1
    return counts


@pytest.mark.parametrize("kind", ["silent", "firing"])
def test_every_alert_is_tested_both_ways(kind: str) -> None:
    assert [name for name, counts in counted().items() if not counts[kind]] == []


def test_at_most_four_page() -> None:
    severities = {alert["alert"]: alert["labels"]["severity"] for alert in ALERTS}
    assert set(severities.values()) == {"page", "ticket"}
    assert sum(severity == "page" for severity in severities.values()) <= 4


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_says_what_it_means_and_where_to_read_on(alert: dict[str, Any]) -> None:
    annotations = alert["annotations"]
    assert set(annotations) == {"summary", "description", "runbook_url"}
    assert all(annotations.values())
    assert (ROOT / annotations["runbook_url"]).is_file()
    assert "topk" not in alert["expr"]


def test_names_of_records_say_level_metric_and_operation() -> None:
    for rule in RULES:
        assert re.fullmatch(r"job(_[a-z]+)*:(readmit|weightcache)_[a-z_]+:[a-z]+[0-9a-z]*", rule["record"]), rule
    pairs = [(rule["record"], str(rule.get("labels"))) for rule in RULES]
    assert len(set(pairs)) == len(pairs)


def test_a_fleet_makes_its_own() -> None:
    settings = Settings(job="llm", runbooks="https://wiki.example/runbooks/", cold_starts=7)
    text = dump({"groups": Alerts(settings).groups()})
    assert 'absent(up{job="llm"})' in text
    assert "runbook_url: https://wiki.example/runbooks/ReadmitColdStart.md" in text
    assert ">= 7" in text


def test_what_a_fleet_can_choose_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    for option in ("JOB the scrape job of the daemons", "RUNBOOKS where the runbooks are", "least share of attaches"):
        assert option in told


@pytest.mark.parametrize(
    "value",
    [
        {"a": ["x", {"b": 1, "c": "two words"}], "d": {"e": "no", "f": 'say "no"', "g": "a\nb"}},
        {"x": "on", "n": 14.4, "t": True, "empty": "", "colon": "a: b", "hash": "a #b", "dash": "- a", "int": "5"},
    ],
)
def test_yaml_means_the_same_to_a_yaml_parser(value: Any) -> None:
    def loaded(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: loaded(each) for key, each in item.items()}
        if isinstance(item, list):
            return [loaded(each) for each in item]
        return item.rstrip("\n") if isinstance(item, str) else item

    assert loaded(yaml.safe_load(dump({"value": value}))) == {"value": value}
