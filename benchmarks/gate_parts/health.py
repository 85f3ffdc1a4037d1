"""How quickly ``/readyz`` and ``/livez`` answer while everything around them is busy."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from gate_parts.node import Node
from gate_parts.processes import Children, free_ports, quantile, until
from gate_parts.proxying import answers
from gate_parts.wire import COMPLETION, Wire
from readmit.probes import Expectation, Probe, ProbeSet

PAUSE_S = 0.02
IDLE = 500
PUSHING = 32


@contextlib.asynccontextmanager
async def asked(url: str, found: dict[str, Any], condition: str) -> AsyncIterator[None]:
    """Ask both on and on; afterwards their milliseconds are in ``found[condition]``."""
    taken: dict[str, list[float]] = {"/readyz": [], "/livez": []}
    done = asyncio.Event()

    async def ask(target: str) -> None:
        wire = Wire(url)
        while not done.is_set():
            taken[target].append((await wire.ask("GET", target)).seconds * 1000)
            await asyncio.sleep(PAUSE_S)
        wire.close()

    asking = [asyncio.create_task(ask(target)) for target in taken]
    try:
        yield
    finally:
        done.set()
        await asyncio.gather(*asking)
    found[condition] = {
        target.strip("/"): {"n": len(ms), "p50": round(quantile(ms, 0.5), 1), "p99": round(quantile(ms, 0.99), 1)}
        for target, ms in taken.items()
    }


async def recovering(node: Node) -> dict[str, Any]:
    """While an engine maps resident weights, and while one loads them from disk."""
    found: dict[str, Any] = {}
    for condition in ("attach", "disk_load"):
        await node.until_whole()
        async with asked(node.url, found, condition):
            if condition == "disk_load":
                await asyncio.to_thread(node.release)
            _, pid = await node.serving()
            os.kill(pid, signal.SIGKILL)
            await until(lambda pid=pid: _gone(node, pid), "the gate to see it")
            await node.until_whole()
    return found


async def crowded(url: str, folder: Path, children: Children, upstream: str, seconds: float) -> dict[str, Any]:
    """While connections by the hundred do nothing, and while more is asked than is allowed."""
    found: dict[str, Any] = {}
    idle = [Wire(url) for _ in range(IDLE)]
    for wire in idle:
        await wire.open()
    async with asked(url, found, "idle_connections"):
        await asyncio.sleep(seconds)
    for wire in idle:
        wire.close()
    narrow = await _narrow_gate(folder, children, upstream)
    statuses: dict[int, int] = {}
    async with asked(narrow, found, "overload"), asyncio.timeout(seconds + 60):
        end = asyncio.get_running_loop().time() + seconds
        await asyncio.gather(*(_push(narrow, end, statuses) for _ in range(PUSHING)))
    found["overload"]["statuses"] = statuses
    return found


async def _narrow_gate(folder: Path, children: Children, upstream: str) -> str:
    """A gate that takes few requests at a time."""
    (port,) = free_ports(1)
    probes = folder / "narrow.json"
    ProbeSet("m", (Probe("capital", "?", 1, Expectation(text=" Paris")),)).save(probes)
    where = ["--listen", f"127.0.0.1:{port}", "--probes", str(probes), "--journal", str(folder / "narrow-journal")]
    options = ["--slot", f"a={upstream}", "--unsupervised", "--max-in-flight", "8", "--drain-notice", "0"]
    children.python("-m", "readmit.gate", *where, *options)
    url = f"http://127.0.0.1:{port}"
    await until(lambda: answers(url), "the narrow gate")
    return url


async def _push(url: str, end: float, statuses: dict[int, int]) -> None:
    wire = Wire(url)
    while asyncio.get_running_loop().time() < end:
        status = (await wire.ask("POST", "/v1/completions", COMPLETION)).status
        statuses[status] = statuses.get(status, 0) + 1
    wire.close()


async def _gone(node: Node, pid: int) -> bool:
    slots = (await node.status()).get("slots", [])
    return all(slot["pid"] != pid for slot in slots)
