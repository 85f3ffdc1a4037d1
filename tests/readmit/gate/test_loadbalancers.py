"""Real load balancers before real gates before real engines, with the configurations that we ship."""

import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.fixtures import http
from tests.readmit.gate.balancers import PROGRAMS, Balancer
from tests.readmit.gate.harness import Gate, ReferenceEngine, ending, free_port, probe_file, until

RIGHT = " Paris."
ASK = {"prompt": "The capital of France is", "max_tokens": 2, "temperature": 0}
LONG = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0, "stream": True}


class Stage:
    """Two gates, each before an engine of its own, and a third whose golden answers its engine does not give."""

    def __init__(self, model: Path, golden: Path, wrong: Path) -> None:
        self._model = model
        self._golden = golden
        self._ports = {name: free_port() for name in ("a", "b", "liar")}
        self.engines = {name: ReferenceEngine(model) for name in "ab"}
        self.gates = {name: self._gate(name, golden) for name in "ab"}
        self.gates["liar"] = self._gate("liar", wrong)

    def _gate(self, name: str, probes: Path) -> Gate:
        engine = self.engines["b" if name == "liar" else name]
        journal = probes.with_name(f"{name}.sqlite3")
        return Gate(
            *("--slot", f"a={engine.url}", "--unsupervised", "--journal", str(journal), "--probes", str(probes)),
            *("--listen", f"127.0.0.1:{self._ports[name]}", "--verify-interval", "2", "--drain-notice", "2"),
        )

    @property
    def addresses(self) -> list[str]:
        return [f"127.0.0.1:{port}" for port in self._ports.values()]

    def answered(self, name: str) -> float:
        return self.gates[name].metric('readmit_gate_requests_total{outcome="answered"}')

    def restart_engine(self, name: str) -> None:
        self.engines[name].end()
        self.engines[name] = ReferenceEngine(self._model, self.engines[name].port)

    def restart_gate(self, name: str) -> None:
        self.gates[name].end()
        self.gates[name] = self._gate(name, self._golden)

    def until_ready(self) -> None:
        for name in "ab":
            self.gates[name].until_ready()

    def end(self) -> None:
        for child in (*self.gates.values(), *self.engines.values()):
            child.end()


class Requests:
    """Asks on and on in a thread; ``outcomes`` counts right answers, statuses of refusals, and broken connections."""

    def __init__(self, url: str) -> None:
        self.outcomes: Counter[str] = Counter()
        self._url = url
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Requests":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join(120)

    def _run(self) -> None:
        with httpx.Client(timeout=60) as client:
            while not self._done.wait(0.1):
                self.outcomes[ask(client, self._url)] += 1


class Stream:
    """One long answer, read in a thread. ``whole`` once it has ended as it should."""

    def __init__(self, url: str) -> None:
        self.text = ""
        self.broken = False
        self._url = url
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        until(lambda: "data: " in self.text, "the first token")

    @property
    def whole(self) -> bool:
        return not self.broken and self.text.endswith("data: [DONE]\n\n")

    def wait(self) -> "Stream":
        self._thread.join(120)
        assert not self._thread.is_alive()
        return self

    def _run(self) -> None:
        try:
            with httpx.stream("POST", f"{self._url}/v1/completions", json=LONG, timeout=60) as response:
                for text in response.iter_text():
                    self.text += text
        except httpx.RemoteProtocolError:
            self.broken = True


def ask(client: httpx.Client, url: str) -> str:
    try:
        answer = client.post(f"{url}/v1/completions", json=ASK)
    except httpx.TransportError:
        return "broken"
    if answer.status_code != 200:
        return str(answer.status_code)
    return "right" if answer.json()["choices"][0]["text"] == RIGHT else "wrong"


@pytest.fixture(scope="module")
def stage(model: Path, golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("balancers")
    ours = folder / "golden.json"
    ours.write_bytes(golden.read_bytes())
    wrong = probe_file(folder / "wrong.json", " London.", model=model.name, max_tokens=2)
    stage = Stage(model, ours, wrong)
    try:
        stage.until_ready()
        yield stage
    finally:
        stage.end()


@pytest.fixture(scope="module", params=list(PROGRAMS))
def balancer(
    request: pytest.FixtureRequest, stage: Stage, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Balancer]:
    stage.until_ready()
    balancer = Balancer(request.param, stage.addresses, tmp_path_factory.mktemp(request.param))
    with ending(balancer):
        until_served(balancer)
        yield balancer


def until_served(balancer: Balancer) -> None:
    with httpx.Client(timeout=60) as client:
        until(lambda: ask(client, balancer.url) == "right", f"an answer; {balancer.output}")


def streams_on_both(stage: Stage, balancer: Balancer) -> list[Stream]:
    """Streams through the balancer, so many that each of the two gates carries one."""
    streams: list[Stream] = []
    while not all(stage.gates[name].slot()["in_flight"] for name in "ab"):
        assert len(streams) < 6, "all streams go to one gate"
        streams.append(Stream(balancer.url))
    return streams


def test_only_verified_engines_answer(stage: Stage, balancer: Balancer) -> None:
    before = {name: stage.answered(name) for name in stage.gates}
    with httpx.Client(timeout=60) as client:

        def both_asked() -> bool:
            assert ask(client, balancer.url) == "right"
            return all(stage.answered(name) > before[name] for name in "ab")

        until(both_asked, f"both gates to be asked; {balancer.output}")  # each is found healthy in its own time
    assert stage.answered("liar") == 0


def test_the_death_of_an_engine_moves_the_traffic_and_truncates_nothing(stage: Stage, balancer: Balancer) -> None:
    streams = streams_on_both(stage, balancer)
    with Requests(balancer.url) as requests:
        stage.engines["a"].end()
        stage.restart_engine("a")
        until(lambda: not stage.gates["a"].ready, "the gate to see it")
        for stream in streams:
            stream.wait()
        assert any(stream.broken for stream in streams)
        for stream in streams:
            assert stream.whole or (stream.broken and '"code": "engine_died"' in stream.text)
        before, answers = stage.answered("a"), requests.outcomes["right"]
        until(lambda: requests.outcomes["right"] > answers + 5, "answers meanwhile")
        until(lambda: stage.answered("a") > before, f"the recovered engine to be asked; {balancer.output}")
    # What was under way to the dying engine is told so; nobody else notices.
    assert set(requests.outcomes) <= {"right", "502"}, balancer.output
    assert requests.outcomes["502"] <= 1
    assert stage.answered("liar") == 0


def test_a_gate_that_leaves_in_order_costs_no_request(stage: Stage, balancer: Balancer) -> None:
    streams = streams_on_both(stage, balancer)
    with Requests(balancer.url) as requests:
        stage.gates["b"].process.terminate()
        assert [stream.wait().whole for stream in streams] == [True] * len(streams)
        assert stage.gates["b"].process.wait(60) == 0
        answers = requests.outcomes["right"]
        until(lambda: requests.outcomes["right"] > answers + 5, "answers of the other gate")
        stage.restart_gate("b")
        stage.gates["b"].until_ready()
        until(lambda: stage.answered("b") > 0, f"the gate to be asked again; {balancer.output}")
    assert set(requests.outcomes) == {"right"}, balancer.output


def test_a_killed_gate_moves_the_traffic_and_truncates_nothing(stage: Stage, balancer: Balancer) -> None:
    streams = streams_on_both(stage, balancer)
    with Requests(balancer.url) as requests:
        stage.gates["a"].process.send_signal(signal.SIGKILL)
        for stream in streams:
            assert stream.wait().whole or stream.broken
        assert any(stream.broken for stream in streams)
        answers = requests.outcomes["right"]
        until(lambda: requests.outcomes["right"] > answers + 5, "answers of the other gate")
    assert "wrong" not in requests.outcomes
    assert sum(requests.outcomes.values()) - requests.outcomes["right"] <= 1, (requests.outcomes, balancer.output)


def test_with_no_gate_left_clients_are_told_when_to_come_back(stage: Stage, balancer: Balancer) -> None:
    for name in "ab":
        stage.gates[name].end()

    def refused() -> httpx.Response | None:
        answer = http.post(f"{balancer.url}/v1/completions", json=ASK, timeout=60)
        return answer if answer.status_code == 503 else None

    try:
        answer = until(refused, "a refusal")
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.headers["content-type"].startswith("application/problem+json")
        # The gate that is there and not ready says why, where the balancer asks it.
        assert answer.json()["error"]["code"] in ("not_ready", "no_gate")
        assert stage.answered("liar") == 0
    finally:
        for name in "ab":
            stage.restart_gate(name)


@pytest.mark.parametrize("kind", PROGRAMS)
def test_without_any_gate_the_balancer_says_so_itself(kind: str, tmp_path: Path) -> None:
    nowhere = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    balancer = Balancer(kind, nowhere, tmp_path)

    def refused() -> httpx.Response | None:
        try:
            answer = http.post(f"{balancer.url}/v1/completions", json=ASK, timeout=60)
        except httpx.ConnectError:
            return None
        return answer if "retry-after" in answer.headers else None

    with ending(balancer):
        answer = until(refused, f"a refusal; {balancer.output}")
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "no_gate"
