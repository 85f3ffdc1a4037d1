"""``readmit up``: a whole node, from one file, with everything real but the engine's mind."""

import json
import os
import signal
import socket

import pytest
from tests.fixtures import http
from tests.readmit.nodes import Node, wait_for

from weightcache.process import Process


def test_a_node_serves_survives_and_ends(node: Node) -> None:
    keeper = node.start("up")
    wait_for(node.ready, "the gate lets traffic in")
    first = node.running("daemon", "a", "gate")
    assert http.get(f"http://{node.metrics}/metrics").status_code == 200

    os.kill(first["a"]["pid"], signal.SIGKILL)
    wait_for(lambda: node.ready() and node.children()["a"]["pid"] != first["a"]["pid"], "the engine is back")
    wait_for(lambda: not node.replay().open_episodes, "the recovery is closed")
    episodes = node.replay().episodes
    assert [(it.cause, it.outcome, it.verified) for it in episodes] == [
        ("first_start", "ready", True),
        ("crash", "ready", True),
    ]
    assert abs(sum(episodes[1].phases_s().values()) - episodes[1].total_s) < 1e-6

    shown = node.readmit("status")
    assert shown.returncode == 0
    (line,) = (line for line in shown.stdout.splitlines() if line.startswith("a "))
    assert "ready" in line
    assert "after crash" in line
    assert node.readmit("logs", "a", "--tail", "1").stdout == "scripted engine listens\n"

    status, _, said = node.end(keeper)
    assert status == 0, said
    assert said.startswith("readmit: keeping daemon, a, gate: readmit status shows them"), "nobody waits in silence"
    assert [path.name for path in node.left_behind() if path.suffix != ".lock"] == []
    for child in (*first.values(), *node.children().values()):
        assert Process.open(child["pid"], child["start_ticks"]) is None


def test_a_keeper_that_was_killed_is_replaced_by_the_same_command(node: Node) -> None:
    keeper = node.start("up")
    wait_for(node.ready, "the gate lets traffic in")
    before = {name: child["pid"] for name, child in node.running("daemon", "a", "gate").items()}
    keeper.kill()
    keeper.wait()
    assert node.ready(), "the node serves without its keeper"
    left = json.loads(node.readmit("status", "--json").stdout)
    assert {child["name"]: child["pid"] for child in left["children"]} == before
    # Its children hold their ports rightly.
    successor = node.start("up")
    assert {name: child["pid"] for name, child in node.running(*before).items()} == before
    assert node.ready()
    assert node.end(successor)[0] == 0


def test_a_restart_on_purpose_has_its_cause_on_record(node: Node) -> None:
    node.start("up")
    wait_for(node.ready, "the gate lets traffic in")
    pid = node.children()["a"]["pid"]
    assert node.readmit("restart", "a", "--cause", "upgrade").returncode == 0
    wait_for(lambda: node.children()["a"]["pid"] not in (None, pid) and node.ready(), "the engine is back")
    assert node.replay().episodes[-1].cause == "upgrade"
    refused = node.readmit("restart", "a", "--cause", "weather")
    assert refused.returncode == 2
    assert "one of crash, hang" in refused.stderr


def refusal(node: Node, *words: str) -> str:
    result = node.readmit("up", *words)
    assert result.returncode == 2, result.stdout
    assert result.stderr.startswith("readmit: ")
    assert result.stderr.count("\n") == 1
    assert node.left_behind() == []
    assert not node.state_dir.exists()
    return result.stderr


def test_check_only_says_that_it_could_start(node: Node) -> None:
    checked = node.readmit("up", "--check")
    assert checked.returncode == 0, checked.stderr
    assert checked.stdout == "can start: daemon, a, gate\n"
    assert checked.stderr == ""
    assert node.left_behind() == []


def test_parts_of_a_node_can_run_elsewhere(node: Node) -> None:
    keeper = node.start("up", "--only", "engine")
    assert list(node.running("a")) == ["a"]
    (episode,) = node.replay().episodes
    assert episode.is_open, "the gate, wherever it runs, will close it"
    assert node.end(keeper)[0] == 0


@pytest.mark.parametrize("owner", ["gate", "metrics", "engine"])
def test_a_taken_port_is_named_before_anything_starts(node: Node, owner: str) -> None:
    address = getattr(node, owner)
    with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))):
        assert f"cannot listen on {address}: Address already in use" in refusal(node)


def test_a_program_that_is_not_there_is_named_before_anything_starts(node: Node) -> None:
    node.configure(python3="python99")
    assert "the command of a cannot be run: there is no program python99" in refusal(node)


def test_two_of_a_node_on_one_port_are_named_before_anything_starts(node: Node) -> None:
    file = node.folder / "readmit.toml"
    file.write_text(file.read_text() + f'[[slot]]\nname = "b"\nurl = "http://{node.engine}"\ncommand = ["true"]\n')
    assert f"a and b cannot both listen on {node.engine}" in refusal(node)


@pytest.mark.parametrize(("key", "said"), [("token_file", "holds no token"), ("tls_cert", "cannot serve HTTPS")])
def test_a_file_that_the_gate_cannot_use_is_named_before_anything_starts(node: Node, key: str, said: str) -> None:
    node.configure(drain_notice_s=f'{key} = "nowhere"\ndrain_notice_s')
    assert said in refusal(node)


def test_a_model_that_is_not_here_is_only_said_for_a_container_may_have_it(node: Node) -> None:
    node.configure(**{"[[slot]]": '[[slot]]\nmodel = "/models/nowhere"'})
    checked = node.readmit("up", "--check")
    assert checked.returncode == 0
    assert checked.stderr == "readmit: slot a: there is no /models/nowhere here, its model\n"


def test_missing_golden_answers_are_named_before_anything_starts(node: Node) -> None:
    (node.folder / "probes.json").unlink()
    assert "probes.json is not there" in refusal(node)
    node.configure(**{"probes__=": "# probes ="})
    assert "so it would never open" in refusal(node)


def test_a_folder_of_somebody_else_is_refused(node: Node) -> None:
    node.runtime_dir.mkdir()
    node.runtime_dir.chmod(0o777)
    assert "expected mode 0700, found mode 0777" in refusal(node)


def test_a_path_too_long_is_refused(node: Node) -> None:
    node.configure(**{f'"{node.runtime_dir}"': f'"{node.folder}/{"x" * 80}"'})
    assert "expected at most 107 bytes" in refusal(node)


def test_a_missing_file_points_to_the_example(node: Node) -> None:
    assert "deploy/readmit.toml is an example" in refusal(node, "other.toml")


def test_a_second_node_on_the_same_folder_is_refused_without_touching_the_first(node: Node) -> None:
    node.start("up")
    before = {name: child["pid"] for name, child in node.running("daemon", "a", "gate").items()}
    second = node.readmit("up")
    assert second.returncode == 2
    assert "already looks after" in second.stderr
    assert {name: child["pid"] for name, child in node.children().items()} == before
