"""A fleet on one Prometheus: how long the rules take for 1,000 nodes, and what the nodes' series weigh on disk.

Nothing here is scraped: 1,000 nodes x 30 days would take 30 days. One exporter with two slots and some recoveries
behind it gives the series; every node gets them under its own name, with running time that runs and a recovery every
few days at its own moment. Of these a real Prometheus gets, as blocks:

* of every node the series that rules read, over the time that they look back at: 75 minutes, a sample a minute;
* what rules have recorded, over all 30 days, a sample a minute: longer windows read nothing else;
* of one node everything, over a day, to weigh a sample. Disk for the fleet is that times its samples, said as such.

It evaluates the committed rules, more often than they ask for, until every group was evaluated three times; what
counts is the slowest round of each.

    python benchmarks/fleet.py [--nodes 1000] [--json OUT]          about four minutes, 3 GiB of memory and of disk
"""

import argparse
import json
import os
import platform
import re
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple, TextIO

import yaml
from prometheus_client import generate_latest
from rich.console import Console
from rich.table import Table
from telemetry import Residents, past

from weightcache.journal import Journal
from weightcache.journal.database import INSERT, connect
from weightcache.telemetry import Telemetry

ALERTS: Final = Path(__file__).parents[1] / "alerts"
RULES: Final = ("readmit.rules.yaml", "readmit.alerts.yaml")
STEP_S: Final = 60
"""Between two samples: the interval of the recording rules, and of a scrape that is seldom enough for a thousand."""
BACK_S: Final = 75 * 60
"""Rules read raw series no further back than an hour."""
AHEAD_S: Final = 15 * 60
"""Samples of the future, so that the present has some while the rules are evaluated."""
DAYS: Final = 30
DAY_S: Final = 86_400
FAULT_EVERY_S: Final = 5 * DAY_S
RECOVERY_S: Final = 32
LIMIT_S: Final = 5.0
ROUNDS: Final = 3
ROUND_S: Final = 20

_RUNNING: Final = {
    "readmit_observed_seconds_total": 1.0,
    "readmit_service_observed_seconds_total": 1.0,
    "readmit_journal_last_event_timestamp_seconds": 1.0,
    "weightcache_resident_byte_seconds_total": 1e9,
    "process_cpu_seconds_total": 0.01,
    "readmit_probes_total": 0.1,
}
"""Counters that run, a second. What else counts steps with each recovery."""
_STEPS: Final = ("_total", "_bucket", "_count", "_sum")


class Series(NamedTuple):
    """One series of one node."""

    name: str
    labels: str
    value: float

    def at(self, seconds: float, faults: int) -> float:
        """Its value so many seconds, and recoveries, later."""
        if self.name in _RUNNING:
            return round(self.value + _RUNNING[self.name] * seconds, 1) if self.value else self.value
        return self.value * (1 + faults) if self.value and self.name.endswith(_STEPS) else self.value


def one_node(folder: Path) -> list[Series]:
    """The series of an exporter with two slots and a past."""
    path = folder / "node.sqlite3"
    connection = connect(path)
    connection.executemany(INSERT, past(200))
    connection.close()
    journal = Journal(path, checkpoints=True)
    telemetry = Telemetry(journal, Residents(), None, environ={})
    telemetry.step()
    lines = generate_latest(telemetry.registry).decode().splitlines()
    telemetry.close()
    journal.close()
    found = [re.fullmatch(r"([a-z_0-9]+)(?:\{(.*)\})? (\S+)", line) for line in lines if not line.startswith("#")]
    series = [Series(it[1], it[2] or "", float(it[3])) for it in found if it is not None]
    return [*series, *(Series("weightcache_next_start_would_hit", f'reason="",slot="{slot}"', 1) for slot in "ab")]


def read_by_rules() -> set[str]:
    """The names of all metrics in the committed rules."""
    groups = [group for name in RULES for group in yaml.safe_load((ALERTS / name).read_text())["groups"]]
    text = " ".join(rule["expr"] for group in groups for rule in group["rules"])
    return set(re.findall(r"\b(?:readmit|weightcache)_[a-z_0-9]+", text))


def write(file: TextIO, series: list[Series], node: int, nodes: int, times: range, now: int) -> int:
    """Write a node's samples as OpenMetrics; returns how many."""
    instance = f'instance="node-{node:04}:9464",job="readmit"'
    place = FAULT_EVERY_S * node // nodes
    faults = [(at - now + FAULT_EVERY_S - place) // FAULT_EVERY_S for at in times]
    for one in series:
        start = f"{one.name}{{{one.labels + ',' if one.labels else ''}{instance}}} "
        if one.name in _RUNNING or one.name.endswith(_STEPS):
            file.writelines(
                f"{start}{one.at(at - times[0], fault)} {at}\n" for at, fault in zip(times, faults, strict=True)
            )
        else:
            start += f"{one.value} "
            file.writelines(f"{start}{at}\n" for at in times)
    file.writelines(f"up{{{instance}}} 1 {at}\n" for at in times)
    return (len(series) + 1) * len(times)


def recorded(times: range) -> Iterator[str]:
    """What the rules of 30 days would have recorded: the series that longer windows read."""
    for clock in ("slot", "service"):
        for kind, rate in (("burned", 0.001), ("observed", 2.0)):
            start = f'job_clock:readmit_{kind}_seconds:rate5m{{clock="{clock}",job="readmit"}} '
            yield from (f"{start}{rate * (1 + at % 7 / 100):.6f} {at}\n" for at in times)
    for result, rate in (("hit", 0.002), ("miss", 0.0001)):
        start = f'job_result:weightcache_lookups:rate5m{{job="readmit",result="{result}"}} '
        yield from (f"{start}{rate * (1 + at % 11 / 100):.6f} {at}\n" for at in times)


def make_blocks(text: Path, into: Path) -> float:
    """Have promtool make blocks of a file, and remove it; returns the seconds that took."""
    with text.open("a") as file:
        file.write("# EOF\n")
    began = time.perf_counter()
    command = ["promtool", "tsdb", "create-blocks-from", f"--max-block-duration={24 * DAYS}h", "openmetrics", "--quiet"]
    subprocess.run([*command, str(text), str(into)], check=True, capture_output=True)
    text.unlink()
    return time.perf_counter() - began


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def ask(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.load(answer)["data"]


def evaluate(folder: Path) -> dict[str, Any]:
    """Run the rules in a Prometheus on the blocks there until each group was evaluated a few times."""
    for name in RULES:
        text = (ALERTS / name).read_text()
        (folder / name).write_text(re.sub(r'interval: "?\d+\w+"?', f"interval: {ROUND_S}s", text))
    config = {
        "global": {"evaluation_interval": f"{ROUND_S}s"},
        "rule_files": list(RULES),
        # The blocks reach into the future; without this nothing could be recorded before their end.
        "storage": {"tsdb": {"out_of_order_time_window": "1h"}},
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    port = 20_000 + os.getpid() % 20_000
    url = f"http://127.0.0.1:{port}"
    options = [f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data"]
    options += [f"--web.listen-address=127.0.0.1:{port}", "--storage.tsdb.retention.time=10y", "--log.level=error"]
    process = subprocess.Popen(["prometheus", *options])
    rounds: dict[str, dict[str, float]] = {}
    groups: list[dict[str, Any]] = []
    try:
        while not groups or any(len(seen) < ROUNDS for seen in rounds.values()):
            time.sleep(2)
            if process.poll() is not None:
                raise SystemExit(f"prometheus ended with {process.returncode}")
            try:
                groups = ask(f"{url}/api/v1/rules")["groups"]
            except OSError:
                continue
            for group in groups:
                seen = rounds.setdefault(group["name"], {})
                if not group["lastEvaluation"].startswith("0001"):
                    seen[group["lastEvaluation"]] = group["evaluationTime"]
        resident = int(Path(f"/proc/{process.pid}/status").read_text().partition("VmRSS:")[2].split()[0]) / 1024
        series = ask(f"{url}/api/v1/query?query=count(up)")["result"][0]["value"][1]
    finally:
        process.terminate()
        process.wait()
    rules = [(rule["evaluationTime"], rule["name"]) for group in groups for rule in group["rules"]]
    wrong = [rule["lastError"] for group in groups for rule in group["rules"] if rule.get("lastError")]
    if wrong:
        raise SystemExit(f"rules that fail: {wrong}")
    return {
        "nodes_seen": int(series),
        "rules": len(rules),
        "groups_s": {name: max(seen.values()) for name, seen in rounds.items()},
        "all_groups_s": sum(max(seen.values()) for seen in rounds.values()),
        "slowest_rules_s": {name: took for took, name in sorted(rules, reverse=True)[:5]},
        "prometheus_mib": resident,
    }


def measure(nodes: int, folder: Path, console: Console) -> dict[str, Any]:
    everything = one_node(folder)
    names = read_by_rules()
    some = [one for one in everything if one.name in names]
    now = int(time.time()) // STEP_S * STEP_S
    text = folder / "samples.txt"
    console.log(f"{len(everything)} series a node, {len(some)} of them read by rules")
    with text.open("w") as file:
        weighed = write(file, everything, 0, nodes, range(now - 2 * DAY_S, now - DAY_S, STEP_S), now)
    make_blocks(text, folder / "weighed")
    sample_bytes = size_of(folder / "weighed") / weighed
    with text.open("w") as file:
        file.writelines(recorded(range(now - DAYS * DAY_S, now, STEP_S)))
    make_blocks(text, folder / "data")
    now = int(time.time()) // STEP_S * STEP_S
    with text.open("w", buffering=1 << 20) as file:
        times = range(now - BACK_S, now + AHEAD_S, STEP_S)
        samples = sum(write(file, some, node, nodes, times, now) for node in range(nodes))
    console.log(f"{samples:,} samples of {nodes} nodes are written, {text.stat().st_size >> 20} MiB of text")
    took = make_blocks(text, folder / "data")
    console.log(f"blocks made in {took:.0f} s; the rules run")
    found = evaluate(folder)
    fleet = nodes * (len(everything) + 1)
    disk = {
        f"disk_{days}_days_gib_at_{every}_s": fleet * days * DAY_S / every * sample_bytes / 2**30
        for days, every in ((30, 60), (30, 15))
    }
    return {
        "nodes": nodes,
        "series_a_node": len(everything) + 1,
        "series_of_the_fleet": fleet,
        "series_a_node_read_by_rules": len(some) + 1,
        "samples_loaded": samples,
        "bytes_a_sample": sample_bytes,
        **disk,
        **found,
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--nodes", type=int, default=1000)
    options.add_argument("--json", type=Path, help="write the figures there too")
    chosen = options.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory(prefix="fleet-") as name:
        result = measure(chosen.nodes, Path(name), console)
    version = subprocess.run(["prometheus", "--version"], capture_output=True, text=True, check=True).stdout.split()[2]
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    machine = {"cpu": model[1] if model else platform.machine(), "cores": os.cpu_count(), "prometheus": version}
    machine |= {"kernel": platform.release(), "load": [round(it, 1) for it in os.getloadavg()]}
    table = Table(title=f"{chosen.nodes:,} nodes, {DAYS} days, a sample every {STEP_S} s", box=None)
    table.add_column("")
    table.add_column("", justify="right")
    for key, value in result.items():
        rows = value.items() if isinstance(value, dict) else [(key, value)]
        for label, figure in rows:
            text = f"{figure:,.3f}" if isinstance(figure, float) else f"{figure:,}"
            table.add_row(label if label == key else f"{key} {label}", text)
    console.print(table)
    verdict = "kept" if result["all_groups_s"] < LIMIT_S else "NOT KEPT"
    console.print(f"all rules once: {result['all_groups_s']:.2f} s, of {LIMIT_S:g} s allowed: {verdict}")
    if chosen.json:
        chosen.json.write_text(json.dumps({"machine": machine, **result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
