"""A node under traffic, and random faults, one, two or three at a time: do its promises hold afterwards?

Engines, daemon, gate and keeper are killed, stopped for a while, restarted on purpose; engines answer wrongly or close
their port; clients vanish. Between rounds the node must become whole by itself. At the end the clients' records and the
journal are held against each other. Prints one line of JSON with every violation; exit status 1 when there is one. The
seed gives the same faults again, though not at the same instants.

    python benchmarks/chaos.py [--seconds 600] [--seed 1] [--json OUT]
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from gate import ENVIRONMENT, machine, place
from gate_parts.damage import Damage, last_norm
from gate_parts.node import RIGHT, Node
from gate_parts.processes import Children, until
from gate_parts.takeover import close_port, verified_spans
from gate_parts.traffic import Asked, Traffic
from rich.console import Console

from readmit.gate.slots import TRANSITIONS
from weightcache.episodes import Replay
from weightcache.journal import boottime_ns
from weightcache.keeper.state import read

PAUSE_S: Final = 0.2
"""Between two requests of a client."""
CURED_NS: Final = 60_000_000_000
"""An engine that answers wrongly is out of service within this, though traffic never lets it rest, and it may be the
last one that is ready for as long as the other recovers."""
STORY: Final = {"prompt": "Once upon a time", "max_tokens": 16}

console = Console(stderr=True)


class Stream(NamedTuple):
    """One event stream; it was ``whole``, ``broken`` off, ``refused`` with a status, or ``cut``: short, yet clean."""

    sent_ns: int
    done_ns: int
    ended: str
    text: str


class Chaos:
    """One run on one node.

    Args:
        node: two slots, both ready.
        children: who its keeper belongs to.
        seed: of the faults.
    """

    def __init__(self, node: Node, children: Children, seed: int) -> None:
        self.faults: list[str] = []
        self.asked: list[Asked] = []
        self.streams: list[Stream] = []
        self.damaged: dict[int, int] = {}
        """When the weights of a process were damaged, boottime in nanoseconds."""
        self._node = node
        self._children = children
        self._random = random.Random(seed)
        self._tensor = last_norm(node.model)
        self._later: set[asyncio.Task[None]] = set()
        self._story = ""

    async def run(self, seconds: float) -> None:
        """Faults until the time is over, and the node whole again."""
        self._story = (await self._stream()).text
        deeds: list[tuple[Callable[[], Awaitable[str]], float]] = [
            (self._kill_engine, 8),
            (self._stop, 5),
            (self._kill_daemon, 3),
            (self._kill_gate, 4),
            (self._kill_keeper, 3),
            (self._damage, 3),
            (self._close_port, 2),
            (self._restart, 3),
        ]
        end, rounds = time.monotonic() + seconds, 0
        async with contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(self._client()) for _ in range(3)]
            others = [asyncio.create_task(self._on_and_on(one)) for one in (self._streams, self._streams, self._vanish)]
            while time.monotonic() < end:
                weights = [weight for _, weight in deeds]
                for deed, _ in self._random.choices(deeds, weights, k=self._random.choice((1, 1, 2, 2, 3))):
                    self.faults.append(await deed())
                    console.log(self.faults[-1])
                    await asyncio.sleep(self._random.choice((0, 0.02, 0.1, 0.5, 1.5)))
                await asyncio.sleep(self._random.uniform(0.5, 6))
                rounds += 1
                if rounds % 3 == 0:
                    await self._whole()
            await self._whole()
            for task in others:
                task.cancel()
            await asyncio.wait(others)
        for client in clients:
            self.asked += client.asked

    def violations(self) -> Iterator[str]:
        """Every promise that was broken."""
        spans = verified_spans(self._node)
        for it in self.asked:
            if it.status == -1:
                yield f"hung: {it}"
            if it.status != 200:
                continue
            if not any(start <= it.done_ns and it.sent_ns <= end for start, end in spans.get(it.pid, ())):
                yield f"answered by an engine that was not verified: {it}"
            if it.text != RIGHT and not self._excused(it.pid, it.sent_ns):
                yield f"wrong: {it}"
        for stream in self.streams:
            if stream.ended == "cut" or (stream.ended == "whole" and not (self.damaged or stream.text == self._story)):
                yield f"no whole answer, and not told so: {stream}"
        yield from self._of_the_journal()

    def _of_the_journal(self) -> Iterator[str]:
        before: dict[str | None, str] = {}
        for event in self._node.events("WHERE kind = 'slot_state' ORDER BY boottime_ns, id"):
            previous = event.attributes["previous"]
            if event.name not in TRANSITIONS[previous] or previous not in (None, before.get(event.slot)):
                yield f"slot {event.slot} cannot go from {before.get(event.slot)} by {previous} to {event.name}"
            before[event.slot] = event.name
        replay = Replay()
        for event in self._node.events("ORDER BY id"):
            replay.feed(event)
        yield from (f"not closed: {it.id}, {it.slot}, {it.cause}" for it in replay.open_episodes)
        yield from (f"never opened: {id_}" for id_ in replay.pending)
        for it in replay.episodes:
            if it.failed:
                yield f"{it.id}, {it.slot}, {it.cause} ended {it.outcome}"
        opened = self._node.events("WHERE kind = 'episode_open'")
        instead = Counter(it.attributes["instead_of"]["episode"] for it in opened if it.attributes.get("instead_of"))
        yield from (f"{count} slots were promoted for {id_}" for id_, count in instead.items() if count > 1)

    def report(self) -> dict[str, Any]:
        """What happened."""
        broken = list(self.violations())
        return {
            "faults": len(self.faults),
            "answers": dict(sorted(Counter(str(it.status) for it in self.asked).items())),
            "streams": dict(sorted(Counter(it.ended for it in self.streams).items())),
            "wrong_while_damaged": sum(it.status == 200 and it.text != RIGHT for it in self.asked),
            "violations": broken,
        }

    def _excused(self, pid: int, sent_ns: int) -> bool:
        since = self.damaged.get(pid)
        return since is not None and sent_ns - since < CURED_NS

    async def _whole(self) -> None:
        while self._later:
            await asyncio.wait(self._later)
        await self._node.until_whole()

    # Clients

    @contextlib.asynccontextmanager
    async def _client(self) -> Any:
        async with Traffic(self._node.url, self._node.question()) as traffic:
            traffic.pause_s = PAUSE_S
            yield traffic

    async def _on_and_on(self, once: Callable[[], Awaitable[None]]) -> None:
        while True:
            await once()
            await asyncio.sleep(PAUSE_S)

    async def _streams(self) -> None:
        self.streams.append(await self._stream())

    async def _stream(self) -> Stream:
        sent, text, ended = boottime_ns(), "", "broken"
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await self._ask()
            try:
                head = await reader.readuntil(b"\r\n\r\n")
                if not head.startswith(b"HTTP/1.1 200"):
                    return Stream(sent, boottime_ns(), f"refused {head[9:12].decode()}", "")
                data = b""
                while size := int(await reader.readline() or b"", 16):
                    data += (await reader.readexactly(size + 2))[:-2]
                events = [each[6:] for each in data.decode().split("\n\n") if each.startswith("data: ")]
                ended = "whole" if events[-1:] == ["[DONE]"] else "cut"
                text = "".join(json.loads(each)["choices"][0]["text"] for each in events[:-1])
            except ValueError:  # the connection broke before a chunk's length
                pass
            finally:
                writer.close()
        return Stream(sent, boottime_ns(), ended, text)

    async def _vanish(self) -> None:
        with contextlib.suppress(OSError):
            reader, writer = await self._ask()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(random.random()):
                    await reader.read(1)
            writer.transport.abort()

    async def _ask(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = self._node.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = self._node.question(**{**STORY, "stream": True})
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: gate\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        return reader, writer

    # Faults

    def _pid(self, child: str) -> int:
        """Of a child's process, as the keeper wrote it down: it is not asked, for it may be stopped."""
        return next((it.pid or 0 for it in read(self._node.runtime)[1] if it.name == child), 0)

    def _signal(self, pid: int, number: signal.Signals) -> None:
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _soon(self, pause_s: float, then: Callable[[], None]) -> None:
        async def wait() -> None:
            await asyncio.sleep(pause_s)
            then()

        task = asyncio.create_task(wait())
        self._later.add(task)
        task.add_done_callback(self._later.discard)

    async def _kill_engine(self) -> str:
        slot = self._random.choice("ab")
        number = self._random.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV, signal.SIGTERM))
        self._signal(self._pid(slot), number)
        return f"{number.name} to {slot}"

    async def _stop(self) -> str:
        victim = self._random.choice(("a", "b", "a", "b", "gate", "daemon", "keeper"))
        pause_s = self._random.choice((0.3, 2.0, 9.0))
        pid = self._node.keeper.pid if victim == "keeper" else self._pid(victim)
        self._signal(pid, signal.SIGSTOP)
        self._soon(pause_s, lambda: self._signal(pid, signal.SIGCONT))
        return f"SIGSTOP to {victim} for {pause_s:g} s"

    async def _kill_daemon(self) -> str:
        self._signal(self._pid("daemon"), signal.SIGKILL)
        return "SIGKILL to the daemon"

    async def _kill_gate(self) -> str:
        number = self._random.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGABRT, signal.SIGTERM))
        self._signal(self._pid("gate"), number)
        return f"{number.name} to the gate"

    async def _kill_keeper(self) -> str:
        """And start the next one, as a service manager would; until it is there nobody keeps what others lose."""
        self._signal(self._node.keeper.pid, signal.SIGKILL)
        self._node.keeper.wait()
        self._node.keeper = self._children.python("-m", "readmit.cli", "up", str(self._node.config))
        await until(self._kept, "the next keeper", 0.05)
        return "SIGKILL to the keeper"

    async def _kept(self) -> bool:
        return bool(await asyncio.to_thread(self._node.children))

    async def _damage(self) -> str:
        slot = self._random.choice("ab")
        pid = self._pid(slot)
        with contextlib.suppress(OSError, RuntimeError):  # it is just ending, or has not loaded yet
            damage = await asyncio.to_thread(Damage, pid, self._tensor)
            self.damaged[pid] = boottime_ns()
            damage.set()
        return f"wrong answers of {slot}"

    async def _close_port(self) -> str:
        slot = self._random.choice("ab")
        pid = self._pid(slot)
        with contextlib.suppress(OSError):
            close_port(pid)
        self._soon(6.0, lambda: self._signal(pid, signal.SIGKILL))
        return f"closed port of {slot}"

    async def _restart(self) -> str:
        name = self._random.choice(("a", "b", "gate", "daemon", "keeper"))
        command = ("-m", "readmit.cli", "restart", name, "--cause", "upgrade", "--config", str(self._node.config))
        self._children.start(sys.executable, *command)
        return f"restart of {name}"


async def chaos(folder: Path, children: Children, seconds: float, seed: int) -> dict[str, Any]:
    """A node of its own."""
    node = Node(folder, children, heals=True)
    await node.until_whole()
    await node.until_forked()
    run = Chaos(node, children, seed)
    await run.run(seconds)
    return {"seconds": round(seconds), "seed": seed, **run.report()}


def left_behind(folder: Path) -> list[str]:
    """Processes that still run on the node's folder once it has ended."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes()
                if str(folder).encode() in command:
                    found.append(f"left behind: {entry.name} {command.replace(bytes(1), b' ').decode()}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the line there as well")
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    with place() as (folder, children):
        found = {**asyncio.run(chaos(folder, children, options.seconds, options.seed)), "machine": machine()}
        children.end()
        found["violations"] += left_behind(folder)
    line = json.dumps(found)
    print(line)
    if options.json:
        options.json.write_text(line + "\n")
    sys.exit(1 if found["violations"] else 0)


if __name__ == "__main__":
    main()
