"""What a stranger can reach, learn, smuggle or order at the gate."""

import json
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.readmit.gate.harness import Child, Gate, ScriptedEngine, ending, forked_gate, probe_file, run_gate, until

from readmit.commands.drill import Asked, traffic
from readmit.gate.guard import is_plain
from readmit.gate.operator import SOCKET, order
from weightcache.errors import ConfigError

TOKEN = "a token of more than sixteen bytes"
BODY_MAX = 100_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("secure")
    probe_file(folder / "probes.json")
    (folder / "token").write_text(f"{TOKEN}\n")
    return folder


@pytest.fixture(scope="module")
def options(engine: ScriptedEngine, folder: Path) -> list[str]:
    return [
        *("--slot", f"a={engine.url}", "--unsupervised", "--journal", str(folder / "journal.sqlite3")),
        *("--probes", str(folder / "probes.json"), "--drain-notice", "0"),
        *("--runtime-dir", str(folder), "--max-body-bytes", str(BODY_MAX)),
    ]


@pytest.fixture(scope="module")
def gate(options: list[str], folder: Path) -> Iterator[Gate]:
    gate = Gate(*options, "--token-file", str(folder / "token"))
    with ending(gate):
        gate.client.headers["Authorization"] = f"Bearer {TOKEN}"
        gate.until_ready()
        yield gate


def stranger(gate: Gate) -> httpx.Client:
    return httpx.Client(base_url=gate.url, timeout=60)


def told(gate: Gate, request: bytes) -> bytes:
    """What the gate answers to bytes on a connection, until it closes it."""
    host, _, port = gate.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def targets(engine: ScriptedEngine) -> list[str]:
    return [request["target"] for request in engine.tell()["requests"] if request["target"] != "/v1/completions"]


@pytest.mark.parametrize("path", ["/", "/api/status", "/api", "/api/override", "//", "/api/"])
def test_page_and_api_ask_for_the_token_where_there_is_one(gate: Gate, path: str) -> None:
    with stranger(gate) as client:
        for headers in ({}, {"Authorization": "Bearer no"}, {"Authorization": "Basic !"}, {"Authorization": TOKEN}):
            answer = client.get(path, headers=headers)
            if answer.status_code != 404:
                assert answer.status_code == 401
                assert answer.headers["www-authenticate"].startswith("Basic")
        assert "scripted" not in answer.text


def test_a_token_opens_page_and_api_also_as_a_browsers_password(gate: Gate) -> None:
    assert gate.client.get("/").status_code == 200
    with stranger(gate) as client:
        assert client.get("/api/status", auth=("anybody", TOKEN)).status_code == 200


def test_what_balancers_and_clients_need_takes_no_token(gate: Gate) -> None:
    with stranger(gate) as client:
        for path in ("/livez", "/readyz", "/startupz", "/metrics"):
            assert client.get(path).status_code == 200
        assert client.get("/v1/echo").status_code == 201


def test_a_stranger_learns_no_golden_answer_from_a_refusal(
    engine: ScriptedEngine, options: list[str], folder: Path, tmp_path: Path
) -> None:
    secret = probe_file(folder / "secret.json", " Atlantis")
    shut = [*options, "--probes", str(secret), "--runtime-dir", str(tmp_path)]
    gate, loud = Gate(*shut, "--token-file", str(folder / "token")), Gate(*shut, "--explain-refusals")
    with ending(gate, loud):
        gate.client.headers["Authorization"] = f"Bearer {TOKEN}"
        for each in (gate, loud):
            each.until_state("suspect", "wrong_answer")
        with stranger(gate) as client:
            for path in ("/v1/completions", "/readyz", "/readyz?verbose", "/startupz"):
                answer = client.get(path)
                assert answer.status_code == 503
                assert "Atlantis" not in answer.text
                assert str(folder) not in answer.text
        problem = gate.client.get("/v1/completions").json()
        assert {"phase", "reason", "elapsed_s", "expected_s", "trace_id", "error"} <= set(problem)
        assert "Atlantis" in gate.client.get("/readyz?verbose").text, "who has the token may know"
        assert "Atlantis" in loud.client.get("/v1/completions").json()["detail"], "so the operator chose"


@pytest.mark.parametrize(
    "path",
    [
        "/v1/../script",
        "/v1/%2e%2e/script",
        "/v1/%2E%2e/script",
        "/v1/..%2fscript",
        "/v1/%252e%252e/script",
        "/v1/..;/script",
        "/v1/a/./../../script",
        "/v1/..\\script",
        "/v1/%5c..%5cscript",
        "/v1/echo%00",
        "/v1/echo%0d%0aX-Smuggled:%201",
        "/v1/.",
        "/./v1/echo",
        "/v1%2fecho",
        "/%761/echo",
    ],
)
def test_a_path_that_means_another_is_not_passed_on(gate: Gate, engine: ScriptedEngine, path: str) -> None:
    before = targets(engine)
    answer = told(gate, f"GET {path} HTTP/1.1\r\nHost: gate\r\nConnection: close\r\n\r\n".encode())
    assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 404"))
    assert targets(engine) == before


@pytest.mark.parametrize(
    "path", ["/v1/echo", "/v1/files/a%2Fb", "/v1/a..b", "/v1/...", "/v1/%E2%82%AC", "/v1/a%20b", "/"]
)
def test_an_odd_but_honest_path_is_plain(path: str) -> None:
    assert is_plain(path.encode())


@pytest.mark.parametrize(
    "request_",
    [
        # Two lengths, and a length beside chunks: the request after the body would be somebody else's.
        b"POST /v1/echo HTTP/1.1\r\nHost: gate\r\nContent-Length: 5\r\nContent-Length: 50\r\n\r\nabcde",
        b"POST /v1/echo HTTP/1.1\r\nHost: gate\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"5\r\nabcde\r\n0\r\n\r\n",
        b"POST /v1/echo HTTP/1.1\r\nHost: gate\r\nContent-Length: 5, 50\r\n\r\nabcde",
        b"POST /v1/echo HTTP/1.1\r\nHost: gate\r\nContent-Length: +5\r\n\r\nabcde",
        b"POST /v1/echo HTTP/1.1\r\nHost: gate\r\nContent-Length: 0x5\r\n\r\nabcde",
        b"POST /v1/echo HTTP/1.1\r\nHost: gate\r\nTransfer-Encoding: xchunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n",
        b"POST /v1/echo HTTP/1.1\r\nHost: gate\r\nTransfer-Encoding: identity\r\nContent-Length: 5\r\n\r\nabcde",
        b"POST /v1/echo HTTP/1.1\r\nHost: gate\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/echo HTTP/1.1\r\nHost: gate\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nabcde\r\n0\r\n\r\n",
        # Headers and targets with more in them than one line.
        b"GET /v1/echo HTTP/1.1\r\nHost: gate\r\nX-A: 1\rX-B: 2\r\n\r\n",
        b"GET /v1/echo HTTP/1.1\r\nHost: gate\r\nX-A: 1\x00\r\n\r\n",
        b"GET /v1/ec ho HTTP/1.1\r\nHost: gate\r\n\r\n",
        b"GET http://elsewhere/v1/echo HTTP/1.1\r\nHost: gate\r\nConnection: close\r\n\r\n",
        b"GET http://gate/v1/echo HTTP/1.1\r\nHost: gate\r\nConnection: close\r\n\r\n",
        b"CONNECT /v1/echo HTTP/1.1\r\nHost: gate\r\nConnection: close\r\n\r\n",
        b"GET /v1/echo HTTP/1.1\r\n\r\n",
        b"GET /v1/echo HTTP/1.1\r\nHost: gate\r\nHost: other\r\n\r\n",
        # What one server takes for the end of a line, or of a body, and another does not.
        b"GET /v1/echo HTTP/1.1\nHost: gate\nConnection: close\n\n",
        b"POST /v1/echo HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n",
        b"POST /v1/echo HTTP/1.1\r\nHost: gate\r\nTransfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/echo HTTP/1.1\r\nHost: gate\r\nTransfer-Encoding: chunked\r\n\r\n5;a\nb\r\nabcde\r\n0\r\n\r\n",
        b"POST /v1/echo HTTP/1.1\r\nHost: gate\r\nContent-Length: 5\r\nTransfer-Encoding:\r\n\r\nabcde",
        b"GET /v1/echo HTTP/1.1\r\nHost: gate\r\nX-A: 1\r\n X-B: 2\r\n\r\n",
    ],
)
def test_a_request_that_can_be_read_two_ways_is_refused(gate: Gate, engine: ScriptedEngine, request_: bytes) -> None:
    before = targets(engine)
    answer = told(gate, request_)
    assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 404")), answer
    assert targets(engine) == before


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_has_a_limit(gate: Gate, engine: ScriptedEngine, chunked: bool) -> None:
    def content(size: int) -> object:
        return iter([b"x" * 1000] * (size // 1000)) if chunked else b"x" * size

    assert gate.client.post("/v1/echo", content=content(BODY_MAX)).json()["bytes"] == BODY_MAX
    before = targets(engine)
    refused = gate.client.post("/v1/echo", content=content(BODY_MAX + 1000))
    assert refused.status_code == 413
    assert refused.json()["type"] == "urn:readmit:problem:body-too-large"
    assert refused.headers["connection"] == "close"
    assert targets(engine) == before, "half a body is no request"
    assert gate.ready


def test_orders_need_the_token_or_the_socket_and_come_as_json(gate: Gate, options: list[str], folder: Path) -> None:
    wanted = {"reason": "test", "user": "test", "ttl_s": 60}
    with stranger(gate) as client:
        assert client.post("/api/override", json=wanted).status_code == 401
    forged = gate.client.post("/api/override", content=json.dumps(wanted), headers={"Content-Type": "text/plain"})
    assert forged.status_code == 415, "a form on another site must not do it"
    for wrong in ({**wanted, "ttl_s": 0}, {**wanted, "ttl_s": 1e9}, {**wanted, "reason": ""}, {**wanted, "x": 1}, {}):
        assert gate.client.post("/api/override", json=wrong).status_code == 422
    assert gate.metric("readmit_gate_override_ends_timestamp_seconds") == 0
    assert gate.client.post("/api/override", json=wanted).status_code == 200
    assert gate.client.request("DELETE", "/api/override", json={"user": "test"}).status_code == 200
    assert gate.client.request("DELETE", "/api/override", json={"user": "test"}).status_code == 409
    assert gate.client.post("/api/slots/z/drain", json={"user": "test"}).status_code == 404


def test_a_drill_asks_by_the_socket_whether_there_are_clients(gate: Gate, folder: Path) -> None:
    listen = gate.url.removeprefix("http://")
    assert "(--token-file)" in str(traffic(Asked(listen)).problem), "strangers are not told"
    assert traffic(Asked(listen, folder / "token")).problem is None
    gate.client.get("/v1/models")
    said = traffic(Asked(None), folder)
    assert (said.problem, said.serving, said.quiet) == (None, "a", False)


def test_without_a_token_anybody_may_look_and_only_the_socket_may_order(options: list[str], folder: Path) -> None:
    runtime = folder / "open"
    runtime.mkdir(mode=0o700)
    gate = Gate(*options, "--runtime-dir", str(runtime))
    with ending(gate):
        gate.until_ready()
        assert gate.client.get("/").status_code == 200
        assert gate.client.post("/api/slots/a/drain", json={"user": "x", "force": True}).status_code == 403
        assert (runtime / SOCKET).stat().st_mode & 0o777 == 0o600
        with pytest.raises(ConfigError, match="No other slot is ready"):
            order(runtime, "POST", "/api/slots/a/drain", {"user": "x"})
        order(runtime, "POST", "/api/slots/a/drain", {"user": "x", "force": True})
        assert gate.client.get("/v1/echo").status_code == 503
        order(runtime, "DELETE", "/api/slots/a/drain", {"user": "x"})
        gate.until_ready()
        gate.process.terminate()
        assert gate.process.wait(60) == 0
        assert not (runtime / SOCKET).exists()
        with pytest.raises(ConfigError, match="no gate takes orders"):
            order(runtime, "GET", "/api/status")


def test_it_listens_on_loopback_unless_told_otherwise(gate: Gate, engine: ScriptedEngine, folder: Path) -> None:
    assert gate.url.startswith("http://127.0.0.1:")
    where = ["--slot", f"a={engine.url}", "--journal", str(folder / "other.sqlite3")]
    public = Child([sys.executable, "-m", "readmit.gate", "--listen", "0.0.0.0:0", *where], start=forked_gate)
    with ending(public):
        public.says("open to everybody who reaches 0.0.0.0:0; token_file closes it")


def test_it_serves_https(engine: ScriptedEngine, options: list[str], folder: Path) -> None:
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    cert, key = folder / "cert.pem", folder / "key.pem"
    names = ["-subj", "/CN=gate.test", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*make, "-keyout", key, "-out", cert, "-days", "2", *names], check=True, capture_output=True)
    runtime = folder / "tls"
    runtime.mkdir(mode=0o700)
    gate = Gate(*options, "--tls-cert", str(cert), "--tls-key", str(key), "--runtime-dir", str(runtime))
    with ending(gate):
        trusted = ssl.create_default_context(cafile=str(cert))
        with httpx.Client(base_url=gate.url.replace("http:", "https:"), verify=trusted, timeout=60) as client:
            until(lambda: client.get("/readyz").status_code == 200, "the gate to open")
            assert client.get("/v1/echo").status_code == 201
            assert client.get("/").status_code == 200
        with pytest.raises(httpx.HTTPError):
            gate.client.get("/livez")
        port = gate.url.rpartition(":")[2]
        assert traffic(Asked(f"127.0.0.1:{port}", ca=cert)).problem is None
        assert traffic(Asked(f"localhost:{port}", ca=cert)).problem, "that is not its name"
        assert traffic(Asked(f"localhost:{port}", ca=cert, is_its_own=True)).problem is None
        assert traffic(Asked(f"127.0.0.1:{port}")).problem
        assert order(runtime, "GET", "/api/status")["ready"], "the socket is nobody's network"


@pytest.mark.parametrize(
    ("option", "content", "says"),
    [
        ("--token-file", "short", "holds no token: expected 16 bytes or more"),
        ("--token-file", None, "holds no token: expected 16 bytes or more, found No such file"),
        ("--tls-cert", "no certificate", "cannot serve HTTPS"),
        ("--tls-cert", None, "cannot serve HTTPS"),
    ],
)
def test_files_that_cannot_be_used_are_explained(
    options: list[str], tmp_path: Path, option: str, content: str | None, says: str
) -> None:
    if content is not None:
        (tmp_path / "file").write_text(content)
    status, said = run_gate("--listen", "127.0.0.1:0", *options, option, str(tmp_path / "file"))
    assert status == os.EX_CONFIG
    assert says in said
    assert "Traceback" not in said
