"""Every expression that rules, alerts and dashboards ask, and the metrics there are to ask for."""

import json
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry
from tests.observability.servers import ROOT

from readmit.gate.metrics import GateMetrics
from readmit.observability.alerts import Alerts
from readmit.observability.config import Settings
from readmit.observability.dashboards import dashboards
from readmit.observability.rules import recording_rules
from weightcache.episodes import Replay
from weightcache.forecast import Verdict
from weightcache.registry import Registry
from weightcache.slo import Objectives
from weightcache.telemetry.accounts import Accounts
from weightcache.telemetry.health import Health
from weightcache.telemetry.metrics import Collector

DASHBOARDS: dict[str, dict[str, Any]] = {
    it.uid: json.loads((ROOT / f"dashboards/{it.uid}.json").read_text()) for it in dashboards()
}
RULES = [rule for group in recording_rules() for rule in group["rules"]]
ALERTS = [rule for group in Alerts(Settings()).groups() for rule in group["rules"]]


class Query(NamedTuple):
    """One query of a dashboard."""

    dashboard: str
    panel: str
    letter: str
    expr: str
    instant: bool

    def __str__(self) -> str:
        return f"{self.dashboard}/{self.panel}/{self.letter}"


def queries() -> Iterator[Query]:
    """Of every panel, by dashboard."""
    for uid, board in DASHBOARDS.items():
        for panel in board["panels"]:
            for target in panel["targets"]:
                yield Query(uid, panel["title"], target["refId"], target["expr"], target["instant"])


def variables() -> Iterator[tuple[str, str, str, str]]:
    """Of every variable that Prometheus is asked for: dashboard, name, metric and label."""
    for uid, board in DASHBOARDS.items():
        for variable in board["templating"]["list"]:
            if match := re.fullmatch(
                r"label_values\((.*), (\w+)\)", variable["query"]["query"] if variable["type"] == "query" else ""
            ):
                yield uid, variable["name"], plain(match[1]), match[2]


def plain(
    expr: str, *, span: str = "30d", job: str = ".+", instance: str = ".+", slot: str = ".+", rate_interval: str = "5m"
) -> str:
    """An expression as Grafana sends it."""
    values = {"$__rate_interval": rate_interval, "$__range": span, "$__interval": "1m"}
    values |= {"$job": job, "$instance": instance, "$slot": slot}
    for macro, value in values.items():
        expr = expr.replace(macro, value)
    return expr


def selectors(expr: str) -> list[tuple[str, str]]:
    """Metric names and what stands in their braces."""
    quoted = r'\{((?:[^"{}]|"[^"]*")*)\}'
    return [(name, inner) for name, inner in re.findall(rf"([a-zA-Z_:][\w:]*){quoted}", expr)]


def names(expr: str) -> set[str]:
    """The names of metrics in an expression."""
    bare = re.sub(r'"[^"]*"', '""', expr)
    words = set(re.findall(r"[a-zA-Z_:][\w:]*", bare))
    return {word for word in words if re.match(r"(readmit|weightcache)_|job\w*:", word) or word == "up"}


def daemon_families() -> dict[str, str]:
    """Every sample name that the daemon exports, and its family's type."""
    health = Health(sinks=["file"])
    forecast = SimpleNamespace(verdicts={"a": Verdict(True)})
    objectives = Objectives()
    collector = Collector(Replay(), Accounts(objectives), Registry(), health, objectives, forecast)
    collector.caught_up.set()
    return _samples(collector.collect())


def gate_families() -> dict[str, str]:
    """The same of the gate."""
    registry = CollectorRegistry()
    GateMetrics(registry, ["a"])
    return _samples(registry.collect())


def _samples(families: Any) -> dict[str, str]:
    found: dict[str, str] = {}
    for family in families:
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
        found |= {family.name + suffix: family.type for suffix in suffixes}
    return found
