"""Every process of a node is replaced under a steady client, in the order that the guide gives."""

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.readmit.nodes import PATIENCE_S, place, wait_for
from tests.readmit.test_drill import attaching
from tests.readmit.test_up import Node

from weightcache.journal import Journal

ROOT = Path(__file__).parents[2]


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
                reply = httpx.post(self._url, json=body, timeout=PATIENCE_S)
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


pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def node() -> Iterator[Node]:
    with place(Node) as here:
        here.configure()
        here.environment["PYTHONPATH"] = ":".join(map(str, (ROOT, ROOT / "daemon", ROOT / "service")))
        yield here


def test_a_node_is_replaced_piece_by_piece(node: Node) -> None:
    attaching(node, "client")
    keeper = node.start("up")
    wait_for(node.ready, "the gate lets traffic in")
    first = node.running("daemon", "a", "gate")
    client = Client(node.gate)
    client.start()
    try:
        os.kill(keeper.pid, signal.SIGKILL)
        keeper.communicate()
        node.start("up")
        assert {name: it["pid"] for name, it in node.running(*first).items()} == {
            name: it["pid"] for name, it in first.items()
        }
        wait_for(lambda: node.children()["daemon"]["stored"] >= 3, "listener, arena and lease are in keeping again")
        for name in ("daemon", "gate"):
            assert node.readmit("restart", name).returncode == 0
            wait_for(lambda name=name: replaced(node, name, first[name]["pid"]), f"another {name} is up")
        wait_for(node.ready, "the new gate lets traffic in")
        assert node.children()["a"]["pid"] == first["a"]["pid"]
        assert node.readmit("restart", "a", "--cause", "upgrade").returncode == 0
        wait_for(lambda: replaced(node, "a", first["a"]["pid"]) and node.ready(), "the new engine answers")
        wait_for(lambda: not node.replay().open_episodes, "the recovery is closed")
    finally:
        counts = client.end()
    assert set(counts) <= {"right", "told"}, counts
    assert counts["right"] > 0
    assert [(it.cause, it.path) for it in node.replay().episodes] == [("first_start", "miss"), ("upgrade", "hit")]
    published = Journal(node.state_dir / "journal.sqlite3").query("WHERE kind = 'publish' AND name = 'published'")
    assert len(published) == 1, "the weights were loaded once"


def replaced(node: Node, name: str, pid: int) -> bool:
    child = node.children().get(name, {})
    return child.get("state") == "running" and child["pid"] not in (None, pid) and (child["ready"] or name == "a")
