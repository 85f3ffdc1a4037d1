"""``readmit preempt``: an engine yields, its weights stay, and it comes back on them."""

import json
import signal

import pytest
from tests.readmit.nodes import Node, wait_for
from tests.readmit.test_drill import attaching

from weightcache.process import Process

pytestmark = pytest.mark.timeout(900)


def test_an_engine_yields_and_comes_back_on_resident_weights(node: Node) -> None:
    attaching(node, "client")
    node.start("up")
    wait_for(node.ready, "the gate lets traffic in")
    wait_for(lambda: node.replay().episodes and not node.replay().open_episodes, "the start is closed")
    before = node.children()["a"]
    yielded = node.readmit("preempt", "a")
    assert yielded.returncode == 0, yielded.stderr
    assert Process.open(before["pid"], before["start_ticks"]) is None
    assert node.children()["a"]["state"] == "stopped"
    assert "readmit preempt a --resume" in node.readmit("status").stdout
    assert "has yielded already" in node.readmit("preempt", "a").stderr
    assert len(node.replay().episodes) == 1, "to yield is no fault"

    facts = json.loads(node.readmit("preempt", "a", "--resume", "--json").stdout)
    assert (facts["outcome"], facts["path"]) == ("ready", "hit")
    last = node.replay().episodes[-1]
    assert (last.id, last.cause, last.verified) == (facts["episode"], "preempted", True)
    assert last.total_s == pytest.approx(facts["total_s"], abs=0.001)
    wait_for(node.ready, "the gate lets traffic in again")
    assert "it has not yielded" in node.readmit("preempt", "a", "--resume").stderr


def test_only_engines_yield_and_who_is_drained_is_not_waited_for(node: Node) -> None:
    node.start("up")
    wait_for(node.ready, "the gate lets traffic in")
    assert node.readmit("drain", "a", "--force").returncode == 0
    for words in (("restart", "a", "--wait"), ("restart", "a", "--wait", "--json")):
        waited = node.readmit(*words)
        assert waited.returncode == 2
        assert "readmit drain a --undo" in waited.stderr
    assert len(node.replay().episodes) == 1, "it was not restarted"
    refused = node.readmit("preempt", "daemon")
    assert refused.returncode == 2
    assert "expected a, found daemon" in refused.stderr


def test_who_is_interrupted_says_what_is_left_behind(node: Node) -> None:
    node.start("up")
    wait_for(node.ready, "the gate lets traffic in")
    waiting = node.start("preempt", "a", "--for", "3600")
    wait_for(lambda: node.children()["a"]["state"] == "stopped", "the engine has yielded")
    status, _, said = node.end(waiting, signal.SIGINT)
    assert status != 0
    assert "a stays away until readmit preempt a --resume" in said
