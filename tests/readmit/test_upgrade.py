"""``readmit upgrade`` under a steady client: every process of a node is replaced, and then its model."""

import json
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.fixtures import checkpoints, http
from tests.readmit.forked import ATTACHING
from tests.readmit.gate.harness import SCRIPTED
from tests.readmit.nodes import PATIENCE_S, PYTHONPATH, Node, free_port, place, wait_for

pytestmark = pytest.mark.timeout(900)


class Client(threading.Thread):
    """Asks on and on, each time on a connection of its own, and counts what comes back."""

    def __init__(self, gate: str) -> None:
        super().__init__(daemon=True)
        self.counts: Counter[str] = Counter()
        self._url = f"http://{gate}/v1/completions"
        self._over = threading.Event()

    def run(self) -> None:
        body = {"model": "scripted", "prompt": "The capital of France is", "max_tokens": 1}
        while not self._over.wait(0.2):
            try:
                reply = http.post(self._url, json=body, timeout=PATIENCE_S)
            except httpx.TimeoutException:
                self.counts["hung"] += 1
            except httpx.TransportError as error:
                self.counts[f"broken: {error}"] += 1
            else:
                right = reply.status_code == 200 and reply.json()["choices"][0]["text"] == " Paris"
                told = reply.status_code == 503 and int(reply.headers["Retry-After"]) > 0
                self.counts["right" if right else "told" if told else f"wrong: {reply.text}"] += 1

    def end(self) -> Counter[str]:
        self._over.set()
        self.join(PATIENCE_S)
        return self.counts


class Pair(Node):
    """A node of two slots whose engines take their weights from the cache, by the identity of a checkpoint."""

    def serve(self, model: str) -> None:
        """Configure both for a model of this folder."""
        if not hasattr(self, "gate"):
            self.configure()
            self.ports = {"a": self.engine.rpartition(":")[2], "b": str(free_port())}
            self.head = (self.folder / "readmit.toml").read_text().partition("[[slot]]")[0]
        folder = self.folder / model
        if not folder.exists():
            shard = checkpoints.plain(folder) / checkpoints.SHARDS[0]
            content = shard.read_bytes()
            shard.write_bytes(content[:-1] + bytes([content[-1] ^ model.encode()[0]]))
        slots = [
            f'[[slot]]\nname = "{name}"\nurl = "http://127.0.0.1:{port}"\nmodel = "{folder}"\n'
            f"command = {json.dumps([*self.forking(ATTACHING, name), port, 'client', str(folder)])}\n"
            f'preload = "{ATTACHING}"\n'
            for name, port in self.ports.items()
        ]
        (self.folder / "readmit.toml").write_text(self.head + "".join(slots))

    def replaced(self, before: dict[str, dict[str, Any]]) -> set[str]:
        """Which of these are other processes now."""
        names = before.keys() - self.residents.keys()
        return {name for name, child in self.running(*names).items() if child["pid"] != before[name]["pid"]} & names


@pytest.fixture
def pair() -> Iterator[Pair]:
    with place(Pair) as here:
        here.serve("one")
        here.environment["PYTHONPATH"] = PYTHONPATH
        yield here


def test_a_node_and_then_its_model_are_replaced_under_a_steady_client(pair: Pair) -> None:
    keeper = pair.start("up")
    wait_for(pair.ready, "the gate lets traffic in")
    wait_for(lambda: len(pair.replay().episodes) == 2 and not pair.replay().open_episodes, "both starts are closed")
    first = pair.running("daemon", "a", "b", "gate")
    client = Client(pair.gate)
    client.start()
    try:
        done = pair.readmit("upgrade")
        assert done.returncode == 0, done.stderr
        assert pair.replaced(first) == {"daemon", "a", "b", "gate"}
        told = done.stdout.splitlines()
        assert f"the keeper (pid {keeper.pid}) goes on as release" in told[0]
        assert "with all 1 generations" in told[1]
        assert told[3:-1:2] == ["a next: it will map resident weights", "b next: it will map resident weights"]
        assert all("(hit)" in line and "no GPU-hours" in line for line in told[4:-1:2]), told
        assert told[-1].startswith("2 engines in ")

        # Another model: it is refused until its weights are resident, and then it is a hit like any other.
        pair.serve("two")
        refused = pair.readmit("upgrade", "--only", "keeper", "--only", "engine")
        assert refused.returncode == 2
        assert "a would not map resident weights" in refused.stderr
        assert "a next: miss, " in refused.stdout
        second = pair.running("daemon", "a", "b", "gate")
        worker = f"{sys.executable} -m {ATTACHING} 0 client {pair.folder / 'two'}"
        loaded = pair.readmit("cache", "load", "--command", worker)
        assert loaded.returncode == 0, loaded.stderr
        before = client.counts["told"]
        done = pair.readmit("upgrade", "--only", "keeper", "--only", "engine")
        assert done.returncode == 0, done.stderr
        assert pair.replaced(second) == {"a", "b"}
        assert client.counts["told"] == before, "one slot serves while the other is replaced"
    finally:
        counts = client.end()
    assert set(counts) <= {"right", "told"}, counts
    assert counts["right"] > 0
    assert keeper.poll() is None
    upgrades = [(it.slot, it.path, it.outcome) for it in pair.replay().episodes if it.cause == "upgrade"]
    assert upgrades == [("a", "hit", "ready"), ("b", "hit", "ready")] * 2
    published = pair.journal.query("WHERE kind = 'publish' AND name = 'published'")
    assert len(published) == 2, "each model's weights were loaded once"


def test_a_configuration_that_cannot_be_used_changes_nothing(node: Node) -> None:
    keeper = node.start("up")
    node.running("a")
    before = (node.runtime_dir / "keeper-spec.json").read_bytes()
    text = (node.folder / "readmit.toml").read_text()
    (node.folder / "readmit.toml").write_text(text.replace('"python3"', '"python99"'))
    refused = node.readmit("restart", "keeper")
    assert refused.returncode == 2
    assert "there is no program python99" in refused.stderr
    assert (node.runtime_dir / "keeper-spec.json").read_bytes() == before
    (node.folder / "readmit.toml").write_text(text.replace(str(SCRIPTED), f'{SCRIPTED}", "--more'))
    taken = node.readmit("restart", "keeper")
    assert taken.returncode == 0, taken.stderr
    assert "--more" in (node.runtime_dir / "keeper-spec.json").read_text()
    assert keeper.poll() is None


def test_restarts_that_are_waited_for_say_how_it_went(node: Node) -> None:
    node.start("up")
    wait_for(node.ready, "the gate lets traffic in")
    wait_for(lambda: not node.replay().open_episodes, "the start is closed")
    done = node.readmit("restart", "a", "--cause", "config_change", "--wait", "--json")
    assert done.returncode == 0, done.stderr
    assert "a is ready after" in done.stderr
    facts = json.loads(done.stdout)
    assert (facts["slot"], facts["cause"], facts["outcome"]) == ("a", "config_change", "ready")
    done = node.readmit("restart", "daemon", "--wait")
    assert "daemon is up after" in done.stdout
    assert "there is no 'z' here" in node.readmit("restart", "z").stderr
