"""Real engines fail under traffic; how long until the next correct answer, and where every answer came from.

The clock starts with the fault. Where nothing can be known at once it starts when the gate's limits first allow a
verdict: for a stopped engine when its first unanswered question is as old as the hang limit, for wrong answers with the
second wrong answer to a golden question, until which nobody else asks; for a closed port when somebody was refused.
"""

import asyncio
import contextlib
import ctypes
import os
import random
import shutil
import signal
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gate_parts.damage import Damage, last_norm
from gate_parts.node import RIGHT, Node
from gate_parts.processes import Children, free_ports, quantile, until
from gate_parts.traffic import Asked, Traffic
from gate_parts.wire import Wire
from weightcache.journal import Event, boottime_ns

FAULTS = ("sigkill", "sigabrt", "sigsegv", "sigstop", "wrong_answer", "closed_port")
SIGNALS = {name: getattr(signal, name.upper()) for name in FAULTS if name.startswith("sig")}
HAPROXY = """
global
    maxconn 4096
defaults
    mode http
    option http-no-delay
    option redispatch 1
    retries 3
    retry-on conn-failure
    timeout connect 2s
    timeout client 600s
    timeout server 600s
listen beside
    bind 127.0.0.1:{port}
    option httpchk GET /health
    http-check expect status 200
    default-server check inter 500ms fall 1 rise 1 observe layer4 error-limit 1 on-error mark-down
    server a {a}
    server b {b} backup
"""


STEPS = ("gone", "noticed", "asked", "received", "answers", "answered")
"""Of a SIGKILL's takeover: the kernel has ended the process; the gate has moved the traffic; the client asks again; the
standby has the request, and begins its answer; the client has read it."""


class Takeover(NamedTuple):
    """One fault. ``ms`` is from the moment that the limits allow a takeover, ``from_fault_ms`` from the fault.

    ``steps_ms`` are the `STEPS` of a process's death, each from the fault; None for other faults.
    """

    fault: str
    ms: float
    from_fault_ms: float
    steps_ms: Sequence[float] | None = None


class Drill:
    """Faults on one node, under traffic.

    Args:
        node: two slots, both ready.
        url: whom the traffic asks.
    """

    def __init__(self, node: Node, url: str) -> None:
        self.takeovers: list[Takeover] = []
        self.asked: list[Asked] = []
        self._node = node
        self._url = url
        self._tensor = last_norm(node.model)

    async def run(self, faults: Sequence[str], tell: Any) -> None:
        """One fault after the other, each on the engine that serves."""
        async with Traffic(self._url, self._node.question()) as traffic:
            for number, fault in enumerate(faults, 1):
                await self._node.until_whole()
                await asyncio.sleep(random.uniform(0.2, 0.6))  # anywhere in a request
                takeover = await self.once(fault, traffic)
                self.takeovers.append(takeover)
                tell(f"{number} of {len(faults)}: {fault}, {takeover.ms:.0f} ms")
            await self._node.until_whole()
        self.asked += traffic.asked

    async def once(self, fault: str, traffic: Traffic) -> Takeover:
        """One fault, on the engine that serves."""
        slot, pid = await self._victim(traffic)
        with inflicting(fault, pid, self._tensor) as inflict:
            if fault == "wrong_answer":  # only an idle engine's mistakes count
                await traffic.pause()
            gone = asyncio.create_task(_gone(pid))
            await asyncio.sleep(0)  # until it looks
            at = boottime_ns()
            inflict()
            if fault == "wrong_answer":
                await self._allowed(fault, slot, at)
                traffic.resume()
            answer = await traffic.answer_after(at, pid, RIGHT)
            allowed = await self._allowed(fault, slot, at)
        gone_ns = await gone
        steps = None
        if fault == "sigkill" and self._url == self._node.url:
            noticed = await self._journaled("suspect", slot, at)
            times = (gone_ns, noticed, answer.sent_ns, *answer.engine_ns, answer.done_ns)
            steps = [round((time - at) / 1e6, 2) for time in times]
        return Takeover(fault, max(0.0, (answer.done_ns - allowed) / 1e6), (answer.done_ns - at) / 1e6, steps)

    async def _victim(self, traffic: Traffic) -> tuple[str, int]:
        """Who answers: the slot that the gate says, or whoever answered last where another asks the engines."""
        if self._url == self._node.url:
            return await self._node.serving()
        answered = {asked.pid for asked in traffic.asked[-1:] if asked.status == 200}
        slots = (await self._node.status())["slots"]
        return next(
            ((slot["slot"], slot["pid"]) for slot in slots if slot["pid"] in answered), await self._node.serving()
        )

    async def _allowed(self, fault: str, slot: str, at: int) -> int:
        """When the limits first allowed a takeover."""
        match fault:
            case "closed_port":  # until somebody is refused, connections that are kept still serve
                return await self._journaled("suspect", slot, at)
            case "sigstop":
                return await self._journaled("late", slot, at, kind="probe")
            case "wrong_answer":
                return await self._journaled("wrong", slot, at, kind="probe", number=2)
        return at

    async def _journaled(self, name: str, slot: str, at: int, *, kind: str = "slot_state", number: int = 1) -> int:
        """When the gate did what its journal tells of, for the first or a later time since ``at``."""
        where = "WHERE kind = ? AND name = ? AND slot = ? AND boottime_ns > ? ORDER BY id"
        found: list[Event] = []

        async def told() -> bool:
            found[:] = self._node.events(where, kind, name, slot, at)
            return len(found) >= number

        await until(told, f"the journal to have {kind} {name}")
        return found[number - 1].boottime_ns


async def _gone(pid: int) -> int:
    """When a process ends, by its pidfd: as early as anybody can know."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    descriptor = os.pidfd_open(pid)
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
        return boottime_ns()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


@contextlib.contextmanager
def inflicting(fault: str, pid: int, tensor: bytes) -> Iterator[Any]:
    """Gives the function that does it; afterwards the engine is killed, so that its slot recovers."""
    damage = Damage(pid, tensor) if fault == "wrong_answer" else None

    def inflict() -> None:
        if damage is not None:
            damage.set()
        elif fault == "closed_port":
            close_port(pid)
        else:
            os.kill(pid, SIGNALS[fault])

    try:
        yield inflict
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def close_port(pid: int) -> None:
    """Make a process's listening sockets refuse, from outside: it lives on and does not know."""
    libc = ctypes.CDLL(None, use_errno=True)
    pidfd = os.pidfd_open(pid)
    try:
        for entry in os.listdir(f"/proc/{pid}/fd"):
            descriptor = libc.syscall(438, pidfd, int(entry), 0)  # pidfd_getfd(2)
            if descriptor < 0:
                continue
            try:
                shared = socket.socket(fileno=descriptor)
            except OSError:
                os.close(descriptor)
                continue
            with shared:
                listens = shared.family == socket.AF_INET and shared.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if listens:
                    shared.shutdown(socket.SHUT_RDWR)
    finally:
        os.close(pidfd)


def verdict(node: Node, drill: Drill) -> dict[str, int]:
    """What became of all requests, and how many answers came from a process that was not verified then."""
    spans = verified_spans(node)
    answers = [asked for asked in drill.asked if asked.status == 200]
    return {
        "requests": len(drill.asked),
        "answers": len(answers),
        "errors": sum(asked.status not in (200, -1) for asked in drill.asked),
        "wrong": sum(asked.text != RIGHT for asked in answers),
        "hung": sum(asked.status == -1 for asked in drill.asked),
        "unverified": sum(
            not any(start <= it.done_ns and it.sent_ns <= end for start, end in spans.get(it.pid, ())) for it in answers
        ),
    }


def verified_spans(node: Node) -> dict[int, list[tuple[int, int]]]:
    """For each engine process the times between which it was ready."""
    spans: dict[int, list[tuple[int, int]]] = {}
    open_since: dict[str, tuple[int, int]] = {}
    for event in node.events("WHERE kind = 'slot_state' ORDER BY boottime_ns, id"):
        slot = event.slot or ""
        if slot in open_since and event.name not in ("ready", "draining"):
            pid, since = open_since.pop(slot)
            spans.setdefault(pid, []).append((since, event.boottime_ns))
        if event.name == "ready":
            open_since[slot] = int(event.attributes["pid"]), event.boottime_ns
    for pid, since in open_since.values():
        spans.setdefault(pid, []).append((since, boottime_ns()))
    return spans


def timeline(takeovers: Sequence[Takeover]) -> dict[str, float]:
    """Where the time of a SIGKILL's takeover goes: the median of each step, in milliseconds from the fault."""
    told = [it.steps_ms for it in takeovers if it.steps_ms]
    return {name: round(quantile(column, 0.5), 1) for name, column in zip(STEPS, zip(*told, strict=True), strict=False)}


def summary(takeovers: Sequence[Takeover]) -> dict[str, Any]:
    """Milliseconds by fault."""
    found = {}
    for fault in FAULTS:
        ms = [it.ms for it in takeovers if it.fault == fault]
        if ms:
            figures = {"n": len(ms), "p50": round(quantile(ms, 0.5), 1), "p99": round(quantile(ms, 0.99), 1)}
            found[fault] = {**figures, "max": round(max(ms), 1)}
    return found


async def haproxy(node: Node, folder: Path, children: Children, kills: int, tell: Any) -> dict[str, Any] | None:
    """The same kills with HAProxy before the same engines, asking their ``/health``; None where it is not installed."""
    if shutil.which("haproxy") is None or not kills:
        return None
    (port,) = free_ports(1)
    config = folder / "takeover.cfg"
    addresses = {name: url.removeprefix("http://") for name, url in node.engines.items()}
    config.write_text(HAPROXY.format(port=port, **addresses))
    children.start("haproxy", "-db", "-f", str(config))
    drill = Drill(node, f"http://127.0.0.1:{port}")
    await drill.run(["sigkill"] * kills, lambda text: tell(f"haproxy, {text}"))
    ms = [it.ms for it in drill.takeovers]
    return {"n": kills, "p50": round(quantile(ms, 0.5), 1), "max": round(max(ms), 1), **verdict(node, drill)}


async def kill_gate(node: Node) -> dict[str, int]:
    """SIGKILL the gate while clients connect; counts who was refused."""
    counts = {"connections": 0, "refused": 0, "broken": 0}
    done = asyncio.Event()

    async def connect() -> None:
        while not done.is_set():
            wire = Wire(node.url)
            counts["connections"] += 1
            try:
                await wire.ask("GET", "/livez")
            except ConnectionRefusedError:
                counts["refused"] += 1
            except (OSError, asyncio.IncompleteReadError):
                counts["broken"] += 1  # a request that the killed gate had taken
            wire.close()
            await asyncio.sleep(0.005)

    clients = [asyncio.create_task(connect()) for _ in range(4)]
    await asyncio.sleep(0.3)
    before = node.pid("gate")
    os.kill(before, signal.SIGKILL)
    await until(lambda: _replaced(node, before), "another gate")
    await node.until_whole()
    done.set()
    await asyncio.gather(*clients)
    return counts


async def _replaced(node: Node, before: int) -> bool:
    return node.pid("gate") not in (0, before)
