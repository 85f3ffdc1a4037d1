"""The one-pod layout as processes: each container a tree of its own, with the manifest's own command and variables."""

import os
import signal
import sys
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.deploy.chart import containers, rendered
from tests.readmit.forked import ATTACHING
from tests.readmit.nodes import PYTHONPATH, Place, free_port, place, wait_for


class Pod(Place):
    """The containers of the one-pod layout, with folders and ports of their own."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        (config,) = (it for it in rendered() if it["kind"] == "ConfigMap")
        self.gate, metrics, self.engine = (f"127.0.0.1:{free_port()}" for _ in range(3))
        command = f"{sys.executable} -m {ATTACHING} {{port}} client"
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
        self.state_dir = folder / "var" / "state"
        self.containers = containers(rendered())
        self.environment["PYTHONPATH"] = PYTHONPATH

    def container(self, name: str) -> Any:
        """Start a container's command in its environment."""
        replaced = {"/run/readmit": str(self.folder / "run"), "/var/lib/readmit": str(self.folder / "var")}
        for variable in self.containers[name]["env"]:
            value = variable.get("value", "node")
            for old, new in replaced.items():
                value = value.replace(old, new)
            self.environment[variable["name"]] = value
        program, *words = self.containers[name]["command"]
        assert program == "readmit"
        return self.start(*(str(self.folder / "readmit.toml") if "/etc/" in word else word for word in words))


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
