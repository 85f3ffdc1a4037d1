"""What the keeper says, for people and for machines."""

import json

import pytest
from tests.weightcache.keeper.harness import Node, wait_for

from weightcache.keeper.console import say


def test_in_json_every_line_says_which_recovery_it_belongs_to(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("READMIT_LOG_FORMAT", "json")
    node.add("a", "a", "crash", limit=2, backoff_s=[0])
    keeper = node.start()
    wait_for(lambda: node.child("a")["state"] == "failed", "it is given up")
    _, said = node.stop(keeper)
    lines = [json.loads(line) for line in said.splitlines()]
    episode = node.replay().episodes[0].id
    ends = [line for line in lines if line["message"].startswith("a, pid")]
    assert [(line["slot"], line["episode"], line["trace_id"], line["attempt"]) for line in ends] == [
        ("a", episode, episode, 1),
        ("a", episode, episode, 2),
    ]
    (given_up,) = (line for line in lines if "is given up" in line["message"])
    assert given_up["message"].endswith("RuntimeError: out of luck")
    assert given_up["logger"] == "weightcache.keeper"
    assert "stopping" in lines[-1]["message"]
    assert "slot" not in lines[-1]


def test_a_format_that_there_is_not_is_refused_before_anything_starts(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("READMIT_LOG_FORMAT", "xml")
    node.add("a", "a")
    keeper = node.launch()
    _, said = keeper.communicate(timeout=60)
    assert keeper.returncode == 2
    assert said.count("\n") == 1
    assert "expected text or json, found xml" in said
    assert not node.runtime_dir.exists()


def test_for_people_it_is_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    say("a is up")
    assert capfd.readouterr().err == "readmit: a is up\n"
