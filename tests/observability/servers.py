"""Real Prometheus and Alertmanager servers, from Debian."""

import json
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

from tests.readmit.nodes import free_port

T = TypeVar("T")
PATIENCE_S = 120.0
ROOT = Path(__file__).parents[2]


def require(*programs: str) -> None:
    """Fail, and say how to get them, if programs are missing."""
    missing = [program for program in programs if shutil.which(program) is None]
    assert not missing, f"{', '.join(missing)}: not installed; make system installs them on Debian"


def wait_for(condition: Callable[[], T], what: str) -> T:
    """Poll until a condition is true; fails after a generous while."""
    deadline = time.monotonic() + PATIENCE_S
    while not (result := condition()):
        assert time.monotonic() < deadline, f"waited {PATIENCE_S:g} s for {what}"
        time.sleep(0.05)
    return result


def fetch(url: str, body: object = None) -> Any:
    """JSON from a URL; what it says in place of an answer that is an error."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            text = answer.read()
    except urllib.error.HTTPError as error:
        text = error.read()
    return json.loads(text) if text else None


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@contextmanager
def running(command: list[str], ready: str, log: Path) -> Iterator[None]:
    """A server, for as long as the context lasts."""
    require(command[0])
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:

            def is_ready() -> bool:
                assert process.poll() is None, log.read_text()[-4000:]
                return answers(ready)

            wait_for(is_ready, ready)
            yield
        finally:
            process.terminate()
            process.wait(60)


class Prometheus:
    """Questions to a running Prometheus."""

    def __init__(self, url: str) -> None:
        self.url = url

    def api(self, path: str, **parameters: object) -> Any:
        """The data of an answer; fails with what Prometheus says if it is none."""
        query = urllib.parse.urlencode(parameters, doseq=True)
        answer = fetch(f"{self.url}/api/v1/{path}?{query}")
        assert answer["status"] == "success", f"{path} {parameters}: {answer}"
        return answer["data"]

    def query(self, expr: str, at: float | None = None) -> dict[tuple[tuple[str, str], ...], float]:
        """The instant vector, or a scalar under no labels."""
        data = self.api("query", query=expr, **({} if at is None else {"time": at}))
        if data["resultType"] == "scalar":
            return {(): float(data["result"][1])}
        return {labels(each["metric"]): float(each["value"][1]) for each in data["result"]}

    def range(self, expr: str, start: float, end: float, step: float) -> dict[tuple[tuple[str, str], ...], list[Any]]:
        """Every series with its ``[time, value]`` pairs."""
        data = self.api("query_range", query=expr, start=start, end=end, step=step)
        return {labels(each["metric"]): [[at, float(value)] for at, value in each["values"]] for each in data["result"]}


def labels(metric: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(metric.items()))


@contextmanager
def prometheus(folder: Path, config: str, *options: str) -> Iterator[Prometheus]:
    """A Prometheus on the blocks in a folder, if there are any."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "prometheus.yaml"
    file.write_text(config)
    url = f"http://127.0.0.1:{free_port()}"
    command = [
        *("prometheus", f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}"),
        *(f"--web.listen-address={url.rpartition('//')[2]}", "--storage.tsdb.retention.time=10y"),
        *("--enable-feature=exemplar-storage", "--log.level=warn", *options),
    ]
    with running(command, f"{url}/-/ready", folder / "prometheus.log"):
        yield Prometheus(url)


class Receiver:
    """A webhook that keeps what it is told, by path."""

    def __init__(self) -> None:
        self.told: dict[str, list[dict[str, Any]]] = {}
        told = self.told

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                told.setdefault(self.path, []).append(content)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Silent."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@contextmanager
def alertmanager(folder: Path, config: str) -> Iterator[str]:
    """An Alertmanager of its own; its URL."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "alertmanager.yaml"
    file.write_text(config)
    address = f"127.0.0.1:{free_port()}"
    command = [
        *("prometheus-alertmanager", f"--config.file={file}", f"--storage.path={folder / 'am'}"),
        *(f"--web.listen-address={address}", "--cluster.listen-address=", "--log.level=warn"),
    ]
    with running(command, f"http://{address}/-/ready", folder / "alertmanager.log"):
        yield f"http://{address}"
