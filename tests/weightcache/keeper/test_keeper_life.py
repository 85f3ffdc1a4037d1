"""The keeper's own life: its end, its death and its successor, its refusals, its size."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.weightcache.keeper.harness import PATIENCE_S, Node, alive, wait_for


def living(*reports: dict[str, object]) -> list[int]:
    pids = [int(str(report[key])) for report in reports for key in ("pid", "worker") if key in report]
    return [pid for pid in pids if alive(pid)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_an_orderly_end_leaves_nothing_in_the_right_order(node: Node, number: signal.Signals) -> None:
    node.add("daemon", "d", "stores", role="daemon")
    node.add("a", "a", "worker")
    node.add("b", "b", "stubborn", stop_s=0.2)
    node.add("gate", "g", role="gate")
    keeper = node.start()
    wait_for(lambda: all(child["ready"] for child in node.state()["children"]))
    reports = [node.report(word) for word in "dabg"]
    assert len(living(*reports)) == 5
    keeper.send_signal(number)
    keeper.send_signal(signal.SIGTERM)  # a supervisor's second signal changes nothing
    _, said = keeper.communicate(timeout=PATIENCE_S)
    assert keeper.returncode == 0
    assert living(*reports) == []
    assert list(node.runtime_dir.iterdir()) == []
    ends = node.events("WHERE kind = 'process' AND name = 'exited' ORDER BY id")
    assert [event.slot or event.attributes["process"] for event in ends] == ["gate", "a", "b", "daemon", "keeper"]
    assert {event.slot: event.attributes["signal"] for event in ends if event.slot} == {"a": 15, "b": 9}
    assert "b has not ended after SIGTERM and is killed" in said
    assert all(not episode.is_open for episode in node.replay().episodes)


def test_who_asks_twice_at_a_terminal_need_not_wait(node: Node) -> None:
    node.add("a", "a", "stubborn", stop_s=1000)
    keeper = node.start()
    wait_for(lambda: node.child("a").get("ready"))
    keeper.send_signal(signal.SIGINT)
    wait_for(lambda: node.child("a").get("state") == "ending")
    keeper.send_signal(signal.SIGINT)
    keeper.communicate(timeout=PATIENCE_S)
    assert keeper.returncode == 0


def test_an_end_during_a_backoff_ends_the_episode(node: Node) -> None:
    node.add("a", "a", "crash", backoff_s=[1000])
    keeper = node.start()
    wait_for(lambda: node.child("a").get("state") == "waiting")
    assert node.child("a")["next_start_s"] > 900
    assert node.stop(keeper)[0] == 0
    assert [(it.outcome, len(it.attempts)) for it in node.replay().episodes] == [("abandoned", 1)]


def test_one_child_can_be_stopped_and_started_again(node: Node) -> None:
    node.add("a", "a")
    node.start()
    pid = node.report("a")["pid"]
    node.ask({"stop": "a"})
    wait_for(lambda: node.child("a")["state"] == "stopped")
    assert not alive(pid)
    node.order("a", "config_change")
    assert node.report("a", 2)["pid"] != pid


def test_a_second_keeper_is_refused_and_names_the_first(node: Node) -> None:
    node.add("a", "a")
    first = node.start()
    pid = node.report("a")["pid"]
    second = node.launch()
    _, said = second.communicate(timeout=PATIENCE_S)
    assert second.returncode == 2
    assert f"a keeper with pid {first.pid} already looks after {node.runtime_dir}" in said
    assert said.count("\n") == 1
    assert "Traceback" not in said
    assert node.child("a")["pid"] == pid
    assert len(node.events("WHERE kind = 'attempt_start'")) == 1


def test_the_death_of_an_adopted_engine_is_noticed_and_its_status_not_invented(node: Node) -> None:
    node.add("a", "a")
    node.options["closes_episodes"] = True
    first = node.start()
    wait_for(lambda: node.child("a").get("ready"))
    pid = node.child("a")["pid"]
    first.kill()
    first.wait()
    node.start()
    node.kill(pid)
    node.report("a", 2)
    (died,) = node.events("WHERE kind = 'process' AND name = 'exited' AND slot = 'a'")
    assert (died.attributes["exit_code"], died.attributes["signal"]) == (None, None)
    assert "not a child" in died.attributes["status"]
    assert node.replay().episodes[-1].cause == "crash"


def test_what_died_while_there_was_no_keeper_is_found_by_the_next(node: Node) -> None:
    node.add("a", "a", "worker")
    node.options["closes_episodes"] = True
    first = node.start()
    wait_for(lambda: node.child("a").get("ready"))
    report = node.report("a")
    first.kill()
    first.wait()
    node.kill(report["pid"])
    assert alive(report["worker"])
    node.start()
    node.report("a", 2)
    assert not alive(report["worker"])
    assert [(it.cause, len(it.attempts)) for it in node.replay().episodes] == [("first_start", 1), ("crash", 1)]


def test_a_successor_goes_on_with_the_attempts_of_an_open_episode(node: Node) -> None:
    node.add("a", "a", "crash", backoff_s=[0, 1000], limit=3)
    first = node.start()
    wait_for(lambda: node.child("a").get("state") == "waiting")
    first.kill()
    first.wait()
    node.start()
    wait_for(lambda: node.child("a").get("state") == "failed")
    (episode,) = node.replay().episodes
    assert (len(episode.attempts), episode.outcome) == (3, "abandoned")


def test_a_child_that_the_new_spec_has_not_is_ended(node: Node) -> None:
    node.add("a", "a")
    node.add("b", "b")
    first = node.start()
    pids = {word: node.report(word)["pid"] for word in "ab"}
    first.kill()
    first.wait()
    del node.children[1]
    node.start()
    wait_for(lambda: not alive(pids["b"]))
    assert node.child("a")["pid"] == pids["a"]
    assert [it.slot for it in node.replay().open_episodes] == ["a"]


def test_keepers_killed_at_any_moment_leave_no_orphan_and_a_journal_that_adds_up(node: Node) -> None:
    node.add("daemon", "d", "stores", role="daemon")
    node.add("a", "a", "worker", limit=0)
    node.add("b", "b", "crash", backoff_s=[0.01], limit=0)
    node.options["closes_episodes"] = True
    chance = random.Random(7)
    for _ in range(12):
        keeper = node.launch()
        time.sleep(chance.uniform(0, 0.5))
        children = node.state().get("children", [])
        for child in children:
            if child["pid"] and chance.random() < 0.5:
                node.kill(child["pid"])
        time.sleep(chance.uniform(0, 0.02))
        keeper.kill()
        keeper.communicate()
    keeper = node.start()
    wait_for(lambda: node.child("a").get("ready") and node.child("daemon").get("ready"))
    reports = node.all_reports()
    now = {node.child(name)["pid"] for name in ("daemon", "a", "b")}
    for report in reports:
        if report["pid"] not in now:
            assert living(report) == []
    assert node.stop(keeper)[0] == 0
    assert living(*node.all_reports()) == []
    replay = node.replay()
    assert replay.started == replay.closed
    for episode in replay.episodes:
        assert abs(sum(episode.phases_s().values()) - episode.total_s) < 1e-6
        assert [attempt.number for attempt in episode.attempts] == list(range(1, len(episode.attempts) + 1))
        assert all(attempt.outcome for attempt in episode.attempts)
    assert set(node.processes("spawned")) <= set(node.processes("exited"))
    assert len(node.processes("exited")) == len(set(node.processes("exited"))), "nobody dies twice"


def test_settings_that_cannot_work_are_one_paragraph_and_leave_nothing(node: Node) -> None:
    node.add("a" * 32, "a")
    node.runtime_dir = node.folder / ("x" * 60)
    keeper = node.launch()
    _, said = keeper.communicate(timeout=PATIENCE_S)
    assert keeper.returncode == 2
    assert "expected at most 107 bytes, found" in said
    assert said.count("\n") == 1
    assert not node.runtime_dir.exists()


def test_a_folder_that_others_can_enter_is_refused(node: Node) -> None:
    node.add("a", "a")
    node.runtime_dir.mkdir(mode=0o755)
    node.runtime_dir.chmod(0o755)
    keeper = node.launch()
    _, said = keeper.communicate(timeout=PATIENCE_S)
    assert keeper.returncode == 2
    assert "expected mode 0700, found mode 0755" in said
    assert list(node.runtime_dir.iterdir()) == []


def test_a_spec_that_is_none_is_named(node: Node) -> None:
    node.add("a", "a", color="red")
    keeper = node.launch()
    _, said = keeper.communicate(timeout=PATIENCE_S)
    assert keeper.returncode == 2
    assert "color" in said
    assert said.count("\n") == 1


def test_a_reader_that_stops_reading_holds_up_no_restart(node: Node) -> None:
    node.add("a", "a", "crash", backoff_s=[0], limit=0)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x")
    os.set_blocking(writer, True)
    node.popen["stderr"] = node.popen["stdout"] = writer
    node.options["foreground"] = True
    node.start()
    os.close(writer)
    wait_for(lambda: node.child("a")["starts"] > 5)
    os.close(reader)
    before = node.child("a")["starts"]
    wait_for(lambda: node.child("a")["starts"] > before + 5)


def test_the_keeper_stays_under_16_mib(node: Node) -> None:
    node.add("daemon", "d", "stores", role="daemon")
    node.add("a", "a", limit=0, backoff_s=[0])
    keeper = node.start()
    for count in range(1, 6):
        node.report("a", count)
        wait_for(lambda: node.child("a").get("ready"))
        node.kill(node.child("a")["pid"])
    node.report("a", 6)
    lines = Path(f"/proc/{keeper.pid}/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    assert int(status["VmRSS"].split()[0]) <= 16 << 10


def test_the_keeper_needs_no_package_but_the_standard_library() -> None:
    program = "import sys, weightcache.keeper.__main__; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    own = {"__main__", "weightcache", "_distutils_hack", "sitecustomize"}
    assert set(loaded) - own - set(sys.stdlib_module_names) == set()
    assert not set(loaded) & {"asyncio", "subprocess", "dataclasses", "hashlib", "ctypes"}
