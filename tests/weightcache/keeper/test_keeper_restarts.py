"""Restarts: what is journaled, when the keeper gives up, and what an engine finds when it starts."""

import contextlib
import json
import os
import resource
import signal
from pathlib import Path

import pytest
from tests.weightcache.keeper.harness import Node, alive, wait_for

from weightcache.journal import Context, boottime_ns, new_episode_id


def story(node: Node, slot: str = "a") -> list[tuple[str, str, int | None]]:
    return [(event.kind, event.name, event.attempt) for event in node.events("WHERE slot = ? ORDER BY id", slot)]


def test_a_killed_engine_is_one_episode_from_the_fault_on(node: Node) -> None:
    node.add("a", "a")
    node.options["closes_episodes"] = True
    keeper = node.start()
    pid = node.ready_pid("a")
    node.kill(pid)
    node.ready_pid("a", after=pid)
    assert node.stop(keeper)[0] == 0
    start = [
        ("attempt_start", "", 1),
        ("phase_begin", "spawn", 1),
        ("process", "spawned", 1),
        ("phase_end", "spawn", 1),
    ]
    answer = [("attempt_end", "ready", 1), ("episode_close", "ready", 1)]
    assert story(node) == [
        ("episode_open", "first_start", None),
        *start,
        *answer,
        ("process", "exited", 1),
        ("episode_open", "crash", None),
        ("phase_begin", "detect", 1),
        ("phase_end", "detect", 1),
        *start,
        *answer,
        ("process", "exited", 1),
    ]
    opened, died = (node.events(f"WHERE {clause} ORDER BY id") for clause in ("kind='episode_open'", "name='exited'"))
    assert died[0].attributes["signal"] == signal.SIGKILL
    assert opened[1].attributes["fault_boottime_ns"] == died[0].boottime_ns
    assert opened[1].attributes["previous"] == opened[0].episode
    replay = node.replay()
    assert [(episode.cause, episode.outcome) for episode in replay.episodes] == [
        ("first_start", "ready"),
        ("crash", "ready"),
    ]


def test_engines_killed_on_their_way_to_exec_are_started_again(node: Node) -> None:
    node.children.append({"name": "a", "role": "engine", "argv": ["sleep", "1000"], "limit": 0, "backoff_s": [0]})
    keeper = node.start()
    killed: set[int] = set()
    state = node.runtime_dir / "keeper.json"
    while len(killed) < 40:
        # The file is written before the child may exec: its pid is known at its most delicate moment.
        (record,) = json.loads(state.read_text())["children"]
        if record["pid"] and record["pid"] not in killed:
            killed.add(record["pid"])
            with contextlib.suppress(ProcessLookupError):
                node.kill(record["pid"])
        assert keeper.poll() is None
    wait_for(lambda: node.child("a").get("pid") not in {None, *killed})
    assert node.stop(keeper)[0] == 0


def test_an_engine_that_never_gets_ready_is_given_up_and_says_why(node: Node) -> None:
    node.add("a", "a", "crash", limit=3, backoff_s=[0, 0.05])
    node.add("b", "b")
    keeper = node.start()
    wait_for(lambda: node.child("a").get("state") == "failed")
    assert node.child("b")["state"] == "running"
    assert [event.name for event in node.events("WHERE kind = 'attempt_end'")] == ["crashed"] * 3
    (episode,) = (episode for episode in node.replay().episodes if episode.slot == "a")
    assert (episode.outcome, len(episode.attempts)) == ("abandoned", 3)
    assert abs(sum(episode.phases_s().values()) - episode.total_s) < 1e-6
    _, said = node.stop(keeper)
    assert "a is given up: it ended 3 times within 600 s without becoming ready. It ended with exit code 3" in said
    assert "loading weights\nRuntimeError: out of luck" in said
    tails = sorted((node.state_dir / "output").glob("a-*.log.tail"))
    assert len(tails) == 3
    assert tails[0].read_text() == "loading weights\nRuntimeError: out of luck\n"


def test_an_engine_whose_settings_cannot_work_is_not_tried_again(node: Node) -> None:
    node.add("a", "a", "bad-settings")
    node.options["foreground"] = True
    keeper = node.launch()
    shown, said = keeper.communicate(timeout=60)
    assert keeper.returncode == 1
    assert shown == "there is no such model\n"
    assert "trying again cannot help" in said
    assert len(node.events("WHERE kind = 'attempt_start'")) == 1
    assert node.events("WHERE kind = 'episode_close'")[0].attributes["reason"] == "configuration"
    assert list(node.runtime_dir.iterdir()) == []


def test_a_slot_that_was_given_up_starts_anew_when_told(node: Node) -> None:
    node.add("a", "a", "crash", limit=1)
    node.start()
    wait_for(lambda: node.child("a").get("state") == "failed")
    assert node.order("a", "config_change")["ok"]
    wait_for(lambda: len(node.events("WHERE kind = 'episode_close'")) == 2)
    assert [episode.cause for episode in node.replay().episodes] == ["first_start", "config_change"]


def test_a_slot_that_was_given_up_and_then_stopped_on_purpose_is_meant_no_more(node: Node) -> None:
    node.add("a", "a", "crash", limit=1)
    node.start()
    wait_for(lambda: node.child("a").get("state") == "failed")
    for _ in range(2):
        node.ask({"stop": "a"})
        wait_for(lambda: node.child("a")["state"] == "stopped")
    (stopped,) = node.events("WHERE kind = 'process' AND name = 'stopped'")
    assert (stopped.slot, stopped.episode, stopped.attributes) == ("a", None, {"process": "engine"})


def test_a_fault_found_while_its_engine_was_ending_on_purpose_is_ended_as_well(node: Node) -> None:
    node.add("a", "a", "stubborn", stop_s=1000)
    node.options["closes_episodes"] = True
    node.start()
    pid = node.ready_pid("a")
    node.ask({"stop": "a"})
    wait_for(lambda: node.child("a")["state"] == "ending")
    gate = Context("n", "a", new_episode_id())
    node.journal.append("episode_open", "hang", {"cause": "hang", "fault_boottime_ns": boottime_ns()}, context=gate)
    node.kill(pid)
    wait_for(lambda: node.child("a")["state"] == "stopped")
    last = node.replay().episodes[-1]
    assert (last.id, last.outcome, last.stopped) == (gate.episode, "abandoned", True)


def test_a_program_that_is_gone_is_named(node: Node) -> None:
    node.children.append({"name": "a", "role": "engine", "argv": ["/no/such/engine"], "limit": 2, "backoff_s": [0]})
    keeper = node.start()
    wait_for(lambda: node.child("a").get("state") == "failed")
    assert "cannot execute /no/such/engine: No such file or directory" in node.stop(keeper)[1]
    exits = node.events("WHERE kind = 'process' AND name = 'exited' AND slot = 'a'")
    assert [event.attributes["exit_code"] for event in exits] == [127, 127]
    assert "No such file" in exits[0].attributes["error"]


def test_an_ordered_restart_is_an_episode_with_its_cause(node: Node) -> None:
    node.add("a", "a")
    node.options["closes_episodes"] = True
    node.start()
    pid = node.ready_pid("a")
    node.order("a", "upgrade")
    node.ready_pid("a", after=pid)
    episode = node.replay().episodes[-1]
    assert (episode.cause, episode.fault_clock, episode.outcome) == ("upgrade", "command", "ready")
    (exited,) = node.events("WHERE kind = 'process' AND name = 'exited' AND slot = 'a'")
    assert exited.attributes["signal"] == signal.SIGTERM
    assert exited.id > node.events("WHERE kind = 'episode_open' AND name = 'upgrade'")[0].id


@pytest.mark.parametrize(("cause", "stops"), [("upgrade", True), ("hang", False)], ids=["stopped", "hangs"])
def test_what_cannot_hear_sigterm_is_killed_at_once(node: Node, cause: str, stops: bool) -> None:
    node.add("a", "a", "stubborn", stop_s=1000)
    node.options["closes_episodes"] = True
    node.start()
    pid = node.ready_pid("a")
    if stops:
        os.kill(pid, signal.SIGSTOP)
    node.order("a", cause)
    node.ready_pid("a", after=pid)
    (exited,) = node.events("WHERE kind = 'process' AND name = 'exited' AND slot = 'a'")
    assert exited.attributes["signal"] == signal.SIGKILL
    ordered = node.replay().episodes[-1]
    assert (ordered.cause, ordered.outcome) == (cause, "ready")
    assert {"detect", "spawn"} <= set(ordered.phases_s()), "until it had ended, nothing recovered"


def test_a_stopped_engine_does_not_hold_up_the_end(node: Node) -> None:
    node.add("a", "a", stop_s=1000)
    keeper = node.start()
    os.kill(node.ready_pid("a"), signal.SIGSTOP)
    assert node.stop(keeper)[0] == 0


def test_orders_the_keeper_cannot_follow_are_refused_with_the_reason(node: Node) -> None:
    node.add("a", "a")
    node.start()
    assert "there is no 'b' here, only a" in node.refusal("b", "drill")
    assert "one of crash, hang" in node.refusal("a", "because")
    assert "one of crash, hang" in node.refusal("a", "oom_kill"), "nobody may claim what only the kernel knows"


def test_a_worker_that_outlives_its_engine_is_gone_before_the_next_attempt(node: Node) -> None:
    node.add("a", "a", "worker")
    node.start()
    first = node.report("a")
    node.kill(first["pid"])
    node.report("a", 2)
    assert not alive(first["worker"])


def test_a_daemon_and_a_gate_are_restarted_for_ever(node: Node) -> None:
    node.add("daemon", "d", "crash", role="daemon", limit=1)
    node.add("gate", "g", "crash", role="gate", limit=1)
    node.start()
    node.report("d", 4)
    node.report("g", 4)
    exits = node.events("WHERE kind = 'process' AND name = 'exited'")
    assert {event.attributes["process"] for event in exits} == {"daemon", "gate"}
    assert node.events("WHERE kind = 'episode_open'") == []


def test_what_an_engine_finds_at_its_start(node: Node) -> None:
    node.add("a", "a", env={"MINE": "1"})
    os.environ["READMIT_SLOT"] = "of somebody else"
    try:
        node.start()
        found = node.report("a")
    finally:
        del os.environ["READMIT_SLOT"]
    environment = found["environment"]
    opened = node.events("WHERE kind = 'episode_open'")[0]
    expected = {
        "MINE": "1",
        "READMIT_NODE": "n",
        "READMIT_SLOT": "a",
        "READMIT_EPISODE": opened.episode,
        "READMIT_ATTEMPT": "1",
        "READMIT_JOURNAL": str(node.state_dir / "journal.sqlite3"),
        "READMIT_RUNTIME": str(node.runtime_dir),
        "WEIGHTCACHE_SOCKET": str(node.runtime_dir / "cache.sock"),
    }
    assert {name: environment.get(name) for name in expected} == expected
    assert environment["TRACEPARENT"].startswith(f"00-{opened.episode}-")
    assert found["core"] <= 1, "a core dump would delay the notice of a death"
    assert found["session"] == found["pid"]
    # Python itself ignores SIGPIPE and SIGXFSZ; SIGHUP must end an engine as ever.
    assert "SIGHUP" not in found["ignored"]
    assert [fd for fd in found["open"] if fd < 3] == [0, 1, 2]
    assert "LISTEN_FDS" not in environment
    log = node.state_dir / "output" / f"a-{str(opened.episode)[:8]}-1.log"
    assert log.exists()
    assert Path(f"/proc/{found['pid']}/fd/1").resolve() == log


def test_descriptors_that_the_keeper_inherited_go_no_further(node: Node) -> None:
    node.add("a", "a")
    leaked = os.memfd_create("leak")
    os.set_inheritable(leaked, True)
    node.popen["close_fds"] = False
    node.start()
    folder = f"/proc/{node.ready_pid('a')}/fd"  # which opens and closes nothing any more
    targets = [os.readlink(f"{folder}/{fd}") for fd in os.listdir(folder)]
    assert not any("leak" in target for target in targets)
    os.close(leaked)


def test_the_soft_limit_of_open_files_is_the_one_the_keeper_was_given(node: Node) -> None:
    node.add("a", "a")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    given = len(os.listdir("/proc/self/fd")) + 256
    resource.setrlimit(resource.RLIMIT_NOFILE, (given, hard))
    try:
        node.start()
        pid = node.report("a")["pid"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    limits = Path(f"/proc/{pid}/limits").read_text()
    assert f"Max open files            {given} " in limits
