"""The chart, rendered, and the manifests that lie beside it."""

from pathlib import Path
from typing import Any

import yaml
from helm_python import Chart

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "readmit"
LAYOUTS = {"one-pod": "pod", "node-daemon": "node"}


def rendered(chart: Path = CHART, **values: Any) -> list[dict[str, Any]]:
    with Chart.load(chart) as loaded:
        parts = loaded.render(values=values, name="readmit", namespace="default")
    return [
        it for path, text in sorted(parts.items()) if path.endswith(".yaml") for it in yaml.safe_load_all(text) if it
    ]


def containers(manifests: list[dict[str, Any]], kind: str = "Deployment") -> dict[str, dict[str, Any]]:
    (workload,) = (it for it in manifests if it["kind"] == kind)
    return {it["name"]: it for it in workload["spec"]["template"]["spec"]["containers"]}


def written(name: str) -> list[dict[str, Any]]:
    """The plain manifests of a layout."""
    return list(yaml.safe_load_all((DEPLOY / "kubernetes" / f"{name}.yaml").read_text()))
