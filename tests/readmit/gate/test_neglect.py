"""An engine that answers golden questions and leaves its users waiting."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tests.readmit.gate.harness import SCRIPTED, Gate, History, ScriptedEngine, ending, probe_file, until
from tests.readmit.gate.nodes import Node

from weightcache.episodes import Episode

GOLDEN = "The capital of France is"
Engines = dict[str, ScriptedEngine]


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(tmp_path / "journal.sqlite3")


@pytest.fixture
def engines() -> Iterator[Engines]:
    engines = {"a": ScriptedEngine(), "b": ScriptedEngine()}
    with ending(*engines.values()):
        yield engines


@pytest.fixture
def options(history: History, tmp_path: Path) -> list[str]:
    return [
        *("--journal", str(history.path), "--unsupervised", "--probes", str(probe_file(tmp_path / "probes.json"))),
        *("--verify-interval", "0.2", "--drain-notice", "0", "--first-byte-limit", "0.5"),
    ]


def before(engines: Engines, *options: str) -> Gate:
    slots = [word for name, engine in engines.items() for word in ("--slot", f"{name}={engine.url}")]
    return Gate(*slots, *options)


def ask(url: str, *prompts: str) -> list[int]:
    """Ask all of these at once; returns the statuses."""

    def once(prompt: str) -> int:
        return httpx.post(f"{url}/v1/completions", json={"prompt": prompt}, timeout=60).status_code

    with ThreadPoolExecutor(len(prompts)) as clients:
        return list(clients.map(once, prompts))


def test_a_slot_that_leaves_users_waiting_is_out_until_its_engine_is_another_one(
    engines: Engines, options: list[str], history: History
) -> None:
    gate = before(engines, *options)
    with ending(gate):
        gate.until_state("ready", name="a")
        gate.until_state("ready", name="b")
        active = gate.client.get("/api/status").json()["serving"]
        engines[active].tell(only=GOLDEN)
        assert ask(gate.url, "1", "2", "3") == [504] * 3
        gate.until_state("suspect", "hang", name=active)
        assert ask(gate.url, "4") == [200]
        assert gate.metric(f'readmit_gate_revocations_total{{reason="hang",slot="{active}"}}') == 1
        assert "gave 3 different requests in a row no first byte" in gate.slot(active)["message"]
        (opened,) = until(lambda: history.events("episode_open", active), "the journal to say so")
        facts = opened.attributes
        assert (opened.name, facts["fault_clock"], facts["unanswered"]) == ("hang", "first_unanswered", 3)
        assert facts["fault_boottime_ns"] < opened.boottime_ns - 400_000_000, "it dates from the first of them"
        asked = engines[active].tell()["completions"]
        assert ask(gate.url, "5", "6") == [200, 200]
        assert gate.slot(active)["state"] == "suspect"
        assert engines[active].tell()["completions"] == asked, "right answers would not bring it back"
        engines[active].end()
        successor = ScriptedEngine(engines[active].port)
        with ending(successor):
            gate.until_state("ready", name=active)
            assert gate.client.get("/api/status").json()["serving"] != active


def test_a_keeper_restarts_an_engine_that_leaves_users_waiting(tmp_path: Path) -> None:
    golden = probe_file(tmp_path / "probes.json")
    node = Node(tmp_path, golden, tmp_path, "--first-byte-limit", "0.5", slots=("a", "b"), engine=SCRIPTED)
    with ending(node):
        node.until_ready()
        for slot in ("a", "b"):
            node.until_state(slot, "ready")
        until(lambda: not node.replay().open_episodes, "the first starts to be over")
        active = node.status()["serving"]
        pid = node.child(active)["pid"]
        httpx.post(f"{node.slot(active)['url']}/script", json={"only": GOLDEN}, timeout=60)
        assert ask(node.gate_url, "1", "2", "3") == [504] * 3
        until(lambda: node.child(active)["pid"] not in (None, pid), "another process")
        node.until_state(active, "ready")
        assert node.status()["serving"] != active

        def closed() -> list[Episode]:
            return [it for it in node.closed("hang") if it.slot == active]

        (recovery,) = until(closed, "the recovery to be over")
        assert (recovery.outcome, len(recovery.attempts)) == ("ready", 1)
        assert recovery.phases_s()["detect"] > 0.4, "while users waited"


def test_the_last_slot_stays_and_says_what_it_does(engines: Engines, options: list[str]) -> None:
    gate = Gate("--slot", f"a={engines['a'].url}", *options)
    with ending(gate):
        gate.until_ready()
        engines["a"].tell(only=GOLDEN)
        assert ask(gate.url, "1", "2", "3", "4") == [504] * 4
        assert gate.metric('readmit_gate_slot_unanswered_requests{slot="a"}') == 4
        seen = engines["a"].tell()["completions"]
        until(lambda: engines["a"].tell()["completions"] > seen + 2, "more golden questions")
        assert gate.ready
        assert "slot a gave 4 different requests in a row no first byte" in gate.client.get("/readyz?verbose").text


def test_one_request_again_and_again_ejects_nobody(engines: Engines, options: list[str], history: History) -> None:
    gate = before(engines, *options)
    with ending(gate):
        gate.until_state("ready", name="a")
        gate.until_state("ready", name="b")
        active = gate.client.get("/api/status").json()["serving"]
        engines[active].tell(hangs_on="odd")
        assert ask(gate.url, *["odd"] * 5) == [504] * 5
        assert gate.metric(f'readmit_gate_slot_unanswered_requests{{slot="{active}"}}') == 1
        assert ask(gate.url, "even") == [200]
        assert gate.metric(f'readmit_gate_slot_unanswered_requests{{slot="{active}"}}') == 0
        assert gate.slot(active)["state"] == "ready"


def test_when_the_next_slot_does_the_same_the_requests_are_doubted(
    engines: Engines, options: list[str], history: History
) -> None:
    gate = before(engines, *options)
    with ending(gate):
        gate.until_state("ready", name="a")
        gate.until_state("ready", name="b")
        for engine in engines.values():
            engine.tell(only=GOLDEN)
        first = gate.client.get("/api/status").json()["serving"]
        (other,) = {"a", "b"} - {first}
        assert ask(gate.url, "1", "2", "3") == [504] * 3
        gate.until_state("suspect", "hang", name=first)
        engines[first].end()
        with ending(ScriptedEngine(engines[first].port)):
            gate.until_state("ready", name=first)
            assert ask(gate.url, "1", "2", "3") == [504] * 3
            said = gate.client.get("/readyz?verbose").text
            assert "the requests are doubted, not the engines" in said
            seen = engines[other].tell()["completions"]
            until(lambda: engines[other].tell()["completions"] > seen + 2, "more golden questions")
            assert gate.slot(other)["state"] == "ready"


def test_slow_uploads_and_lists_of_models_prove_nothing(engines: Engines, options: list[str]) -> None:
    gate = Gate("--slot", f"a={engines['a'].url}", *options)
    with ending(gate):
        gate.until_ready()

        def slowly(number: int) -> int:
            def content() -> Iterator[bytes]:
                yield b'{"prompt": "%d"' % number
                until(lambda: gate.metric('readmit_gate_requests_total{outcome="client_gone"}') == 3, "the limit")

            return httpx.post(f"{gate.url}/v1/completions", content=content(), timeout=60).status_code

        with ThreadPoolExecutor(3) as clients:
            assert list(clients.map(slowly, range(3))) == [408] * 3
        assert httpx.get(f"{gate.url}/v1/silent", timeout=60).status_code == 504
        assert gate.metric('readmit_gate_slot_unanswered_requests{slot="a"}') == 0
