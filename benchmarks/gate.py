"""What a takeover takes with real engines, and what the gate costs a request; HAProxy beside it in the same run.

Takeover: a whole node with two engines on the demo model, under traffic. Engines are killed and broken in six ways;
measured is the time to the next correct answer, and whether any answer was wrong, hung, or came from a process that was
not verified at that moment. Cost: an upstream that answers at once is asked directly, through the gate, through a bare
uvicorn and aiohttp pass-through and through HAProxy, in turn.

    python benchmarks/gate.py [--quick] [--json OUT]                    --quick: under 4 minutes, 12 kills
    python benchmarks/gate.py --kills 60 --only takeover --add OUT      adds takeovers to an earlier run's
"""

import argparse
import asyncio
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from gate_parts import death, health, proxying, takeover
from gate_parts.node import Node
from gate_parts.processes import Children
from gate_parts.takeover import FAULTS, Drill, Takeover
from rich.console import Console
from rich.table import Table

KILLS: Final = 299
"""What it takes for the worst to be above the 99th percentile with 95 % confidence."""
OTHERS: Final = 10
"""Of each other fault, in a full run."""
ENVIRONMENT: Final = {"OMP_WAIT_POLICY": "passive"}

console = Console()


def faults(kills: int, others: int) -> list[str]:
    """So many SIGKILLs and so many of each other fault, mixed."""
    rest = [fault for _ in range(others) for fault in FAULTS if fault != "sigkill"]
    every = max(1, kills // (len(rest) or 1))
    mixed = []
    for number in range(kills):
        mixed.append("sigkill")
        if rest and (number + 1) % every == 0:
            mixed.append(rest.pop(0))
    return mixed + rest


async def takeovers(options: argparse.Namespace, folder: Path, children: Children) -> dict[str, Any]:
    """Everything that takes real engines."""
    tell = console.log
    node = Node(folder, children)
    tell("starting a node: keeper, daemon, gate, two engines")
    await node.until_whole()
    await node.until_forked()
    drill = Drill(node, node.url)
    await drill.run(faults(options.kills, options.others), tell)
    beside = await takeover.haproxy(node, folder, children, options.haproxy_kills, tell)
    tell("killing the gate")
    gate_kill = await takeover.kill_gate(node)
    tell("asking for health during an attach and a load from disk")
    probed = await health.recovering(node)
    tell("killing processes with much memory")
    return {
        "raw": [list(it) for it in drill.takeovers],
        "requests": takeover.verdict(node, drill),
        "gate_kill": gate_kill,
        "haproxy": beside,
        "health": probed,
        "death_known": await asyncio.to_thread(death.measure, options.deaths),
    }


async def costs(options: argparse.Namespace, folder: Path, children: Children) -> dict[str, Any]:
    """Everything for which the upstream only has to be quick."""
    console.log("measuring what the gate costs a request")
    routes = proxying.Routes(folder, children)
    found = await proxying.measure(routes, options.rounds, options.seconds)
    console.log("asking for health among 500 idle connections and under overload")
    crowded = await health.crowded(
        routes.urls["gate"], folder, children, routes.urls["direct"], max(3.0, options.seconds)
    )
    return {**found, "health": crowded}


def report(options: argparse.Namespace, taken: dict[str, Any] | None, cost: dict[str, Any] | None) -> dict[str, Any]:
    """The figures, in the form that other programs read."""
    found: dict[str, Any] = {"machine": machine(), "quick": options.quick}
    if taken is not None:
        found |= {
            **told([Takeover(*it) for it in taken["raw"]]),
            **{name: taken["requests"][name] for name in ("wrong", "hung", "unverified")},
            "traffic": taken["requests"],
            "gate_kill_refused": taken["gate_kill"]["refused"],
            "gate_kill": taken["gate_kill"],
            "death_known_ms": taken["death_known"],
        }
    if cost is not None:
        routes = cost["routes"]
        found |= {
            "proxy_added_ms": added(routes, "gate"),
            "requests_ratio": ratio(routes, "gate", "requests_per_s"),
            "chunks_ratio": ratio(routes, "gate", "chunks_per_s"),
            "routes": routes,
            "first_token_ms": {
                **cost["first_token"],
                "later_p99": round(cost["first_token"]["among_ms"]["p99"] - cost["first_token"]["alone_ms"]["p99"], 3),
            },
        }
    found["health_ms"] = {**(taken or {}).get("health", {}), **(cost or {}).get("health", {})}
    found["haproxy"] = {}
    if cost is not None and "haproxy" in cost["routes"]:
        found["haproxy"] |= {
            "proxy_added_ms": added(cost["routes"], "haproxy"),
            "requests_ratio": ratio(cost["routes"], "haproxy", "requests_per_s"),
            "chunks_ratio": ratio(cost["routes"], "haproxy", "chunks_per_s"),
        }
    if taken is not None and taken["haproxy"] is not None:
        found["haproxy"]["takeover_ms"] = taken["haproxy"]
    if taken is not None:
        found["raw_takeovers"] = [[it[0], round(it[1], 2), round(it[2], 2), it[3]] for it in taken["raw"]]
    return found


def told(takeovers: Sequence[Takeover]) -> dict[str, Any]:
    """What is said of takeovers."""
    by_fault = takeover.summary(takeovers)
    timeline = takeover.timeline(takeovers)
    return {"takeover_ms": by_fault["sigkill"], "takeover_by_fault_ms": by_fault, "timeline_ms": timeline}


def added(routes: dict[str, Any], name: str) -> dict[str, float]:
    """How much longer a request takes that way than directly, at 50 requests a second."""
    return {
        share: round(routes[name]["steady_ms"][share] - routes["direct"]["steady_ms"][share], 3)
        for share in ("p50", "p99")
    }


def ratio(routes: dict[str, Any], name: str, what: str) -> float:
    """How many times as much goes that way as through the bare pass-through."""
    return round(routes[name][what] / routes["bare"][what], 2)


def machine() -> dict[str, Any]:
    """What the figures are true of."""
    with open("/proc/cpuinfo") as lines:
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "cpu": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "haproxy": _version("haproxy", "-v"),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def _version(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.partition("\n")[0]


def merged(earlier: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """An earlier run with this one's takeovers added; of all else this run's word counts, where it has one."""
    found = {**earlier, **now, "quick": earlier["quick"] or now["quick"]}
    for name in ("haproxy", "health_ms"):  # each half of a run has its part
        found[name] = {**earlier[name], **now[name]}
    for name in ("traffic", "gate_kill"):
        counts = [run[name] for run in (earlier, now) if name in run]
        found |= {name: {key: sum(each[key] for each in counts) for key in counts[0]}} if counts else {}
    if raw := [*earlier.get("raw_takeovers", []), *now.get("raw_takeovers", [])]:
        found |= {**told([Takeover(*it) for it in raw]), "raw_takeovers": raw}
        found |= {name: found["traffic"][name] for name in ("wrong", "hung", "unverified")}
        found["gate_kill_refused"] = found["gate_kill"]["refused"]
    found["runs"] = [*earlier.get("runs", [earlier["machine"]]), now["machine"]]
    return found


def show(found: dict[str, Any]) -> None:
    """Tables for people."""
    if "takeover_by_fault_ms" in found:
        table = Table(title="From the fault, or the moment that the limits allow it, to the next correct answer, ms")
        for head in ("fault", "n", "p50", "p99", "worst"):
            table.add_column(head, justify="left" if head == "fault" else "right")
        for fault, figures in found["takeover_by_fault_ms"].items():
            table.add_row(fault, *(str(figures[name]) for name in ("n", "p50", "p99", "max")))
        if beside := found["haproxy"].get("takeover_ms"):
            table.add_row("sigkill, HAProxy", str(beside["n"]), str(beside["p50"]), "", str(beside["max"]))
        console.print(table)
        steps = ", ".join(f"{name} {ms:g}" for name, ms in found["timeline_ms"].items())
        console.print(f"where a SIGKILL's takeover goes, ms from the fault, each the median: {steps}")
        for size, ways in found.get("death_known_ms", {}).items():
            known = ", ".join(f"{way} {ways[way]['p50']:g} ms (worst {ways[way]['max']:g})" for way in death.WAYS)
            console.print(f"a process with {size} of its own is known to die: {known}, n={ways['n']}")
        console.print(
            f"{found['traffic']['answers']} answers: {found['wrong']} wrong, {found['unverified']} unverified, "
            f"{found['hung']} hung; {found['traffic']['errors']} requests ended with an error; gate killed: "
            f"{found['gate_kill_refused']} of {found['gate_kill']['connections']} connections refused"
        )
    if "routes" in found:
        table = Table(title="One request, and many")
        for head in ("route", "p50 ms", "p99 ms", "requests/s", "chunks/s"):
            table.add_column(head, justify="left" if head == "route" else "right")
        for name, figures in found["routes"].items():
            steady = figures["steady_ms"]
            rates = (f"{figures[key]:,}" for key in ("requests_per_s", "chunks_per_s"))
            table.add_row(name, f"{steady['p50']:.2f}", f"{steady['p99']:.2f}", *rates)
        console.print(table)
        console.print(
            f"the gate adds {found['proxy_added_ms']['p50']} ms (p99 {found['proxy_added_ms']['p99']}); beside a bare "
            f"pass-through {found['requests_ratio']} of its requests/s, {found['chunks_ratio']} of its chunks/s; first "
            f"token among {found['first_token_ms']['open_streams']} streams {found['first_token_ms']['later_p99']} ms "
            "later (p99)"
        )
    table = Table(title="Health, ms")
    for head in ("during", "readyz p50", "p99", "livez p50", "p99"):
        table.add_column(head, justify="left" if head == "during" else "right")
    for condition, figures in found["health_ms"].items():
        values = (str(figures[name][share]) for name in ("readyz", "livez") for share in ("p50", "p99"))
        table.add_row(condition.replace("_", " "), *values)
    console.print(table)


@contextmanager
def place() -> Iterator[tuple[Path, Children]]:
    """A folder, and processes that end with it."""
    folder = Path(tempfile.mkdtemp(prefix="rg-"))
    children = Children(folder / "log")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # or its processes would live on
    try:
        yield folder, children
    except BaseException:
        children.end()
        console.print(f"what went on is below {folder}")
        raise
    children.end()
    shutil.rmtree(folder)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="12 kills and short turns: under 4 minutes")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--add", type=Path, metavar="FILE", help="add this run's figures to those in a file")
    parser.add_argument("--only", choices=("takeover", "cost"), help="leave the other half out")
    parser.add_argument("--kills", type=int, help="SIGKILLs")
    parser.add_argument("--others", type=int, help="of each other fault")
    options = parser.parse_args(argv)
    options.kills = options.kills if options.kills is not None else (12 if options.quick else KILLS)
    options.others = options.others if options.others is not None else (1 if options.quick else OTHERS)
    options.haproxy_kills = 3 if options.quick else max(1, options.kills // 10)
    options.deaths = 2 if options.quick else 10
    options.rounds, options.seconds = (3, 2.0) if options.quick else (10, 4.0)
    os.environ.update(ENVIRONMENT)
    with place() as (folder, children):
        taken = asyncio.run(takeovers(options, folder, children)) if options.only != "cost" else None
        children.end()
        cost = asyncio.run(costs(options, folder, children)) if options.only != "takeover" else None
    found = report(options, taken, cost)
    if options.add is not None and options.add.exists():
        found = merged(json.loads(options.add.read_text()), found)
    show(found)
    for target in {options.json, options.add} - {None}:
        target.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
