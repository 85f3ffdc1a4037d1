"""The guide to what is exported says what is exported, and its configurations can be used."""

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from tests.fixtures.story import recovery

from readmit.gate.metrics import GateMetrics
from weightcache.forecast import Verdict
from weightcache.journal import Journal
from weightcache.telemetry import Telemetry

GUIDE = Path(__file__).parents[2] / "docs" / "observability.md"
TEXT = GUIDE.read_text()
BLOCKS = re.findall(r"```yaml\n(# ([\w.-]+).*?)```", TEXT, re.DOTALL)
MOST_SERIES = 900


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> list[Metric]:
    """What a node with two slots exports."""
    journal = Journal(tmp_path_factory.mktemp("guide") / "journal.sqlite3", checkpoints=True)
    recovery(slot="a").tell(journal)
    recovery(slot="b", episode="b" * 32).tell(journal)
    verdicts = {"a": Verdict(True), "b": Verdict(False, "absent")}
    residents = SimpleNamespace(capacity=None, resident_bytes=0, leases=0, generations={}, claims=[], refused={})
    telemetry = Telemetry(journal, residents, environ={})
    telemetry._collector._forecast = SimpleNamespace(verdicts=verdicts)
    telemetry.step()
    found = list(telemetry.registry.collect())
    telemetry.close()
    journal.close()
    return found


def row(family: Metric) -> str:
    """A family's row of the budget table."""
    name = family.name + "_total" * (family.type == "counter")
    labels = sorted({label for sample in family.samples for label in sample.labels if label != "le"})
    return f"| `{name}` | {family.type} | {', '.join(labels)} | {len(family.samples)} |"


def test_the_budget_table_is_what_is_exported(families: list[Metric]) -> None:
    expected = [
        row(family) for family in sorted(families, key=lambda it: it.name) if not family.name.startswith("process_")
    ]
    found = re.findall(r"^\| `(?:readmit|weightcache)_.*\|$", TEXT, re.MULTILINE)
    assert found == expected, "the table of docs/observability.md, as it must be:\n" + "\n".join(expected)


def test_a_node_with_two_slots_stays_within_its_budget(families: list[Metric]) -> None:
    """Daemon and gate together, with a collector as a second sink of spans."""
    series = sum(len(family.samples) for family in families)
    (said,) = re.findall(r"\*\*(\d+) series\*\*", TEXT)
    assert int(said) == series
    registry = CollectorRegistry()
    GateMetrics(registry, ["a", "b"])
    gate = [it for family in registry.collect() for it in family.samples if not it.name.endswith("_created")]
    assert series + len(gate) + len(("exported", "dropped")) <= MOST_SERIES


def block(name: str) -> Any:
    (text,) = (text for text, named in BLOCKS if named == name)
    return yaml.safe_load(text)


def test_there_is_one_for_each_system() -> None:
    assert [name for _, name in BLOCKS] == ["prometheus.yml", "objstore.yml", "mimir.yml", "otel-collector.yml"]


@pytest.mark.parametrize("name", ["prometheus.yml", "mimir.yml"])
def test_prometheus_takes_them(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(yaml.safe_dump(block(name)))
    command = ["promtool", "check", "config", "--syntax-only", str(file)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert any(job["job_name"] == "readmit" for job in block(name)["scrape_configs"])


def test_the_object_store_names_its_type() -> None:
    found = block("objstore.yml")
    assert found["type"] == "S3"
    assert {"bucket", "endpoint"} <= set(found["config"])


def test_the_collector_s_pipelines_use_what_it_has() -> None:
    found = block("otel-collector.yml")
    pipelines = found["service"]["pipelines"]
    assert set(pipelines) == {"traces", "metrics"}
    for pipeline in pipelines.values():
        for kind in ("receivers", "processors", "exporters"):
            assert set(pipeline.get(kind, ())) <= set(found[kind]), f"{pipeline} names {kind} that are not there"
    scraped = found["receivers"]["prometheus"]["config"]["scrape_configs"]
    assert scraped[0]["job_name"] == "readmit"
