"""The way through the gate: what reaches the engine, what comes back, and what happens when either side goes."""

import asyncio
import http.client
import json
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Message
from tests.readmit.gate.harness import Gate, ScriptedEngine, ending, free_port, probe_file, sse, until

from readmit.gate.app import create_app
from readmit.gate.settings import GateSettings, SlotSettings

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture(scope="module")
def probes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return probe_file(tmp_path_factory.mktemp("probes") / "probes.json")


@pytest.fixture(scope="module")
def options(probes: Path) -> list[str]:
    journal = probes.with_name("journal.sqlite3")
    return ["--probes", str(probes), "--journal", str(journal), "--unsupervised", "--drain-notice", "0"]


@pytest.fixture(scope="module")
def gate(engine: ScriptedEngine, options: list[str]) -> Iterator[Gate]:
    gate = Gate("--slot", f"a={engine.url}", *options)
    with ending(gate):
        gate.until_ready()
        yield gate


@pytest.fixture
def mortal(options: list[str]) -> Iterator[tuple[Gate, ScriptedEngine]]:
    """A gate and an engine of the test's own, which may die."""
    engine = ScriptedEngine()
    gate = Gate("--slot", f"a={engine.url}", *options)
    with ending(gate, engine):
        gate.until_ready()
        yield gate, engine


def names_of(headers: list[list[str]]) -> set[str]:
    return {name.lower() for name, _ in headers}


def test_a_request_arrives_as_it_was_sent(gate: Gate) -> None:
    headers = {b"Authorization": "Bearer sécret".encode(), b"X-Custom": b"1"}
    answer = gate.client.request("PATCH", "/v1/echo?b=2&a=%2F%20&b=3", content=b"\x00\xffbody", headers=headers)
    facts = answer.json()
    assert answer.status_code == 201
    assert (facts["method"], facts["target"]) == ("PATCH", "/v1/echo?b=2&a=%2F%20&b=3")
    assert facts["body"] == "\x00\xffbody"
    sent = {name.lower(): value for name, value in facts["headers"]}
    assert sent["authorization"].encode("latin-1") == headers[b"Authorization"]
    assert sent["x-custom"] == "1"
    assert sent["content-length"] == "6"


def test_a_path_stays_encoded(gate: Gate) -> None:
    port = int(gate.url.rpartition(":")[2])
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/v1/files/a%2Fb%20c?x=%zz")
    assert connection.getresponse().status == 404
    connection.close()
    requests = httpx.post(f"{gate.slot()['url']}/script", json={}).json()["requests"]
    assert "/v1/files/a%2Fb%20c?x=%zz" in [request["target"] for request in requests]


def test_headers_of_one_connection_stay_on_it(gate: Gate) -> None:
    headers = {"Connection": "keep-alive, x-mine", "X-Mine": "1", "TE": "trailers", "Accept-Encoding": "gzip, br"}
    answer = gate.client.get("/v1/echo", headers=headers)
    sent = names_of(answer.json()["headers"])
    assert not sent & {"x-mine", "te", "keep-alive", "accept-encoding", "user-agent-of-gate"}
    assert answer.headers["x-engine"] == "yes"
    assert "x-secret" not in answer.headers
    assert answer.headers.get_list("set-cookie") == ["a=1", "b=2"]


def test_the_gate_adds_no_headers_of_its_client(gate: Gate) -> None:
    port = int(gate.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"GET /v1/echo HTTP/1.1\r\nHost: gate\r\nConnection: close\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    facts = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert names_of(facts["headers"]) == {"host", "traceparent"}


@pytest.mark.parametrize(
    "sent", [f"00-{TRACE}-00f067aa0ba902b7-01", None, "00-zz-1", f"00-{'0' * 32}-00f067aa0ba902b7-01"]
)
def test_a_trace_goes_on_through_the_gate(gate: Gate, sent: str | None) -> None:
    answer = gate.client.get("/v1/echo", headers={"traceparent": sent} if sent else {})
    (arrived,) = [value for name, value in answer.json()["headers"] if name == "traceparent"]
    match = re.fullmatch(r"00-([0-9a-f]{32})-([0-9a-f]{16})-01", arrived)
    assert match
    valid = sent is not None and TRACE in sent
    assert (match[1] == TRACE) == valid
    assert match[2] != "00f067aa0ba902b7"
    assert answer.headers["traceresponse"] == arrived


@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_body_passes_whole(gate: Gate, chunked: bool) -> None:
    pieces = [bytes([number]) * 100_000 for number in range(50)]
    content: Any = iter(pieces) if chunked else b"".join(pieces)
    assert gate.client.post("/v1/echo", content=content).json()["bytes"] == 5_000_000


def test_a_stream_arrives_as_it_is_written(gate: Gate) -> None:
    arrivals = []
    with gate.client.stream("GET", "/v1/stream") as response:
        for text in response.iter_text():
            arrivals.append((time.monotonic(), text))
    assert sse("".join(text for _, text in arrivals)) == [{"n": 0}, {"n": 1}, {"n": 2}, {"n": 3}, {"n": 4}, "[DONE]"]
    assert len(arrivals) >= 5


def test_a_client_that_goes_while_it_waits_is_noticed_by_the_engine(gate: Gate, engine: ScriptedEngine) -> None:
    before = engine.tell()["disconnects"]
    with pytest.raises(httpx.ReadTimeout):
        gate.client.get("/v1/silent", timeout=0.5)
    until(lambda: engine.tell()["disconnects"] == before + 1, "the engine to notice")
    until(lambda: gate.slot()["in_flight"] == 0, "the gate to forget the request")
    assert gate.ready


def test_a_client_that_goes_in_mid_stream_is_noticed_by_the_engine(gate: Gate, engine: ScriptedEngine) -> None:
    before = engine.tell()["disconnects"]
    with gate.client.stream("GET", "/v1/endless") as response:
        next(response.iter_raw())
    until(lambda: engine.tell()["disconnects"] == before + 1, "the engine to notice")


def test_a_slow_client_slows_the_engine_down(gate: Gate, engine: ScriptedEngine) -> None:
    port = int(gate.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"GET /v1/endless HTTP/1.1\r\nHost: gate\r\n\r\n")

        def stands_still() -> bool:
            before = engine.tell()["sent"]
            time.sleep(0.5)
            return bool(before) and before == engine.tell()["sent"]

        until(stands_still, "the engine to wait for its reader")
        stood = engine.tell()["sent"]
        taken = 0
        while taken < stood:
            taken += len(connection.recv(1 << 20))
        until(lambda: engine.tell()["sent"] > stood, "the engine to go on")


def test_an_engine_that_dies_before_it_answers_gives_502(mortal: tuple[Gate, ScriptedEngine]) -> None:
    gate, _ = mortal
    answer = gate.client.post("/v1/dies-before", content=b"x")
    assert answer.status_code == 502
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["type"] == "urn:readmit:problem:engine-died"
    until(lambda: gate.metric('readmit_gate_requests_total{outcome="engine_died"}') == 1, "it to be counted")
    gate.until_state("suspect", "engine_exited")


async def test_what_is_under_way_to_an_engine_that_hangs_ends_when_it_is_ejected(probes: Path) -> None:
    engine = ScriptedEngine()
    slot = SlotSettings("a", engine.url, supervised=False)
    limits = {"verify_interval_s": 0.1, "hang_limit_s": 0.5, "busy_hang_limit_s": 0.5, "drain_notice_s": 0.0}
    app = create_app(GateSettings((slot,), probes=probes, **limits))
    with ending(engine):
        async with app.router.lifespan_context(app), asyncio.timeout(60):
            gate = app.state.gate
            while not gate.ready:  # noqa: ASYNC110 - brought about by another process
                await asyncio.sleep(0.02)
            before: list[Message] = []
            within: list[Message] = []
            asked = [sent_by(app, "/v1/silent", before), sent_by(app, "/v1/stalls", within)]
            answers = asyncio.gather(*asked)
            while gate.in_flight < 2 or len(within) < 2:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.02)
            engine.process.send_signal(signal.SIGSTOP)
            await answers
    assert before[0]["status"] == 502
    assert json.loads(before[1]["body"])["error"]["code"] == "engine_ejected"
    assert within[0]["status"] == 200
    assert b'"code": "engine_ejected"' in within[-1]["body"]
    assert within[-1]["more_body"], "it ended as if it were whole"


async def sent_by(app: ASGIApp, path: str, sent: list[Message]) -> None:
    """Take down what an application sends to a client that waits."""
    scope = {
        "type": "http",
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [],
    }

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    await app(scope, receive, send)


def test_an_engine_that_breaks_one_connection_stays(gate: Gate) -> None:
    assert gate.client.post("/v1/breaks-before", content=b"x").status_code == 502
    assert gate.ready


def test_an_engine_that_dies_in_mid_stream_leaves_no_whole_answer(mortal: tuple[Gate, ScriptedEngine]) -> None:
    gate, _ = mortal
    pieces: list[str] = []
    with gate.client.stream("GET", "/v1/dies-within") as response, pytest.raises(httpx.RemoteProtocolError):
        pieces.extend(response.iter_text())
    text = "".join(pieces)
    assert text.startswith('data: {"n": 0}\n\ndata: {"n"\n\nevent: error\ndata: ')
    error = json.loads(text.rpartition("data: ")[2])["error"]
    assert (error["type"], error["code"]) == ("server_error", "engine_died")
    until(lambda: gate.metric('readmit_gate_requests_total{outcome="cut_off"}') == 1, "it to be counted")


def test_an_engine_whose_death_takes_long_is_not_waited_for(mortal: tuple[Gate, ScriptedEngine]) -> None:
    gate, engine = mortal
    answer = gate.client.post("/v1/dies-slowly", content=b"x")
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_died")
    assert gate.client.post("/v1/echo", content=b"x").status_code == 503
    assert gate.slot()["reason"] == "engine_exited"
    assert engine.process.poll() is None, "all its connections are open"


def test_what_an_engine_had_sent_before_it_began_to_die_arrives(mortal: tuple[Gate, ScriptedEngine]) -> None:
    gate, engine = mortal
    pieces: list[str] = []
    with gate.client.stream("GET", "/v1/dies-slowly-within") as response, pytest.raises(httpx.RemoteProtocolError):
        pieces.extend(response.iter_text())
    assert sse("".join(pieces))[0] == {"n": 0}
    assert "engine_died" in "".join(pieces)
    assert engine.process.poll() is None, "all its connections are open"


def test_a_document_that_breaks_off_is_not_passed_for_whole(gate: Gate) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        gate.client.get("/v1/breaks-json")


def test_an_early_answer_to_an_upload_comes_through(gate: Gate) -> None:
    assert gate.client.post("/v1/upload-refused", content=b"x" * 50_000_000).status_code == 413


def test_a_refused_connection_moves_the_request_to_the_next_slot(options: list[str]) -> None:
    first, second = ScriptedEngine(), ScriptedEngine()
    gate = Gate("--slot", f"a={first.url}", "--slot", f"b={second.url}", *options)
    with ending(gate, first, second):
        gate.until_state("ready", name="a")
        gate.until_state("ready", name="b")
        active = gate.client.get("/api/status").json()["serving"]
        if active == "b":
            first, second = second, first
        assert [gate.client.post("/v1/echo", content=b"1").status_code for _ in range(3)] == [201] * 3
        assert not [it for it in second.tell()["requests"] if it["target"] == "/v1/echo"]
        first.tell(listening=False)
        assert gate.client.post("/v1/echo", content=b"body").json()["body"] == "body"
        assert len([it for it in second.tell()["requests"] if it["target"] == "/v1/echo"]) == 1
        assert gate.slot(active)["state"] != "ready"
        assert gate.ready


def test_a_dead_engine_hands_over_to_the_next_slot(options: list[str]) -> None:
    first, second = ScriptedEngine(), ScriptedEngine()
    gate = Gate("--slot", f"a={first.url}", "--slot", f"b={second.url}", *options)
    with ending(gate, first, second):
        gate.until_state("ready", name="a")
        gate.until_state("ready", name="b")
        active = gate.client.get("/api/status").json()["serving"]
        (first if active == "a" else second).end()
        for _ in range(20):
            assert gate.client.get("/v1/echo").status_code == 201
            assert gate.ready
        gate.until_state("suspect", "engine_exited", name=active)


@pytest.mark.parametrize("safe", [True, False])
def test_only_what_is_marked_safe_is_asked_again_of_the_next_slot(options: list[str], safe: bool) -> None:
    engines = {"a": ScriptedEngine(), "b": ScriptedEngine()}
    slots = [option for name, engine in engines.items() for option in ("--slot", f"{name}={engine.url}")]
    gate = Gate(*slots, *options, "--verify-interval", "3600")
    with ending(gate, *engines.values()), ThreadPoolExecutor(1) as client:
        gate.until_state("ready", name="a")
        gate.until_state("ready", name="b")
        active = gate.client.get("/api/status").json()["serving"]
        dying = engines.pop(active)
        dying.tell(delay_s=3600)
        headers = {"Idempotency-Key": "1"} if safe else {}
        question = {"headers": headers, "content": b"x" * 1000, "timeout": 60}
        running = client.submit(lambda: httpx.post(f"{gate.url}/v1/completions", **question))  # type: ignore[arg-type]
        until(lambda: dying.tell()["completions"] == 2, "the engine to have it")
        dying.end()
        answer = running.result(60)
        assert answer.status_code == (200 if safe else 502)
        (other,) = engines.values()
        assert [it["bytes"] for it in other.tell()["requests"]].count(1000) == (1 if safe else 0)


def test_a_request_may_wait_for_a_slot_but_not_too_many(options: list[str]) -> None:
    port = free_port()
    gate = Gate("--slot", f"a=http://127.0.0.1:{port}", *options, "--max-wait", "60", "--max-queue", "1")
    with ending(gate), ThreadPoolExecutor(2) as clients:
        gate.until_state("starting")
        both = [clients.submit(httpx.post, f"{gate.url}/v1/echo", content=b"body", timeout=60) for _ in range(2)]
        (refused,) = until(lambda: [request for request in both if request.done()], "one to be refused")
        assert refused.result().status_code == 503
        engine = ScriptedEngine(port)
        with ending(engine):
            both.remove(refused)
            answer = both[0].result(60)
            assert (answer.status_code, answer.json()["body"]) == (201, "body")


@pytest.mark.parametrize("body", [b"", b"body", bytes(300_000)], ids=["none", "short", "in pieces"])
def test_who_goes_while_it_waits_for_a_slot_makes_room_for_another(options: list[str], body: bytes) -> None:
    port = free_port()
    gate = Gate("--slot", f"a=http://127.0.0.1:{port}", *options, "--max-wait", "600", "--max-queue", "1")
    with ending(gate), ThreadPoolExecutor(1) as clients:
        gate.until_state("starting")
        head = b"POST /v1/echo HTTP/1.1\r\nHost: gate\r\nContent-Length: %d\r\n\r\n" % len(body)
        with socket.create_connection(("127.0.0.1", int(gate.url.rpartition(":")[2]))) as leaving:
            leaving.sendall(head + body)
            assert httpx.post(f"{gate.url}/v1/echo", timeout=60).status_code == 503, "the room is full"
        until(lambda: gate.metric('readmit_gate_requests_total{outcome="client_gone"}') == 1, "it to be noticed")
        waiting = clients.submit(httpx.post, f"{gate.url}/v1/echo", content=body, timeout=60)
        engine = ScriptedEngine(port)
        with ending(engine):
            assert waiting.result(60).status_code == 201


def test_who_waits_for_a_slot_is_told_when_the_gate_leaves(options: list[str]) -> None:
    gate = Gate("--slot", f"a=http://127.0.0.1:{free_port()}", *options, "--max-wait", "600")
    with ending(gate), ThreadPoolExecutor(1) as clients:
        gate.until_state("starting")
        waiting = clients.submit(httpx.post, f"{gate.url}/v1/echo", content=b"body", timeout=60)
        time.sleep(0.3)
        assert not waiting.done()
        gate.process.terminate()
        refused = waiting.result(60)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert refused.headers["retry-after"] == "1"


def test_a_request_does_not_wait_longer_than_it_may(options: list[str]) -> None:
    gate = Gate("--slot", f"a=http://127.0.0.1:{free_port()}", *options, "--max-wait", "0.2")
    with ending(gate):
        assert gate.client.post("/v1/echo", content=b"body").json()["error"]["code"] == "not_ready"


def test_more_requests_than_allowed_are_told_to_come_again(options: list[str]) -> None:
    engine = ScriptedEngine()
    gate = Gate("--slot", f"a={engine.url}", "--max-in-flight", "2", *options)
    with ending(gate, engine), ThreadPoolExecutor(2) as clients:
        gate.until_ready()
        held = [clients.submit(httpx.get, f"{gate.url}/v1/stalls", timeout=60) for _ in range(2)]
        until(lambda: gate.slot()["in_flight"] == 2, "two requests to be under way")
        refused = gate.client.get("/v1/echo")
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert gate.ready
        engine.end()
        assert all(isinstance(request.exception(60), httpx.RemoteProtocolError) for request in held)


def test_what_is_not_below_v1_is_not_passed_on(gate: Gate, engine: ScriptedEngine) -> None:
    before = len(engine.tell()["requests"])
    assert gate.client.post("/script", json={"answer": "no"}).status_code == 404
    assert gate.client.get("/v2/models").status_code == 404
    paths = [it["target"] for it in engine.tell()["requests"][before:]]
    assert not [path for path in paths if path != "/v1/completions"]


def test_draining_lets_a_running_stream_finish_and_refuses_others(mortal: tuple[Gate, ScriptedEngine]) -> None:
    gate, _ = mortal
    texts: list[str] = []
    running = threading.Thread(target=lambda: texts.append(httpx.get(f"{gate.url}/v1/stream", timeout=60).text))
    running.start()
    until(lambda: gate.slot()["in_flight"] == 1, "the stream to begin")
    gate.process.terminate()
    refused = until(lambda: answer if (answer := gate.client.get("/v1/echo")).status_code == 503 else None, "a refusal")
    assert refused.json()["type"] == "urn:readmit:problem:draining"
    assert refused.headers["connection"] == "close"
    assert refused.headers["retry-after"] == "1"
    running.join(60)
    assert sse(texts[0])[-1] == "[DONE]"
    assert gate.process.wait(60) == 0


def test_a_port_without_an_engine_is_refused_without_waiting(options: list[str]) -> None:
    gate = Gate("--slot", f"a=http://127.0.0.1:{free_port()}", *options)
    with ending(gate):
        answer = gate.client.post("/v1/completions", json={})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "not_ready"
