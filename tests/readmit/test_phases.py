"""Phases: time that is lost shows in the phase that lost it and in no other; the kernel saw the same times."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.readmit.gate.harness import probe_file
from tests.readmit.nodes import Place, free_port, place, wait_for

from readmit import demo_model
from readmit.config import load
from readmit.node import keeper_spec
from weightcache.episodes import Episode, Replay
from weightcache.journal import Event
from weightcache.vocabulary import UNATTRIBUTED

SCRIPT = Path(__file__).with_name("slow_phases.py")
PHASES = (
    *("detect", "spawn", "import", "tokenizer_init", "load_weights", "kernel_warmup", "server_ready"),
    "semantic_verify",
)
LOST_S = 1.0
TOLERANCE_S = 0.1


@pytest.fixture(scope="module")
def model() -> Path:
    return demo_model.prepare()


class Node(Place):
    """A keeper, an engine and a gate, any phase of which can be slowed."""

    def start_slow(self, model: Path) -> None:
        self.gate, engine = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        probe_file(self.folder / "probes.json", model=model.name)
        command = [sys.executable, str(SCRIPT), "engine", str(self.folder), str(model), "--port", "{port}"]
        (self.folder / "readmit.toml").write_text(f"""
[node]
name = "n"
runtime_dir = "{self.runtime_dir}"
state_dir = "{self.state_dir}"
[cache]
enabled = false
[gate]
listen = "{self.gate}"
probes = "probes.json"
probe_limit_s = 100
hang_limit_s = 100
drain_notice_s = 0
[[slot]]
name = "a"
url = "http://{engine}"
command = {json.dumps(command)}
""")
        self.runtime_dir.mkdir(mode=0o700)
        spec = self.folder / "spec.json"
        keeper_spec(load(self.folder / "readmit.toml")).save(spec)
        self.slow()
        self.run(sys.executable, str(SCRIPT), "keeper", str(self.folder), str(spec))

    def slow(self, *phases: str) -> None:
        """Have these phases lose time from now on."""
        (self.folder / "slow").write_text(" ".join([str(LOST_S), *phases]))

    def run(self, *command: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command, cwd=self.folder, env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        self.processes.append(process)
        return process

    def recover(self) -> tuple[Replay, Episode]:
        """Kill the engine and wait for the end of its recovery."""
        before = len(self.replay().episodes)
        os.kill(self.children()["a"]["pid"], signal.SIGKILL)
        wait_for(lambda: len(self.replay().episodes) > before and not self.replay().open_episodes, "it has recovered")
        replay = self.replay()
        return replay, replay.episodes[-1]


@pytest.fixture(scope="module")
def node(model: Path) -> Iterator[Node]:
    with place(Node) as here:
        here.start_slow(model)
        wait_for(lambda: here.ready() and not here.replay().open_episodes, "the engine is let in")
        yield here


@pytest.fixture(scope="module")
def slowed(node: Node) -> tuple[Replay, Episode]:
    """A recovery each phase of which lost time, once."""
    node.slow(*PHASES)
    recovery = node.recover()
    node.slow()
    return recovery


@pytest.mark.parametrize("phase", PHASES)
def test_a_slow_phase_is_slow_and_no_other_is(node: Node, slowed: tuple[Replay, Episode], phase: str) -> None:
    replay, episode = slowed
    (event,) = node.journal.query("ORDER BY id DESC LIMIT 1")
    nap = json.loads((node.folder / f"nap-{phase}").read_text())
    began, ended = (replay.clock.place_boottime(event, at) for at in nap)
    lost: dict[str, float] = {}
    for segment in episode.segments():
        shared = min(segment.end_ns, ended) - max(segment.begin_ns, began)
        lost[segment.phase] = lost.get(segment.phase, 0.0) + max(0, shared) / 1e9
    slept_s = (ended - began) / 1e9
    assert slept_s >= LOST_S
    assert lost.pop(phase) == pytest.approx(slept_s, abs=TOLERANCE_S)
    assert max(lost.values()) <= 0.01, lost
    assert sum(episode.phases_s().values()) == pytest.approx(episode.total_s, abs=1e-6)
    assert episode.phases_s()[phase] >= slept_s - TOLERANCE_S


def test_a_pause_before_a_restart_is_backoff_and_nothing_else(node: Node, slowed: tuple[Replay, Episode]) -> None:
    assert "backoff" not in slowed[1].phases_s()
    node.slow("backoff")
    _, paused = node.recover()
    node.slow()
    assert paused.phases_s()["backoff"] >= LOST_S - TOLERANCE_S
    assert paused.phases_s()["detect"] < paused.phases_s()["backoff"] / 2


def test_nearly_all_of_a_recovery_is_accounted_for(node: Node) -> None:
    for episode in node.replay().episodes:
        assert episode.phases_s().get(UNATTRIBUTED, 0.0) <= 0.05 * episode.total_s


def test_the_kernel_saw_the_same_times(model: Path) -> None:
    """By strace: when the engine's process began, and when it opened the first shard."""
    with place(Node) as here:
        trace = here.folder / "trace"
        engine = [sys.executable, "-m", "readmit.engine", str(model), "--port", "0"]
        strace = ["strace", "-f", "--seccomp-bpf", "-ttt", "-e", "trace=execve,openat", "-o", str(trace)]
        traced = here.run(*strace, sys.executable, "-m", "readmit.cli", "run", "--", *engine)

        def event(kind: str, name: str, nth: int = 0) -> Event:
            clause = "WHERE kind = ? AND name = ? ORDER BY id"
            return wait_for(lambda: here.journal.query(clause, kind, name)[nth:], f"{kind} {name}")[0]

        event("phase_end", "server_ready")
        spawned = event("process", "spawned")
        keeper = event("process", "started").attributes["pid"]
        os.kill(keeper, signal.SIGTERM)
        traced.communicate(timeout=120)
        pid = spawned.attributes["pid"]
        calls = [
            (float(match[1]), match[2])
            for line in trace.read_text().splitlines()
            if (match := re.fullmatch(rf"{pid} +([\d.]+) (.*)", line))
        ]
        # Its end stands on a line of its own where another process did something meanwhile.
        executed = next(at for at, call in calls if call.startswith("execve(") and "= -1 " not in call)
        opened = next(at for at, call in calls if "openat" in call and '.safetensors"' in call)
        # The keeper's mark is followed by the engine's own, which begins when the kernel says that its process did.
        for at, seen in (
            (event("phase_end", "spawn").wall_ns, executed),
            (event("phase_begin", "spawn", nth=1).wall_ns, executed),
            (event("phase_begin", "load_weights.read").wall_ns, opened),
        ):
            assert at / 1e9 == pytest.approx(seen, abs=0.5)
