"""The probes' own numbers, in the hands of a kubelet that does what the documentation says."""

from typing import Any

import pytest
from tests.deploy.chart import containers, rendered
from tests.deploy.probes import Life, live

SLOWEST_LOAD_S = 1200.0
"""One CUDA fault on Kimi-K3, 8 ranks: about 20 minutes, because the model was loaded again."""
SLOWEST_START_S = 531.0


def serves_after(seconds: float) -> Any:
    return lambda path, at: at >= seconds if path in ("/startupz", "/readyz") else True


@pytest.mark.parametrize("load_s", [32.0, SLOWEST_START_S, SLOWEST_LOAD_S])
def test_nobody_is_killed_during_the_slowest_documented_load(manifests: list[dict[str, Any]], load_s: float) -> None:
    for container in containers(manifests).values():
        assert live(container, serves_after(load_s), 3600).killed_s is None


def test_no_recovery_is_killed_either(manifests: list[dict[str, Any]]) -> None:
    def recovers(path: str, at: float) -> bool:
        return not (path == "/readyz" and 100 <= at < 100 + SLOWEST_LOAD_S)

    for container in containers(manifests).values():
        assert live(container, recovers, 3600).killed_s is None
    ready = live(containers(manifests)["gate"], recovers, 3600).ready_s
    assert len(ready) == 3
    assert ready[1] - 100 <= 3, "out of service at once"
    assert ready[2] - (100 + SLOWEST_LOAD_S) <= 2, "and back at once"


@pytest.mark.parametrize(("name", "limit_s"), [("gate", 35), ("engine", 115), ("cache", 150)])
def test_what_is_dead_is_killed_in_time(name: str, limit_s: float) -> None:
    container = containers(rendered(layout="pod"))[name]
    life = live(container, lambda _, at: at < 700, 3600)
    assert life.by == "livenessProbe"
    assert 700 <= (life.killed_s or 0) <= 700 + limit_s


def test_what_never_starts_is_killed_at_the_end_of_its_budget() -> None:
    engine = containers(rendered(layout="pod"))["engine"]
    life = live(engine, lambda *_: False, 36_000)
    assert life.by == "startupProbe"
    assert 1790 <= (life.killed_s or 0) <= 1810
    assert live(containers(rendered(startupBudgetSeconds=300))["engine"], serves_after(531), 3600) == Life(
        292.0, "startupProbe", []
    ), "a budget of five minutes would kill the published cold start"
