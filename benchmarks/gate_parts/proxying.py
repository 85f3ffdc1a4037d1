"""What the gate costs a request: its upstream answers at once, and every route is measured in turn, in one run.

Routes: ``direct`` to the upstream, through the ``gate``, through the ``bare`` pass-through, and through ``haproxy``
where it is installed.
"""

import asyncio
import itertools
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

from gate_parts.processes import Children, free_ports, quantile, until
from gate_parts.upstream import EVENTS
from gate_parts.wire import COMPLETION, Wire
from readmit.probes import Expectation, Probe, ProbeSet

RATE = 50.0
CONCURRENCY = 16
STREAMS = 4
OPEN_STREAMS = 200
HAPROXY = """
global
    maxconn 4096
defaults
    mode http
    option http-no-delay
    timeout connect 2s
    timeout client 600s
    timeout server 600s
listen beside
    bind 127.0.0.1:{port}
    server upstream 127.0.0.1:{upstream}
"""


class Routes:
    """The upstream and the ways to it."""

    def __init__(self, folder: Path, children: Children) -> None:
        upstream, gate, bare, haproxy = free_ports(4)
        self.urls = {"direct": f"http://127.0.0.1:{upstream}", "gate": f"http://127.0.0.1:{gate}"}
        self.urls["bare"] = f"http://127.0.0.1:{bare}"
        children.python("-m", "gate_parts.upstream", str(upstream))
        probes = folder / "stub-probes.json"
        ProbeSet("m", (Probe("capital", "?", 1, Expectation(text=" Paris")),)).save(probes)
        where = ["--listen", f"127.0.0.1:{gate}", "--probes", str(probes), "--journal", str(folder / "stub-journal")]
        slot = ["--slot", f"a={self.urls['direct']}", "--unsupervised", "--drain-notice", "0", "--drain-limit", "1"]
        self.gate = children.python("-m", "readmit.gate", *where, *slot, "--max-in-flight", "4096")
        children.python("-m", "gate_parts.passthrough", str(bare), self.urls["direct"])
        if shutil.which("haproxy") is not None:
            self.urls["haproxy"] = f"http://127.0.0.1:{haproxy}"
            config = folder / "beside.cfg"
            config.write_text(HAPROXY.format(port=haproxy, upstream=upstream))
            children.start("haproxy", "-db", "-f", str(config))

    async def until_open(self) -> None:
        """Wait until every route answers."""
        for name, url in self.urls.items():
            await until(lambda url=url: answers(url), f"route {name}")


async def answers(url: str, target: str = "/v1/completions") -> bool:
    """Whether a completion comes through."""
    wire = Wire(url)
    try:
        return (await wire.ask("POST", target, COMPLETION)).status == 200
    except (OSError, asyncio.IncompleteReadError):
        return False
    finally:
        wire.close()


async def measure(routes: Routes, rounds: int, seconds: float) -> dict[str, Any]:
    """All figures about a request's way.

    Args:
        rounds: how often each route has its turn.
        seconds: how long one turn takes.
    """
    await routes.until_open()
    steady: dict[str, list[float]] = {name: [] for name in routes.urls}
    rates: dict[str, list[float]] = {name: [] for name in routes.urls}
    chunks: dict[str, list[float]] = {name: [] for name in routes.urls}
    for _ in range(rounds):
        for name, url in routes.urls.items():
            steady[name] += await at_a_rate(url, RATE, seconds)
        for name, url in routes.urls.items():
            rates[name].append(await requests_per_s(url, seconds / 2))
        for name, url in routes.urls.items():
            chunks[name].append(await events_per_s(url))
    quiet = await first_tokens(routes.urls["gate"])
    crowded = await among_streams(routes.urls["gate"])
    return {
        "routes": {
            name: {
                "steady_ms": {"n": len(steady[name]), "p50": p(steady[name], 0.5), "p99": p(steady[name], 0.99)},
                "requests_per_s": round(statistics.median(rates[name])),
                "chunks_per_s": round(statistics.median(chunks[name])),
            }
            for name in routes.urls
        },
        "first_token": {
            "open_streams": OPEN_STREAMS,
            "alone_ms": {"p50": p(quiet, 0.5), "p99": p(quiet, 0.99)},
            "among_ms": {"p50": p(crowded, 0.5), "p99": p(crowded, 0.99)},
        },
    }


def p(seconds: list[float], share: float) -> float:
    """A quantile in milliseconds."""
    return round(quantile(seconds, share) * 1000, 3)


async def at_a_rate(url: str, rate: float, seconds: float) -> list[float]:
    """Seconds that completions take at a steady rate, whether or not earlier ones are answered."""
    idle: list[Wire] = []
    taken: list[float] = []

    async def one() -> None:
        wire = idle.pop() if idle else Wire(url)
        reply = await wire.ask("POST", "/v1/completions", COMPLETION)
        assert reply.status == 200, reply
        taken.append(reply.seconds)
        idle.append(wire)

    begun = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in itertools.count():
            due = begun + number / rate
            if due > begun + seconds:
                break
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            group.create_task(one())
    for wire in idle:
        wire.close()
    return taken[min(5, len(taken) // 10) :]  # the first ones open connections


async def requests_per_s(url: str, seconds: float) -> float:
    """How many completions a second there are, so many at a time."""
    done = 0
    end = time.perf_counter() + seconds

    async def worker() -> None:
        nonlocal done
        wire = Wire(url)
        while time.perf_counter() < end:
            assert (await wire.ask("POST", "/v1/completions", COMPLETION)).status == 200
            done += 1
        wire.close()

    began = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(CONCURRENCY)))
    return done / (time.perf_counter() - began)


async def events_per_s(url: str) -> float:
    """How many events a second come through a few streams together."""
    began = time.perf_counter()
    counts = await asyncio.gather(*(Wire(url).events("/v1/stream") for _ in range(STREAMS)))
    took = time.perf_counter() - began
    assert counts == [EVENTS] * STREAMS, counts
    return sum(counts) / took


async def first_tokens(url: str, count: int = 300) -> list[float]:
    """Seconds to the first byte of event streams, one after the other at `RATE`."""
    taken = []
    wire = Wire(url)
    for _ in range(count):
        taken.append((await wire.ask("GET", "/v1/first")).first_s)
        await asyncio.sleep(1 / RATE)
    wire.close()
    return taken[5:]


async def among_streams(url: str) -> list[float]:
    """The same, with many streams open that have an event a second each."""
    opened = 0

    async def trickle() -> None:
        nonlocal opened
        wire = Wire(url)
        await wire.open()
        assert wire.writer is not None
        assert wire.reader is not None
        wire.writer.write(b"GET /v1/trickle HTTP/1.1\r\nHost: gate\r\n\r\n")
        assert b" 200 " in await wire.reader.readuntil(b"\r\n\r\n")
        opened += 1
        while await wire.reader.read(1 << 16):
            pass

    open_streams = []
    for _ in range(OPEN_STREAMS):
        open_streams.append(asyncio.create_task(trickle()))
        await asyncio.sleep(0.005)  # so that their events are spread over the second
    await until(lambda: _reached(lambda: opened == OPEN_STREAMS), "the streams")
    try:
        return await first_tokens(url)
    finally:
        for stream in open_streams:
            stream.cancel()
        await asyncio.wait(open_streams)


async def _reached(condition: Any) -> bool:
    return bool(condition())
