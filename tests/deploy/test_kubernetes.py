"""Manifests and chart: what they say, and that those who read them take it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import pytest
import yaml
from helm_python import Chart, lint
from helm_python.errors import HelmRenderError
from tests.deploy.probes import Life, live, route
from tests.readmit.nodes import Place, free_port, place, wait_for

from readmit.config import load
from readmit.gate.settings import GateSettings
from weightcache.episodes import Replay
from weightcache.journal import Context, Journal

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "readmit"
LAYOUTS = {"one-pod": "pod", "node-daemon": "node"}
SLOWEST_LOAD_S = 1200.0
"""One CUDA fault on Kimi-K3, 8 ranks: about 20 minutes, because the model was loaded again."""
SLOWEST_START_S = 531.0


def rendered(chart: Path = CHART, **values: Any) -> list[dict[str, Any]]:
    with Chart.load(chart) as loaded:
        parts = loaded.render(values=values, name="readmit", namespace="default")
    return [
        it for path, text in sorted(parts.items()) if path.endswith(".yaml") for it in yaml.safe_load_all(text) if it
    ]


def containers(manifests: list[dict[str, Any]], kind: str = "Deployment") -> dict[str, dict[str, Any]]:
    (workload,) = (it for it in manifests if it["kind"] == kind)
    return {it["name"]: it for it in workload["spec"]["template"]["spec"]["containers"]}


@pytest.fixture(params=LAYOUTS)
def manifests(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes" / f"{request.param}.yaml").read_text()))


def test_the_api_takes_them(manifests: list[dict[str, Any]]) -> None:
    for manifest in manifests:
        kubernetes_validate.validate(manifest, "1.37", strict=True)
    broken = {**manifests[-1], "spec": {"ports": [{"port": "eighty"}]}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, "1.37", strict=True)


@pytest.mark.parametrize("name", LAYOUTS)
def test_they_are_the_chart_with_its_defaults(name: str) -> None:
    written = list(yaml.safe_load_all((DEPLOY / "kubernetes" / f"{name}.yaml").read_text()))
    assert written == rendered(layout=LAYOUTS[name]), "run python deploy/kubernetes/render.py"


def test_helm_has_nothing_against_the_chart() -> None:
    assert lint(CHART)["errors"] == []
    with pytest.raises(HelmRenderError, match="expected pod or node, found heap"):
        rendered(layout="heap")


def test_a_package_has_the_rules_and_dashboards_of_the_repository(tmp_path: Path) -> None:
    monitoring = {"enabled": True, "dashboards": True}
    with pytest.raises(HelmRenderError, match="only in the packaged chart"):
        rendered(monitoring=monitoring)
    command = [sys.executable, str(DEPLOY / "kubernetes" / "render.py"), "--package", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    (package,) = tmp_path.glob("readmit-*.tgz")
    everything = rendered(package, monitoring=monitoring)
    rules = [it["spec"] for it in everything if it["kind"] == "PrometheusRule"]
    assert rules == [yaml.safe_load(file.read_text()) for file in sorted((ROOT / "alerts").glob("readmit.*.yaml"))]
    boards = [json.loads(next(iter(it["data"].values()))) for it in everything if "dashboard" in it["metadata"]["name"]]
    assert boards == [json.loads(file.read_text()) for file in sorted((ROOT / "dashboards").glob("*.json"))]
    (monitor,) = (it for it in everything if it["kind"] == "PodMonitor")
    ports = {port["name"] for it in containers(everything).values() for port in it.get("ports", ())}
    assert {it["port"] for it in monitor["spec"]["podMetricsEndpoints"]} == ports
    for manifest in everything:
        if "monitoring.coreos.com" not in manifest["apiVersion"]:
            kubernetes_validate.validate(manifest, "1.37", strict=True)


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
    grace = yaml.safe_load((DEPLOY / "kubernetes" / "one-pod.yaml").read_text().split("---")[1])
    settings = GateSettings.drain_notice_s + GateSettings.drain_limit_s
    assert grace["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > settings


# The kubelet, with the manifests' own numbers


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


# The pod, as processes: each container a tree of its own


class Pod(Place):
    """The containers of the one-pod layout, with folders and ports of their own."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        (config,) = (it for it in rendered() if it["kind"] == "ConfigMap")
        self.gate, metrics, self.engine = (f"127.0.0.1:{free_port()}" for _ in range(3))
        attaching = ROOT / "tests" / "readmit" / "attaching_engine.py"
        command = f"{sys.executable} {attaching} {{port}} client"
        text = config["data"]["readmit.toml"]
        for old, new in {
            "readmit engine {model} --host {host} --port {port} --weight-cache client": command,
            "0.0.0.0:8000": self.gate,
            "0.0.0.0:9464": metrics,
            "127.0.0.1:8101": self.engine,
            "/run/readmit": str(folder / "run"),
            "/var/lib/readmit": str(folder / "var"),
        }.items():
            assert old in text
            text = text.replace(old, new)
        assert tomllib.loads(text)
        (folder / "readmit.toml").write_text(text)
        (folder / "run").mkdir()
        (folder / "var").mkdir()
        self.containers = containers(rendered())
        self.environment["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, ROOT / "daemon", ROOT / "service")))

    def container(self, name: str) -> Any:
        """Start a container's command in its environment."""
        replaced = {"/run/readmit": str(self.folder / "run"), "/var/lib/readmit": str(self.folder / "var")}
        for variable in self.containers[name]["env"]:
            value = variable.get("value", "node")
            for old, new in replaced.items():
                value = value.replace(old, new)
            self.environment[variable["name"]] = value
        program, *words = self.containers[name]["args"]
        assert program == "readmit"
        return self.start(*(str(self.folder / "readmit.toml") if "/etc/" in word else word for word in words))

    def ready(self) -> bool:
        try:
            return httpx.get(f"http://{self.gate}/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def replay(self) -> Replay:
        replay = Replay()
        replay.catch_up(Journal(self.folder / "var" / "state" / "journal.sqlite3", Context("node")))
        return replay


@pytest.fixture
def pod() -> Iterator[Pod]:
    with place(Pod) as here:
        yield here
        for runtime in ("cache", "engine-a"):
            here.runtime_dir = here.folder / "run" / runtime
            for child in here.children().values():
                if child["pid"]:
                    os.kill(child["pid"], signal.SIGKILL)


MEMORY = 1 << 30
"""Bytes that the engine's container may take; what it takes to serve is a third of it."""


def limited_group() -> Path | None:
    """A memory cgroup for the engine's container, of whichever version; None where none can be made."""
    versions = {
        Path("/sys/fs/cgroup/memory"): {"memory.limit_in_bytes": MEMORY},
        Path("/sys/fs/cgroup"): {"memory.max": MEMORY, "memory.swap.max": 0, "memory.oom.group": 1},
    }
    for parent, settings in versions.items():
        group = parent / f"readmit-test-{os.getpid()}"
        try:
            group.mkdir()
            if (group / next(iter(settings))).exists():
                for name, value in settings.items():
                    (group / name).write_text(str(value))
                return group
            group.rmdir()
        except OSError:
            continue
    return None


@pytest.fixture
def group() -> Iterator[Path | None]:
    group = limited_group()
    yield group
    if group is None:  # no root, or a container that may not
        warnings.warn("nobody was killed for memory: no memory cgroup can be made here", stacklevel=1)
        return
    for pid in (group / "cgroup.procs").read_text().split():
        os.kill(int(pid), signal.SIGKILL)
    wait_for(lambda: not (group / "cgroup.procs").read_text().strip(), "all in it have ended")
    group.rmdir()


@pytest.mark.timeout(900)
def test_the_end_of_an_engine_or_its_whole_container_leaves_the_weights(group: Path | None, pod: Pod) -> None:
    pod.container("cache")
    engine = pod.container("engine")
    pod.container("gate")
    wait_for(pod.ready, "the gate lets traffic in")
    wait_for(lambda: not pod.replay().open_episodes, "the start is closed")
    pod.runtime_dir = pod.folder / "run" / "engine-a"
    inside = pod.children()["a"]["pid"]
    # As memory.oom.group does: everything in the container, at once.
    engine.kill()
    os.kill(inside, signal.SIGKILL)
    engine.communicate()
    wait_for(lambda: not pod.ready(), "the gate closes")
    if group is not None:
        pod.prefix = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "-"]
    engine = pod.container("engine")  # as the kubelet does
    wait_for(pod.ready, "the gate lets traffic in again")
    wait_for(lambda: len(pod.replay().episodes) == 2 and not pod.replay().open_episodes, "the recovery is closed")
    assert [it.path for it in pod.replay().episodes] == ["miss", "hit"]

    if group is None:
        return
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://{pod.engine}/grow", timeout=600)
    whole = (group / "memory.oom.group").exists()
    if whole:
        engine.communicate()
        pod.container("engine")
    wait_for(lambda: len(pod.replay().episodes) == 3 and not pod.replay().open_episodes, "the recovery is closed")
    last = pod.replay().episodes[-1]
    assert (last.path, last.outcome) == ("hit", "ready")
    assert whole or last.cause == "oom_kill", "the kernel's own counter proves it"


def test_the_plain_manifests_need_no_tool() -> None:
    assert shutil.which("readmit", path=str(Path(sys.executable).parent))
    for name in LAYOUTS:
        assert "{{" not in (DEPLOY / "kubernetes" / f"{name}.yaml").read_text()
