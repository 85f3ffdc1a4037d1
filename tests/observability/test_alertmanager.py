"""Routing and inhibition, in a real Alertmanager."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.observability.servers import ROOT, Receiver, alertmanager, fetch, wait_for

from readmit.observability.alerts import Alerts
from readmit.observability.config import Settings

RULES = {rule["alert"]: rule for group in Alerts(Settings()).groups() for rule in group["rules"]}
GROUP_WAIT_S = 1


def firing(name: str, **labels: str) -> dict[str, Any]:
    severity = RULES[name]["labels"]["severity"]
    ends = datetime.now(UTC) + timedelta(hours=1)
    return {
        "labels": {"alertname": name, "job": "readmit", "severity": severity, **labels},
        "annotations": {"summary": name},
        "endsAt": ends.isoformat(),
    }


class Routed:
    """What was told to whom after alerts were sent."""

    def __init__(self, url: str, receiver: Receiver) -> None:
        self.url = url
        self.told = receiver.told

    def __call__(self, *alerts: dict[str, Any], notifications: int) -> list[tuple[str, set[str], int]]:
        """Send alerts; (path, alert names, number of alerts) of each notification, once there have been so many."""
        fetch(f"{self.url}/api/v2/alerts", list(alerts))
        wait_for(lambda: self._count() >= notifications, f"{notifications} notifications")
        time.sleep(3 * GROUP_WAIT_S)  # for one too many
        return [
            (path, {alert["labels"]["alertname"] for alert in each["alerts"]}, len(each["alerts"]))
            for path, notices in sorted(self.told.items())
            for each in notices
        ]

    def _count(self) -> int:
        return sum(map(len, self.told.values()))


@pytest.fixture
def route(tmp_path: Path) -> Iterator[Routed]:
    receiver = Receiver()
    config = (ROOT / "alerts/alertmanager.yaml").read_text()
    for this, that in (("group_wait: 30s", f"group_wait: {GROUP_WAIT_S}s"), (":5001/", f":{receiver.port}/")):
        assert this in config
        config = config.replace(this, that)
    with alertmanager(tmp_path, config) as url:
        yield Routed(url, receiver)
    receiver.close()


NODES = [f"n{number}" for number in range(100)]


def test_a_roll_out_over_a_hundred_nodes_makes_one_notification(route: Routed) -> None:
    """Every node starts cold, has one slot less for minutes, and would start cold again; somebody is paged, once."""
    cold = [firing("ReadmitColdStart", instance=node, reason="fingerprint") for node in NODES]
    next_ = [firing("ReadmitNextStartWouldMiss", instance=node, slot="a", reason="fingerprint") for node in NODES]
    fewer = [firing("ReadmitRedundancyLost", instance=node) for node in NODES]
    told = route(firing("ReadmitColdStartsAcrossFleet"), *cold, *next_, *fewer, notifications=1)
    assert told == [("/page", {"ReadmitColdStartsAcrossFleet"}, 1)]


def test_a_hundred_nodes_that_would_start_cold_are_one_ticket(route: Routed) -> None:
    next_ = [firing("ReadmitNextStartWouldMiss", instance=node, slot="a", reason="absent") for node in NODES]
    assert route(*next_, notifications=1) == [("/ticket", {"ReadmitNextStartWouldMiss"}, 100)]


def test_what_an_overdue_recovery_looks_like_from_nearby_is_not_told_too(route: Routed) -> None:
    nearby = ("ReadmitRecoveryStuck", "ReadmitRecoveryLoop", "ReadmitServiceOutage", "ReadmitRedundancyLost")
    alerts = [firing(name, instance="n1") for name in nearby]
    told = route(firing("ReadmitRecoveryOverdue", instance="n1", slot="a"), *alerts, notifications=1)
    assert told == [("/page", {"ReadmitRecoveryOverdue"}, 1)]


def test_other_nodes_troubles_are_told(route: Routed) -> None:
    overdue = firing("ReadmitRecoveryOverdue", instance="n1", slot="a")
    told = route(overdue, firing("ReadmitRecoveryStuck", instance="n2", slot="a"), notifications=2)
    assert told == [("/page", {"ReadmitRecoveryOverdue"}, 1), ("/ticket", {"ReadmitRecoveryStuck"}, 1)]


def test_every_page_goes_to_who_is_on_call(route: Routed) -> None:
    pages = [name for name, rule in RULES.items() if rule["labels"]["severity"] == "page"]
    told = route(*(firing(name, instance=f"n{number}") for number, name in enumerate(pages)), notifications=len(pages))
    assert sorted((path, *names, count) for path, names, count in told) == [
        ("/page", name, 1) for name in sorted(pages)
    ]
