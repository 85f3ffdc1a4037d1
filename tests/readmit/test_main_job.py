"""The main job: ``readmit up`` on a real model, its processes killed and stopped at the worst moments.

One node for all tests, which leave it serving, in the order of this file.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.fixtures import http
from tests.fixtures.collector import Collector
from tests.readmit.forked import PLAINLY
from tests.readmit.nodes import Place, free_port, place, wait_for

from readmit import demo_model
from readmit.probes import Expectation, Probe, ProbeSet
from weightcache.episodes import Episode
from weightcache.journal import Event
from weightcache.process import Process
from weightcache.vocabulary import PHASES, UNATTRIBUTED

ASK = {"prompt": "The capital of France is", "max_tokens": 1, "temperature": 0}
PROBES = (
    Probe("capital", "The capital of France is", 1, Expectation(text=" Paris")),
    # Long enough an answer to be killed in the middle of.
    Probe("recursion", "def fibonacci(n):", 40, Expectation(regex=".*")),
)
DIE_AT = (
    *(("phase_begin", phase) for phase in ("spawn", "import", "tokenizer_init", "load_weights", "kernel_warmup")),
    ("phase_begin", "server_ready"),
    ("slot_state", "verifying"),
)
"""What the journal says last before each kill."""


class Node(Place):
    """A node with everything: keeper, weight cache, one engine, gate; all of them log in JSON."""

    def configure(self, model: Path) -> None:
        self.gate, self.metrics, self.engine = (f"127.0.0.1:{free_port()}" for _ in range(3))
        ProbeSet(model=model.name, probes=PROBES).save(self.folder / "probes.json")
        command = [*self.forking("readmit.engine", "a"), "{model}", "--host", "{host}", "--port", "{port}"]
        (self.folder / "readmit.toml").write_text(f"""
[node]
name = "n"
runtime_dir = "{self.runtime_dir}"
state_dir = "{self.state_dir}"
[cache]
metrics = "{self.metrics}"
[gate]
listen = "{self.gate}"
probes = "probes.json"
drain_notice_s = 0
probe_limit_s = 100
hang_limit_s = 100
[telemetry]
log_format = "json"
[[slot]]
name = "a"
model = "{model}"
url = "http://{self.engine}"
command = {json.dumps([*command, "--weight-cache", "client"])}
preload = "readmit.engine"
backoff_s = [0]
limit = 0
""")

    def last_id(self) -> int:
        return self.journal.last_id()

    def event(self, kind: str, name: str, after: int) -> Event:
        """The first event of a kind and name behind an id, once it is there."""
        clause = "WHERE kind = ? AND name = ? AND id > ? ORDER BY id LIMIT 1"
        return wait_for(lambda: self.journal.query(clause, kind, name, after), f"{kind} {name} is journaled")[0]

    def pid(self, child: str) -> int:
        return int(self.children()[child]["pid"])

    def kill(self, pid: int, number: int = signal.SIGKILL) -> None:
        os.kill(pid, number)

    def until_ready_after(self, pid: int) -> None:
        """Wait until another engine than this one is let in."""
        wait_for(lambda: self.children()["a"]["pid"] not in (None, pid) and self.ready(), "another engine is let in")

    def until_closed(self) -> None:
        wait_for(lambda: not self.replay().open_episodes, "the recovery is closed")

    def answer(self) -> str:
        reply = http.post(f"http://{self.gate}/v1/completions", json=ASK, timeout=120)
        assert reply.status_code == 200, reply.text
        return str(reply.json()["choices"][0]["text"])

    def counters(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        """Every counter that the daemon exports, histograms' included."""
        text = http.get(f"http://{self.metrics}/metrics", timeout=60).text
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            if family.type in ("counter", "histogram") and family.name.startswith(("readmit_", "weightcache_"))
            for sample in family.samples
        }


@pytest.fixture(scope="module")
def model() -> Path:
    """The demo model, all of it in the page cache, from which whatever else runs here may have driven it."""
    folder = demo_model.prepare()
    for shard in folder.glob("*.safetensors"):
        shard.read_bytes()
    return folder


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(scope="module")
def started(model: Path, collector: Collector) -> Iterator[tuple[Node, subprocess.Popen[str]]]:
    with place(Node) as here:
        here.configure(model)
        here.environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = collector.url
        yield here, here.start("up")


@pytest.fixture
def node(started: tuple[Node, subprocess.Popen[str]]) -> Node:
    return started[0]


def check(episode: Episode) -> None:
    """What holds of every closed episode."""
    assert sum(episode.phases_s().values()) == pytest.approx(episode.total_s, abs=1e-6)
    assert [attempt.number for attempt in episode.attempts] == list(range(1, len(episode.attempts) + 1))
    assert all(attempt.outcome for attempt in episode.attempts)


def test_a_daemon_killed_during_a_load_takes_nothing_with_it(node: Node) -> None:
    event = node.event("phase_begin", "load_weights.read", after=0)
    engine, daemon = node.pid("a"), node.pid("daemon")
    node.kill(engine, signal.SIGSTOP)  # so that it is certain which comes first
    node.kill(daemon)
    wait_for(lambda: node.children()["daemon"]["pid"] not in (None, daemon), "the daemon is back")
    assert not node.journal.query("WHERE kind = 'publish' AND name = 'published'"), "the load was still under way"
    node.kill(engine, signal.SIGCONT)
    wait_for(node.ready, "the engine is let in")
    assert node.pid("a") == engine
    assert node.answer() == " Paris"
    node.until_closed()
    (episode,) = node.replay().episodes
    assert (episode.id, episode.cause, episode.path, episode.reason) == (event.episode, "first_start", "miss", "absent")
    assert (episode.outcome, episode.verified) == ("ready", True)
    check(episode)
    # Its weights were published all the same, to the daemon's successor.
    (published,) = node.journal.query("WHERE kind = 'publish' AND name = 'published'")
    status = json.loads(node.readmit("cache", "status", "--json").stdout)
    assert [each["generation"] for each in status["generations"]] == [published.attributes["generation"]]


def test_a_second_up_is_refused(node: Node) -> None:
    before = node.children()
    second = node.readmit("up")
    assert second.returncode == 2
    assert second.stderr.count("\n") == 1
    assert "already looks after" in second.stderr
    assert {name: child["pid"] for name, child in node.children().items()} == {
        name: child["pid"] for name, child in before.items()
    }
    assert node.ready()


WRITER = """
import sys, time
from pathlib import Path
from weightcache.journal.database import connect
connection = connect(Path(sys.argv[1]))
connection.execute("BEGIN IMMEDIATE")
print("inside", flush=True)
time.sleep(1000)
"""


def test_a_writer_stopped_inside_a_transaction_delays_no_recovery(node: Node) -> None:
    path = str(node.state_dir / "journal.sqlite3")
    command = [sys.executable, "-c", WRITER, path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "inside\n"
            writer.send_signal(signal.SIGSTOP)
            known, engine = node.last_id(), node.pid("a")
            node.kill(engine)
            node.until_ready_after(engine)
            assert node.answer() == " Paris"
            assert node.last_id() == known, "nobody could write to the journal"
        finally:
            writer.kill()
    wait_for(lambda: len(node.replay().episodes) == 2, "what was said meanwhile is merged")
    node.until_closed()
    episode = node.replay().episodes[-1]
    assert (episode.cause, episode.path, episode.outcome, episode.verified) == ("crash", "hit", "ready", True)
    assert {"spawn", "import", "load_weights", "server_ready", "semantic_verify"} <= set(episode.phases_s())
    check(episode)
    waited = next(event for event in node.journal.events(known) if event.episode == episode.id)
    assert episode.closed_ns is not None
    assert waited.wall_ns < episode.closed_ns


@pytest.mark.timeout(900)
def test_killed_in_every_phase_of_its_start_it_becomes_ready_in_the_end(node: Node) -> None:
    counters, position = node.counters(), node.last_id()
    engine, refusals = node.pid("a"), []
    plainly = node.runtime_dir / PLAINLY  # or there would be nothing to import
    plainly.touch()
    node.kill(engine)
    for kind, name in DIE_AT:
        begun = node.event(kind, name, after=position)
        spawned = node.event("process", "spawned", after=position)
        assert (spawned.episode, spawned.attempt) == (begun.episode, begun.attempt)
        refusals.append(node.readiness())
        if name == "import":
            plainly.unlink()
        node.kill(spawned.attributes["pid"])
        exited = node.event("process", "exited", after=spawned.id)
        assert exited.attributes["pid"] == spawned.attributes["pid"]
        position = exited.id
        now = node.counters()
        assert [key for key, value in counters.items() if now[key] < value] == [], "counters never go down"
        counters = now
    wait_for(node.ready, "an engine is let in")
    assert node.answer() == " Paris"
    node.until_closed()
    replay = node.replay()
    episode = replay.episodes[-1]
    assert (episode.cause, episode.outcome, episode.verified) == ("crash", "ready", True)
    assert [attempt.outcome for attempt in episode.attempts] == ["crashed"] * len(DIE_AT) + ["ready"]
    assert [attempt.signal for attempt in episode.attempts] == [signal.SIGKILL] * len(DIE_AT) + [None]
    # Each died in the phase that it was to die in, or in a later one, where a phase was shorter than the kill's way.
    for attempt, (_, name) in zip(episode.attempts, DIE_AT, strict=False):
        tops = [interval.name for interval in attempt.phases if not interval.is_part]
        # An open port ends the last phase of the engine and has the gate begin its own, in either order.
        earliest = "server_ready" if name == "verifying" else name
        assert tops[-1] in PHASES[PHASES.index(earliest) :]
    for each in replay.episodes:
        check(each)
    assert replay.started == replay.closed + len(replay.open_episodes)
    # Whoever was refused got the recovery's id, by which to find the last words of what was lost.
    told = [refusal.json() for refusal in refusals if refusal is not None and refusal.status_code == 503]
    assert {problem["trace_id"] for problem in told} == {episode.id}
    said = node.readmit("logs", "--episode", told[0]["trace_id"])
    assert said.returncode == 0, said.stderr
    assert said.stdout.count("==>") == 1 + len(DIE_AT)
    assert "serving on" in said.stdout, "the last words of the engine that served before"


def test_replay_says_what_the_running_counters_say(node: Node) -> None:
    replay = node.replay()

    def counted() -> tuple[float, float]:
        counters = node.counters()
        lookups = sum(value for (name, _), value in counters.items() if name == "weightcache_lookups_total")
        ready = sum(
            value for (name, _), value in counters.items() if name == "readmit_time_to_semantic_readiness_seconds_count"
        )
        return lookups, ready

    lookups = [it for episode in replay.episodes for attempt in episode.attempts for it in attempt.lookups]
    verified = [episode for episode in replay.episodes if episode.outcome == "ready" and episode.verified]
    wait_for(lambda: counted() == (len(lookups), len(verified)), "the counters have caught up")


def test_its_report_agrees_with_the_journal(node: Node) -> None:
    report = json.loads(node.readmit("report", "--json").stdout)
    replay = node.replay()
    assert report["started"] == replay.started == len(replay.episodes)
    assert sum(path["closed"] for path in report["paths"]) == replay.closed
    for path in report["paths"]:
        mine = [episode.total_s for episode in replay.episodes if episode.path == path["path"]]
        assert path["closed"] == len(mine)
        assert path["worst_s"] == pytest.approx(max(mine))
    for group in report["groups"]:
        assert sum(group["phases"].values()) == pytest.approx(group["total_s"])
        assert group["state"]["page_cache"] == "warm"
    hits = [group for group in report["groups"] if group["path"] == "hit"]
    assert hits
    assert all(group["state"]["resident"] is True for group in hits)
    assert len(report["dead"]) == sum(
        attempt.outcome == "crashed" or attempt.signal is not None
        for episode in replay.episodes
        for attempt in episode.attempts
    )
    assert all(Path(dead["output"]).is_file() for dead in report["dead"])
    # A recovery that was undisturbed is accounted for nearly whole.
    for episode in replay.episodes:
        if len(episode.attempts) == 1:
            assert episode.phases_s().get(UNATTRIBUTED, 0.0) <= 0.5


def test_each_recovery_is_one_trace(node: Node, collector: Collector) -> None:
    def traces() -> list[list[dict[str, Any]]]:
        lines = (node.state_dir / "spans.jsonl").read_text().splitlines()
        return [json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"] for line in lines]

    replay = node.replay()
    wait_for(lambda: len(traces()) == len(replay.episodes), "every recovery is exported")
    found = traces()
    for episode, spans in zip(replay.episodes, found, strict=True):
        assert {span["traceId"] for span in spans} == {episode.id}
        (root,) = (span for span in spans if not span.get("parentSpanId"))
        assert int(root["endTimeUnixNano"]) - int(root["startTimeUnixNano"]) == round(episode.total_s * 1e9)
        by_id = {span["spanId"]: span for span in spans}
        assert len(by_id) == len(spans)
        for span in spans:
            assert int(span["startTimeUnixNano"]) <= int(span["endTimeUnixNano"])
            if span is not root:
                above = by_id[span["parentSpanId"]]
                assert int(above["startTimeUnixNano"]) <= int(span["startTimeUnixNano"])
                assert int(span["endTimeUnixNano"]) <= int(above["endTimeUnixNano"])
        attempts = [span for span in spans if span["name"] == "attempt"]
        assert len(attempts) == len(episode.attempts)

    def collected() -> dict[str, set[str]]:
        return {trace: {span["spanId"] for span in spans} for trace, spans in collector.traces().items()}

    told = {
        episode.id: {span["spanId"] for span in spans} for episode, spans in zip(replay.episodes, found, strict=True)
    }
    wait_for(lambda: collected() == told, "the collector has got the same")


def test_sigterm_leaves_nothing_behind(started: tuple[Node, subprocess.Popen[str]]) -> None:
    node, keeper = started
    children = node.children()
    status, _, said = node.end(keeper)
    assert status == 0, said
    for child in children.values():
        assert child["pid"] is None or Process.open(child["pid"], child["start_ticks"]) is None
    marker = f"READMIT_RUNTIME={node.runtime_dir}\0".encode()
    assert [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if marker in environment(pid)] == []
    assert [path.name for path in node.left_behind() if path.is_socket() or path.suffix != ".lock"] == []
    for address in (node.gate, node.metrics, node.engine):
        host, _, port = address.rpartition(":")
        socket.create_server((host, int(port))).close()
    # What holds weights is a descriptor; with every process gone there is none. Nor does the journal miss the end.
    (last,) = node.journal.query("ORDER BY id DESC LIMIT 1")
    assert (last.kind, last.name, last.attributes["process"]) == ("process", "exited", "keeper")
    lines = [json.loads(line) for line in said.splitlines()]
    assert {(line["logger"], line["node"]) for line in lines} == {("weightcache.keeper", "n")}


def environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # it has ended meanwhile, or is not ours
        return b""


def test_every_line_of_every_log_says_which_recovery_it_belongs_to(node: Node) -> None:
    known = {episode.id for episode in node.replay().episodes}
    output = node.state_dir / "output"
    files = {path.name: [json.loads(line) for line in path.read_text().splitlines()] for path in output.glob("*.log")}
    assert files.pop("a-preload.log", []) == []  # it begins in a quiet moment, which this node may not have had
    engines = {name: lines for name, lines in files.items() if name.startswith("a-")}
    assert len(engines) >= 1 + len(DIE_AT)
    for name, lines in engines.items():
        _, episode, attempt = re.fullmatch(r"(a)-([0-9a-f]{8})-(\d+)\.log", name).groups()  # type: ignore[union-attr]
        for line in lines:
            assert line["slot"] == "a"
            assert line["episode"].startswith(episode)
            assert line["trace_id"] == line["episode"]
            assert line["attempt"] == int(attempt)
    (ready, *_) = (line for line in files["gate.log"] if line["message"].startswith("ready"))
    assert (ready["slot"], ready["logger"]) == ("a", "readmit.gate")
    assert ready["trace_id"] in known
    assert {line["node"] for lines in files.values() for line in lines} == {"n"}
