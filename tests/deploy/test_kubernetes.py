"""Manifests and chart: what they say, and that those who read them take it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from cloudcoil.models.prometheus_operator import v1 as monitoring
from helm_python import lint
from helm_python.errors import HelmRenderError, HelmValuesError
from pydantic import ValidationError
from tests.deploy.chart import CHART, DEPLOY, LAYOUTS, ROOT, containers, rendered, written
from tests.deploy.probes import live, route
from tests.deploy.test_probes import SLOWEST_LOAD_S, serves_after

from readmit.config import load
from readmit.gate.settings import GateSettings

VERSIONS = ("1.28", "1.37")
"""The oldest API that the chart says it is for, and the newest that is known here."""
OPERATOR = {"PodMonitor": monitoring.PodMonitor, "PrometheusRule": monitoring.PrometheusRule}


def taken(manifest: dict[str, Any]) -> None:
    """Have the API's own schema look at a manifest, or that of the Prometheus operator's custom resources.

    Raises:
        kubernetes_validate.ValidationError, pydantic.ValidationError: it would be refused.
        AssertionError: the operator knows fewer fields.
    """
    if manifest["kind"] in OPERATOR:
        read = OPERATOR[manifest["kind"]].model_validate(manifest)
        assert read.model_dump(by_alias=True, exclude_none=True, mode="json") == manifest, "a field is unknown"
        return
    for version in VERSIONS:
        kubernetes_validate.validate(manifest, version, strict=True)


def test_the_api_takes_them(manifests: list[dict[str, Any]]) -> None:
    for manifest in manifests:
        taken(manifest)
    broken = {**manifests[-1], "spec": {"ports": [{"port": "eighty"}]}}
    with pytest.raises(kubernetes_validate.ValidationError):
        taken(broken)


ALTERNATIVES: list[dict[str, Any]] = [
    {"gate": {"probes": '{"model": "m"}'}, "cache": {"capacity": "120GiB", "resources": {"limits": {"memory": "1Gi"}}}},
    {"replicas": 3, "slot": "b-2", "uid": 4321, "image": "registry.example/vllm:1", "runtimeClassName": "nvidia"},
    {
        "model": {"path": "/models/q", "volume": {"hostPath": {"path": "/srv/models"}}},
        "engine": {
            "command": "vllm serve {model} --port {port} --compilation-config '{\"level\": 3}'",
            "env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}],
            "resources": {"limits": {"nvidia.com/gpu": 8}},
        },
    },
    {
        "imagePullSecrets": [{"name": "registry"}],
        "nodeSelector": {"gpu": "h200"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "containerSecurityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
        "startupBudgetSeconds": 3605,
    },
]


@pytest.mark.parametrize("layout", LAYOUTS.values())
@pytest.mark.parametrize("values", ALTERNATIVES, ids="-".join)
def test_the_api_takes_what_other_values_make_of_them(layout: str, values: dict[str, Any], tmp_path: Path) -> None:
    everything = rendered(layout=layout, **values)
    for manifest in everything:
        taken(manifest)
    (config,) = (it for it in everything if it["kind"] == "ConfigMap")
    (tmp_path / "readmit.toml").write_text(config["data"]["readmit.toml"])
    (slot,) = load(tmp_path / "readmit.toml").slot
    assert slot.name == values.get("slot", "a")
    for container in containers(everything).values():
        assert live(container, serves_after(SLOWEST_LOAD_S), 7200).killed_s is None


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"gate": {"probs": "x"}}, "probs"),
        ({"replica": 2}, "replica"),
        ({"startupBudgetSeconds": 0}, "startupBudgetSeconds"),
        ({"slot": "A_1"}, "slot"),
        ({"cache": {"capacity": "lots"}}, "capacity"),
        ({"layout": "heap"}, "layout"),
    ],
)
def test_values_that_mean_nothing_are_refused_by_name(values: dict[str, Any], said: str) -> None:
    with pytest.raises(HelmValuesError, match=said):
        rendered(**values)


def test_one_pod_is_let_into_a_restricted_namespace() -> None:
    """After https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted."""
    (workload,) = (it for it in rendered(layout="pod") if it["kind"] == "Deployment")
    pod = workload["spec"]["template"]["spec"]
    assert (pod["securityContext"]["runAsNonRoot"], pod["securityContext"]["seccompProfile"]["type"]) == (
        True,
        "RuntimeDefault",
    )
    assert not {"hostPath"} & {kind for volume in pod["volumes"] for kind in volume}
    for container in pod["containers"]:
        about = container["securityContext"]
        assert (about["allowPrivilegeEscalation"], about["capabilities"]) == (False, {"drop": ["ALL"]})
        assert "command" in container, "the image of an engine has an entry point of its own"


@pytest.mark.parametrize("name", LAYOUTS)
def test_they_are_the_chart_with_its_defaults(name: str) -> None:
    assert written(name) == rendered(layout=LAYOUTS[name]), "run python deploy/kubernetes/render.py"


def test_helm_has_nothing_against_the_chart() -> None:
    assert lint(CHART)["errors"] == []


def test_a_package_has_the_rules_and_dashboards_of_the_repository(tmp_path: Path) -> None:
    wanted = {"enabled": True, "dashboards": True, "labels": {"release": "kube-prometheus-stack"}}
    with pytest.raises(HelmRenderError, match="only in the packaged chart"):
        rendered(monitoring=wanted)
    command = [sys.executable, str(DEPLOY / "kubernetes" / "render.py"), "--package", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    (package,) = tmp_path.glob("readmit-*.tgz")
    everything = rendered(package, monitoring=wanted)
    rules = [it["spec"] for it in everything if it["kind"] == "PrometheusRule"]
    assert rules == [yaml.safe_load(file.read_text()) for file in sorted((ROOT / "alerts").glob("readmit.*.yaml"))]
    boards = [json.loads(next(iter(it["data"].values()))) for it in everything if "dashboard" in it["metadata"]["name"]]
    assert boards == [json.loads(file.read_text()) for file in sorted((ROOT / "dashboards").glob("*.json"))]
    (monitor,) = (it for it in everything if it["kind"] == "PodMonitor")
    ports = {port["name"] for it in containers(everything).values() for port in it.get("ports", ())}
    assert {it["port"] for it in monitor["spec"]["podMetricsEndpoints"]} == ports
    assert all(it["metadata"]["labels"]["release"] for it in everything if it["kind"] in OPERATOR)
    for manifest in everything:
        taken(manifest)
    with pytest.raises(AssertionError, match="a field is unknown"):
        taken({**monitor, "spec": {**monitor["spec"], "podMetricEndpoints": []}})
    with pytest.raises(ValidationError):
        taken({**monitor, "spec": {**monitor["spec"], "podMetricsEndpoints": [{"port": "http", "interval": "soon"}]}})


@pytest.mark.parametrize("probes", ["", '{"model": "m"}'])
def test_the_configuration_in_them_is_one(probes: str, tmp_path: Path) -> None:
    (config,) = (
        it for it in rendered(gate={"probes": probes}, cache={"capacity": "120GiB"}) if it["kind"] == "ConfigMap"
    )
    (tmp_path / "readmit.toml").write_text(config["data"]["readmit.toml"])
    node = load(tmp_path / "readmit.toml")
    assert node.gate_settings().unverified_ok == (not probes)
    assert str(node.gate.probes) == ("/etc/readmit/probes.json" if probes else "None")
    assert config["data"].get("probes.json", "").strip() == probes
    assert node.cache.capacity == 120 << 30


def test_only_the_engine_is_given_the_gpu(manifests: list[dict[str, Any]]) -> None:
    has = {name: "nvidia.com/gpu" in it["resources"].get("limits", {}) for name, it in containers(manifests).items()}
    assert {name for name, gpu in has.items() if gpu} == {"engine"}


def test_three_questions_go_to_three_routes(manifests: list[dict[str, Any]]) -> None:
    here = containers(manifests)
    assert route(here["engine"]["startupProbe"]) == "/startupz"
    assert route(here["gate"]["livenessProbe"]) == "/livez"
    assert route(here["gate"]["readinessProbe"]) == "/readyz"
    (workload,) = (it for it in manifests if it["kind"] == "Deployment")
    settings = GateSettings.drain_notice_s + GateSettings.drain_limit_s
    assert workload["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > settings
    assert workload["spec"]["progressDeadlineSeconds"] > SLOWEST_LOAD_S, "a slow start is no failed roll-out"


def test_the_plain_manifests_need_no_tool() -> None:
    assert shutil.which("readmit", path=str(Path(sys.executable).parent))
    for name in LAYOUTS:
        assert "{{" not in (DEPLOY / "kubernetes" / f"{name}.yaml").read_text()
