"""What the gate costs a request, and how fast it opens, shuts and moves on.

A trivial engine answers at once, so that the gate is all there is to measure: the same requests go to the engine and
through the gate, in turn, in one run. Then engines are killed: how long until ``/readyz`` says 503, until a request is
answered by the standby, and until a gate opens for an engine whose port has just opened.

    python benchmarks/gate.py [--json OUT] [--requests 1000] [--rounds 5] [--kills 10]
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from readmit.probes import Expectation, Probe, ProbeSet

ANSWER = json.dumps({"choices": [{"text": " Paris", "logprobs": None}]}).encode()
EVENT = b"data: " + b"x" * 200 + b"\n\n"
EVENTS = 2000


async def engine(port: int) -> None:
    """An engine that answers at once; ``/v1/stream`` writes events as fast as they are taken."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", head.lower())
                await reader.readexactly(int(length[1]) if length else 0)
                await answer(b" /v1/stream " in head, writer)
        writer.close()

    async def answer(stream: bool, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")
        if stream:
            writer.write(b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            for _ in range(EVENTS):
                writer.write(b"%x\r\n%b\r\n" % (len(EVENT), EVENT))
                await writer.drain()
            writer.write(b"0\r\n\r\n")
        else:
            writer.write(b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(ANSWER), ANSWER))
        await writer.drain()

    async with await asyncio.start_server(serve, "127.0.0.1", port) as server:
        await server.serve_forever()


class Process:
    """A child, killed when the benchmark ends."""

    children: list[subprocess.Popen[bytes]] = []  # noqa: RUF012 - the one list of this program's children

    def __init__(self, *argv: str) -> None:
        command = [sys.executable, *argv]
        self.popen = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.children.append(self.popen)

    def kill(self) -> None:
        self.popen.send_signal(signal.SIGKILL)


class Gate(Process):
    """A gate in front of engines on these ports."""

    def __init__(self, probes: Path, *ports: int) -> None:
        slots = [option for port in ports for option in ("--slot", f"s{port}=http://127.0.0.1:{port}")]
        address = f"127.0.0.1:{free_port()}"
        where = ["--listen", address, "--probes", str(probes), "--journal", str(probes.with_name("journal"))]
        super().__init__("-m", "readmit.gate", "--unsupervised", *where, *slots)
        self.url = f"http://{address}"


def start_engine(port: int) -> Process:
    return Process(__file__, "--engine", str(port))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.asynccontextmanager
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session:
        yield session


async def status(session: aiohttp.ClientSession, url: str) -> int | None:
    try:
        async with session.get(url) as response:
            await response.read()
            return response.status
    except aiohttp.ClientError:
        return None


async def until(condition: Callable[[], Any], pause: float = 0.001) -> float:
    """Seconds until an asynchronous condition holds."""
    began = time.perf_counter()
    while not await condition():  # noqa: ASYNC110 - the condition is another process's
        await asyncio.sleep(pause)
    return time.perf_counter() - began


async def latencies(session: aiohttp.ClientSession, url: str, requests: int, concurrency: int) -> dict[str, float]:
    """Milliseconds a completion takes, and how many a second there are."""
    taken: list[float] = []

    async def worker() -> None:
        while len(taken) < requests:
            began = time.perf_counter()
            async with session.post(f"{url}/v1/completions", json={"prompt": "?"}) as response:
                assert await response.read() == ANSWER
            taken.append((time.perf_counter() - began) * 1000)

    began = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    wall = time.perf_counter() - began
    ordered = sorted(taken)
    at = {"p50_ms": 0.5, "p99_ms": 0.99}
    return {name: ordered[int(share * (len(ordered) - 1))] for name, share in at.items()} | {"rps": len(taken) / wall}


async def streaming(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Events a second of one stream, and milliseconds to its first byte."""
    began, total, first = time.perf_counter(), 0, 0.0
    async with session.get(f"{url}/v1/stream") as response:
        async for chunk in response.content.iter_any():
            first = first or (time.perf_counter() - began) * 1000
            total += len(chunk)
    assert total == EVENTS * len(EVENT)
    return {"events_per_s": EVENTS / (time.perf_counter() - began), "first_byte_ms": first}


async def costs(options: argparse.Namespace, probes: Path) -> dict[str, Any]:
    """The same requests to the engine and through the gate, in turn."""
    port = free_port()
    start_engine(port)
    gate = Gate(probes, port)
    routes = {"direct": f"http://127.0.0.1:{port}", "gate": gate.url}
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    async with client() as session:
        await until(lambda: _is(session, f"{gate.url}/readyz", 200))
        for concurrency in (1, 16):
            for _ in range(options.rounds):
                for route, url in routes.items():
                    one = await latencies(session, url, options.requests // options.rounds, concurrency)
                    found.setdefault(f"completion, {concurrency} at a time", {}).setdefault(route, []).append(one)
        for _ in range(options.rounds):
            for route, url in routes.items():
                found.setdefault("stream", {}).setdefault(route, []).append(await streaming(session, url))
    return {
        what: {
            route: {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
            for route, rounds in by.items()
        }
        for what, by in found.items()
    }


async def reactions(options: argparse.Namespace, probes: Path) -> dict[str, list[float]]:
    """Milliseconds from a fault, or an opened port, to the gate's reaction."""
    first, second = free_port(), free_port()
    standby = start_engine(second)
    alone, both = Gate(probes, first), Gate(probes, first, second)
    found: dict[str, list[float]] = {"opens_ms": [], "shuts_ms": [], "moves_on_ms": []}
    async with client() as session:
        for gate in (alone, both):  # their own start is not what is measured
            await until(lambda url=gate.url: _is(session, f"{url}/livez", 200))
        for _ in range(options.kills):
            active = start_engine(first)
            await until(lambda: _is(session, f"http://127.0.0.1:{first}/v1/models", 200))
            found["opens_ms"].append(1000 * await until(lambda: _is(session, f"{alone.url}/readyz", 200)))
            await until(lambda: _is(session, f"{both.url}/readyz", 200))
            await until(lambda: _serves(session, both.url, f"s{first}"))
            await asyncio.sleep(0.2)
            began = time.perf_counter()
            active.kill()
            # One that the kernel still queued at the dying engine is answered 502, for it may not be sent twice.
            await until(lambda: _completes(session, both.url))
            found["moves_on_ms"].append(1000 * (time.perf_counter() - began))
            active.popen.wait()
            began = time.perf_counter()
            await until(lambda: _is(session, f"{alone.url}/readyz", 503))
            found["shuts_ms"].append(1000 * (time.perf_counter() - began))
    standby.kill()
    return found


async def _is(session: aiohttp.ClientSession, url: str, wanted: int) -> bool:
    return await status(session, url) == wanted


async def _completes(session: aiohttp.ClientSession, url: str) -> bool:
    async with session.post(f"{url}/v1/completions", json={}) as response:
        return response.status == 200


async def _serves(session: aiohttp.ClientSession, url: str, slot: str) -> bool:
    async with session.get(f"{url}/api/status") as response:
        return bool((await response.json())["serving"] == slot)


def show(report: dict[str, Any]) -> None:
    console = Console()
    table = Table(title="A request with and without the gate (medians of rounds)")
    for head in ("", "measure", "direct", "gate", "difference"):
        table.add_column(head, justify="left" if head in ("", "measure") else "right")
    for what, routes in report["costs"].items():
        for key, direct in routes["direct"].items():
            gate = routes["gate"][key]
            table.add_row(what, key, f"{direct:.2f}", f"{gate:.2f}", f"{gate - direct:+.2f}")
    console.print(table)
    table = Table(title="Reactions, milliseconds")
    for head in ("", "median", "worst"):
        table.add_column(head, justify="left" if not head else "right")
    names = {
        "opens_ms": "port open until the gate is open",
        "shuts_ms": "engine gone until /readyz is 503",
        "moves_on_ms": "SIGKILL until an answer of the standby",
    }
    for key, name in names.items():
        values = report["reactions"][key]
        table.add_row(name, f"{statistics.median(values):.1f}", f"{max(values):.1f}")
    console.print(table)


@contextlib.contextmanager
def probe_file() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "probes.json"
        ProbeSet("engine", (Probe("capital", "?", 1, Expectation(text=" Paris")),)).save(path)
        yield path


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    with probe_file() as probes:
        machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "kernel": platform.release()}
        return {
            "machine": machine,
            "costs": await costs(options, probes),
            "reactions": await reactions(options, probes),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine is not None:
        asyncio.run(engine(options.engine))
        return
    try:
        report = asyncio.run(measure(options))
    finally:
        for child in Process.children:
            child.kill()
            child.wait()
    show(report)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
