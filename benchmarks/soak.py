"""A node under traffic that loses an engine every so often: do gate, daemon and keeper stay as small as they were?

Descriptors and resident memory are read while nothing is open but the node itself: both slots ready, no request under
way. The first kills are left out, for what a process takes up once. Prints one line of JSON; exit status 1 when
something grew, or an answer was wrong, hung, or came from an engine that was not verified.

    python benchmarks/soak.py [--seconds 1800] [--every 20] [--json OUT]
"""

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any, Final

from gate import ENVIRONMENT, machine, place
from gate_parts.node import Node
from gate_parts.processes import Children, descriptors
from gate_parts.takeover import Drill, verdict
from gate_parts.traffic import Traffic

from weightcache.memory import resident_bytes

WATCHED: Final = ("gate", "daemon", "keeper")
PAUSE_S: Final = 0.5
"""Between two requests: some traffic, not load."""
GROWTH_MIB: Final = 4.0
"""What memory may differ by between the beginning and the end: an allocator gives nothing back at once."""
DESCRIPTORS: Final = 1
"""What descriptors may differ by: a status connection may just be open."""


class Soak:
    """One run on one node."""

    def __init__(self, node: Node, every_s: float) -> None:
        self.samples: dict[str, list[tuple[int, float]]] = {name: [] for name in WATCHED}
        self.drill = Drill(node, node.url)
        self._node = node
        self._every_s = every_s

    async def run(self, seconds: float) -> None:
        """Kill, wait, look, until the time is over."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            began = time.monotonic()
            async with Traffic(self._node.url, self._node.question()) as traffic:
                traffic.pause_s = PAUSE_S
                takeover = await self.drill.once("sigkill", traffic)
                self.drill.takeovers.append(takeover)
                await self._node.until_whole()
                await asyncio.sleep(max(0.0, self._every_s - 1.0 - (time.monotonic() - began)))
            self.drill.asked += traffic.asked
            await asyncio.sleep(1.0)
            self._look()

    def _look(self) -> None:
        pids = {"keeper": self._node.keeper.pid, **{name: self._node.pid(name) for name in ("gate", "daemon")}}
        for name, pid in pids.items():
            self.samples[name].append((descriptors(pid), resident_bytes(pid) / 2**20))

    def report(self) -> dict[str, Any]:
        """What was found."""
        found = {name: change(samples) for name, samples in self.samples.items()}
        counts = verdict(self._node, self.drill)
        takeovers = [it.ms for it in self.drill.takeovers]
        flat = all(
            it["descriptors"]["last"] <= it["descriptors"]["first"] + DESCRIPTORS
            and it["rss_mib"]["last"] <= it["rss_mib"]["first"] + GROWTH_MIB
            for it in found.values()
        )
        return {
            "kills": len(takeovers),
            "flat": flat,
            "processes": found,
            **counts,
            "takeover_ms": {"p50": round(median(takeovers), 1), "max": round(max(takeovers), 1)},
        }


def change(samples: list[tuple[int, float]]) -> dict[str, Any]:
    """Medians of the first and the last third of what was seen, after a tenth for getting used to it."""
    settled = samples[len(samples) // 10 :]
    third = max(1, len(settled) // 3)
    parts = {"first": settled[:third], "last": settled[-third:]}
    return {
        what: {when: round(median(sample[index] for sample in part), 1) for when, part in parts.items()}
        for index, what in enumerate(("descriptors", "rss_mib"))
    }


async def soak(folder: Path, children: Children, seconds: float, every_s: float) -> dict[str, Any]:
    """A node of its own."""
    node = Node(folder, children, hang_s=60.0)
    await node.until_whole()
    await node.until_forked()
    run = Soak(node, every_s)
    began = time.monotonic()
    await run.run(seconds)
    return {"seconds": round(time.monotonic() - began), "every_s": every_s, **run.report()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two kills")
    parser.add_argument("--json", type=Path, help="write the line there as well")
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    with place() as (folder, children):
        found = {**asyncio.run(soak(folder, children, options.seconds, options.every)), "machine": machine()}
    line = json.dumps(found)
    print(line)
    if options.json:
        options.json.write_text(line + "\n")
    sys.exit(0 if found["flat"] and not (found["wrong"] or found["hung"] or found["unverified"]) else 1)


if __name__ == "__main__":
    main()
