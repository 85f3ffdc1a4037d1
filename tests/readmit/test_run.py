"""``readmit run``: one engine, kept running without a node."""

import os
import signal
import sys
from collections.abc import Iterator

import pytest
from tests.readmit.gate.harness import SCRIPTED, probe_file
from tests.readmit.nodes import Place, free_port, place, wait_for

UP = "from weightcache.sdnotify import Notifier; Notifier.from_environment().ready('serving')"
LIVES = f"import time; print('hello', flush=True); {UP}; time.sleep(1000)"
FAILS = "import sys; print('loading'); sys.exit('no such weights')"


@pytest.fixture
def here() -> Iterator[Place]:
    with place() as place_:
        yield place_


def test_an_engine_alone_is_up_unverified_when_it_says_so(here: Place) -> None:
    run = here.start("run", "--name", "mine", "--", sys.executable, "-c", LIVES)
    wait_for(lambda: here.children().get("mine", {}).get("ready"), "the engine is up")
    pid = here.children()["mine"]["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: len(here.replay().episodes) == 2 and not here.replay().open_episodes, "it is up again")
    assert [(it.cause, it.outcome, it.verified) for it in here.replay().episodes] == [
        ("first_start", "ready", False),
        ("crash", "ready", False),
    ]
    assert "up, unverified" in here.readmit("status").stdout
    status, shown, said = here.end(run, signal.SIGINT)
    assert status == 0
    assert shown == "hello\nhello\n"
    assert f"mine, pid {pid}, ended killed by SIGKILL" in said
    assert here.left_behind() == []


def test_an_engine_that_fails_is_given_up_with_its_last_words(here: Place) -> None:
    result = here.readmit("run", "--max-restarts", "2", "--backoff", "0,0.05", "--", sys.executable, "-c", FAILS)
    assert result.returncode == 1
    assert sorted(result.stdout.splitlines()) == ["loading"] * 3 + ["no such weights"] * 3
    assert "a is given up: it ended 3 times within 600 s without becoming ready" in result.stderr
    assert result.stderr.rstrip().endswith("no such weights")
    assert here.left_behind() == []
    (episode,) = here.replay().episodes
    assert (episode.outcome, len(episode.attempts)) == ("abandoned", 3)
    assert "loading" in here.readmit("logs", "a").stdout


def test_with_golden_answers_a_gate_verifies_the_engine(here: Place) -> None:
    engine, gate = free_port(), free_port()
    probe_file(here.folder / "probes.json")
    options = ["--url", f"http://127.0.0.1:{engine}", "--probes", "probes.json", "--gate", f"127.0.0.1:{gate}"]
    run = here.start("run", *options, "--", sys.executable, str(SCRIPTED), str(engine))

    here.gate = f"127.0.0.1:{gate}"
    wait_for(here.ready, "the gate lets traffic in")
    wait_for(lambda: not here.replay().open_episodes, "the recovery is closed")
    assert [(it.outcome, it.verified) for it in here.replay().episodes] == [("ready", True)]
    assert here.end(run)[0] == 0
    assert here.left_behind() == []


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--", "no-such-engine"], "the command of a cannot be run: there is no program no-such-engine"),
        (["--", "/no/such/engine"], "there is no program /no/such/engine"),
        (["--name", "Big One", "--", "true"], "the name 'Big One' is not 1 to 32 of"),
        (["--backoff", "1,x", "--", "true"], "backoff_s.1: Input should be a valid number"),
        (["--url", "http://127.0.0.1", "--unverified-ok", "--", "true"], "is not an engine's base URL"),
        (["--url", "http://127.0.0.1:8101", "--", "true"], "so it would never open"),
        (["--url", "http://127.0.0.1:8101", "--probes", "none.json", "--", "true"], "none.json is not there"),
        (["--probes", "none.json", "--", "true"], "--probes needs --url"),
        (["--engine", "vllm", "--", "true"], "--engine goes with --observe"),
        (
            ["--url", "http://127.0.0.1:8101", "--unverified-ok", "--gate", "80", "--", "true"],
            "the gate's address has no port",
        ),
    ],
)
def test_what_cannot_work_is_one_paragraph_and_leaves_nothing(here: Place, words: list[str], problem: str) -> None:
    result = here.readmit("run", *words)
    assert result.returncode == 2
    assert problem in result.stderr
    assert result.stderr.startswith("readmit: ")
    assert result.stderr.count("\n") == 1
    assert here.left_behind() == []
    assert not here.state_dir.exists()


def test_logs_follow_an_engine_over_its_restarts(here: Place) -> None:
    here.start("run", "--", sys.executable, "-c", LIVES)
    wait_for(lambda: here.children().get("a", {}).get("ready"), "the engine is up")
    follower = here.start("logs", "a", "--follow")
    assert follower.stdout is not None
    assert follower.stdout.readline() == "hello\n"
    os.kill(here.children()["a"]["pid"], signal.SIGKILL)
    assert follower.stdout.readline() == "hello\n"
    assert here.end(follower, signal.SIGINT)[0] == 0


def test_logs_of_nobody_name_who_there_is(here: Place) -> None:
    here.start("run", "--", sys.executable, "-c", LIVES)
    wait_for(lambda: here.children().get("a", {}).get("ready"), "the engine is up")
    refused = here.readmit("logs", "b")
    assert refused.returncode == 2
    assert "expected one of a, found b" in refused.stderr
