"""What telemetry costs: an append to the journal, a daemon's start after a long past, a scrape, an attach, a collector.

Start, scrape and the console must cost the same after 100,000 recoveries as after 10, an append nothing beside a phase,
also on a disk that weights are read from, an attach with the journal at most 2 ms more than without, and a collector
that is dead nothing at all until the daemon ends.

    python benchmarks/telemetry.py [--json OUT] [--episodes 100000] [--appends 20000] [--scrapes 300] [--attaches 100]
"""

import argparse
import gc
import json
import logging
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from weightcache.episodes.state import resumed
from weightcache.journal import Context, Journal, boot_id, boottime_ns
from weightcache.journal.database import INSERT, Row, connect
from weightcache.memory import resident_bytes
from weightcache.recollection import recall
from weightcache.telemetry import Telemetry

SECOND = 1_000_000_000
PHASES = ("spawn", "import", "load_weights", "graph_capture", "semantic_verify")


class Residents:
    """An empty registry."""

    capacity = None
    resident_bytes = 0
    leases = 0
    generations: dict[str, Any] = {}  # noqa: RUF012 - read only
    claims: tuple[()] = ()
    refused: dict[str, int] = {}  # noqa: RUF012 - read only


UNSEEN = 60
"""Recoveries since the last snapshot, which a start has to replay: 900 events of at most 1,000."""


def past(episodes: int, first: int = 0) -> Iterator[Row]:
    """The events of recoveries of two slots, every tenth a miss."""
    boot, end, wall = boot_id(), boottime_ns(), time.time_ns()
    start = end - episodes * SECOND
    for number in range(episodes):
        slot, id_, begin = "ab"[number % 2], f"{first + number:032x}", start + number * SECOND
        missed = number % 10 == 0

        def row(offset_ms: int, kind: str, name: str = "", rank: int | None = None, **facts: object) -> Row:
            at = begin + offset_ms * 1_000_000  # noqa: B023 - used within this turn of the loop
            where = ("node", slot, id_, 1, rank)  # noqa: B023
            return (boot, at, wall - end + at, *where, kind, name, json.dumps(facts))

        yield row(0, "episode_open", "crash", fault_boottime_ns=begin, fault_clock="exit")
        yield row(1, "attempt_start")
        for place, phase in enumerate(PHASES):
            yield row(10 + 100 * place, "phase_begin", phase, rank=0)
            if phase == "load_weights":
                facts = {"reason": "fingerprint", "detail": "torch_version"} if missed else {}
                yield row(250, "lookup", "miss" if missed else "hit", rank=0, **facts)
            yield row(100 + 100 * place, "phase_end", phase, rank=0)
        yield row(600, "attempt_end", "ready")
        yield row(601, "episode_close", "ready", verified=True)


def appends(folder: Path, count: int, name: str = "append") -> dict[str, float]:
    """Microseconds of single appends."""
    journal = Journal(folder / f"{name}.sqlite3", Context("node", "a", "e" * 32, 1, 0))
    took = []
    for _ in range(count):
        began = time.perf_counter_ns()
        journal.append("phase_begin", "load_weights")
        took.append((time.perf_counter_ns() - began) / 1e3)
    journal.close()
    assert (journal.spooled, journal.lost) == (0, 0)
    p99 = statistics.quantiles(took, n=100)[98]
    return {f"{name}_median_us": statistics.median(took), f"{name}_p99_us": p99, f"{name}_max_us": max(took)}


def busy_appends(folder: Path, count: int) -> dict[str, float]:
    """The same while others read past the page cache from the same disk, and write and sync to it."""
    sys.path.append(str(Path(__file__).parents[1]))
    from tests.fixtures.busy_disk import busy_disk

    with busy_disk(folder):
        return appends(folder, count, "append_on_a_busy_disk")


def exporter(folder: Path, episodes: int, scrapes: int) -> dict[str, float]:
    """A daemon's exporter started on a journal with so many past recoveries."""
    path = folder / f"{episodes}.sqlite3"
    connection = connect(path)
    connection.execute("BEGIN")
    connection.executemany(INSERT, past(episodes))
    connection.execute("COMMIT")
    (events,) = connection.execute("SELECT count(*) FROM events").fetchone()
    connection.close()
    # What was exported before the restart is not exported again.
    folder.joinpath(f"{episodes}.jsonl.position").write_text(str(events))
    journal = Journal(path, checkpoints=True)
    rebuild_s, _ = start(journal, folder / f"{episodes}.jsonl")
    connection = connect(path)
    connection.executemany(INSERT, past(UNSEEN, episodes))
    (unseen,) = connection.execute("SELECT max(id) FROM events").fetchone()
    connection.close()
    folder.joinpath(f"{episodes}.jsonl.position").write_text(str(unseen))
    began = time.perf_counter()
    recall(journal)
    recall_s = time.perf_counter() - began
    began = time.perf_counter()
    resumed(journal.furthest_snapshot()).catch_up(journal)
    status_s = time.perf_counter() - began
    words = [sys.executable, "-m", "readmit.cli", "logs", "--episode", f"{episodes // 2:032x}"]
    began = time.perf_counter()
    told = subprocess.run(words, env={**os.environ, "READMIT_JOURNAL": str(path)}, capture_output=True, check=False)
    logs_s = time.perf_counter() - began
    assert told.returncode == 0, told.stderr
    start_s, telemetry = start(journal, folder / f"{episodes}.jsonl", kill=False)
    gc.freeze()  # as a daemon does once it serves; here it holds the benchmark's own past as well
    took, body = [], b""
    for _ in range(scrapes):
        began = time.perf_counter()
        with urllib.request.urlopen(f"http://127.0.0.1:{telemetry.port}/metrics") as response:
            body = response.read()
        took.append(1e3 * (time.perf_counter() - began))
    telemetry.close()
    journal.close()
    return {
        "episodes": episodes,
        "events": events,
        "rebuild_s": rebuild_s,
        "start_s": start_s,
        "recall_s": recall_s,
        "status_s": status_s,
        "logs_s": logs_s,
        "scrape_median_ms": statistics.median(took),
        "scrape_p99_ms": statistics.quantiles(took, n=100)[98],
        "series": sum(not line.startswith(b"#") for line in body.splitlines()),
        "body_kib": len(body) / 1024,
        "resident_mib": resident_bytes() / 2**20,
    }


def start(journal: Journal, spans: Path, *, kill: bool = True) -> tuple[float, Telemetry]:
    """Seconds until a new exporter has caught up; with ``kill`` it is left as by a SIGKILL."""
    telemetry = Telemetry(journal, Residents(), "127.0.0.1:0", spans, environ={})
    telemetry.start()
    began = time.perf_counter()
    telemetry.step()
    took = time.perf_counter() - began
    if kill:
        assert telemetry._server is not None
        telemetry._server[0].shutdown()
        telemetry._server[0].server_close()
    return took, telemetry


def collector(folder: Path, recoveries: int = 200) -> dict[str, float]:
    """Milliseconds of the exporter's steps and its end, without a collector and with one that is dead, in turn."""
    dead = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    os.environ |= dead
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    took: dict[str, list[float]] = {"without": [], "dead": []}
    ends = {}
    made = {}
    for name, environ in (("without", {}), ("dead", dead)):
        journal = Journal(folder / f"{name}.sqlite3", checkpoints=True)
        made[name] = journal, Telemetry(journal, Residents(), None, folder / f"{name}.spans", environ=environ)
        made[name][1].step()
    rows = list(past(recoveries))
    each = len(rows) // recoveries
    for turn in range(recoveries):
        for name, (journal, telemetry) in made.items():
            connection = connect(journal.path)  # type: ignore[arg-type]
            connection.executemany(INSERT, rows[turn * each : (turn + 1) * each])
            connection.close()
            began = time.perf_counter()
            telemetry.step()
            took[name].append(1e3 * (time.perf_counter() - began))
    for name, (_, telemetry) in made.items():
        began = time.perf_counter()
        telemetry.close()
        ends[name] = time.perf_counter() - began
    added = statistics.median(took["dead"]) - statistics.median(took["without"])
    return {"dead_collector_adds_ms": added, "end_s": ends["without"], "end_with_dead_collector_s": ends["dead"]}


def attaches(folder: Path, turns: int) -> dict[str, float]:
    """Milliseconds of an attach with a journal and without, in turn, on a real daemon."""
    import torch

    from weightcache.client import attach
    from weightcache.fingerprint import CacheConfig

    fields = {"model_path": "/none", "model_arch": "Bench", "dtype": "float32", "engine": "bench", "layout_id": "1"}
    config = CacheConfig(**fields, checkpoint_digest="d", torch_version=torch.__version__)
    socket = Path(tempfile.mkdtemp(prefix="bench-")) / "cache.sock"
    journal_path = folder / "attach.sqlite3"
    command = [sys.executable, "-m", "weightcache.daemon", "--socket", str(socket), "--metrics", "127.0.0.1:0"]
    daemon = subprocess.Popen([*command, "--journal", str(journal_path)])
    took: dict[bool, list[float]] = {True: [], False: []}
    try:
        while not socket.exists():
            time.sleep(0.05)
        for turn in range(turns + 1):
            for journaled in (True, False) if turn % 2 else (False, True):
                with torch.device("meta"):
                    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(64)))
                journal = Journal(journal_path if journaled else None, Context("node", "a", "e" * 32, 1, 0))

                journal.append("clock")  # an engine has marked other phases before it comes to its weights

                def load() -> None:
                    model.to_empty(device="cpu")  # noqa: B023 - used within this turn of the loop

                began = time.perf_counter()
                attach(model, config, load=lambda *_: load(), load_bytes=1, socket=socket, journal=journal)
                if turn:
                    took[journaled].append(1e3 * (time.perf_counter() - began))
                journal.close()
    finally:
        daemon.terminate()
        daemon.wait()
    on, off = statistics.median(took[True]), statistics.median(took[False])
    return {"attach_journaled_ms": on, "attach_silent_ms": off, "journal_adds_ms": on - off}


def in_child(folder: Path, episodes: int, scrapes: int) -> dict[str, float]:
    """The same in a process of its own, whose memory then is the exporter's alone."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, json.dumps(exporter(folder, episodes, scrapes)).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        said = file.read()
    os.waitpid(child, 0)
    return dict(json.loads(said))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", type=Path, help="write the figures there too")
    options.add_argument("--episodes", type=int, default=100_000)
    options.add_argument("--appends", type=int, default=20_000)
    options.add_argument("--scrapes", type=int, default=300)
    options.add_argument("--attaches", type=int, default=100)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        few, many = (in_child(folder, count, chosen.scrapes) for count in (10, chosen.episodes))
        writing = appends(folder, chosen.appends)
        writing |= busy_appends(folder, chosen.appends)
        others = {**collector(folder), **attaches(folder, chosen.attaches)}
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "kernel": platform.release()}
    result = {"machine": machine, "python": platform.python_version(), "load": os.getloadavg()}
    result |= {**writing, **others, "exporter": [few, many]}
    table = Table(title="Telemetry", box=None)
    for column in ("", f"after {few['episodes']} recoveries", f"after {many['episodes']:,} recoveries"):
        table.add_column(column, justify="right" if column else "left")
    for figure in few:
        table.add_row(figure, f"{few[figure]:,.2f}", f"{many[figure]:,.2f}")
    console = Console()
    console.print(table)
    for figure, value in {**writing, **others}.items():
        console.print(f"{figure}: {value:.2f}")
    if chosen.json:
        chosen.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
