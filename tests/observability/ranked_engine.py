"""An engine of real processes that does as a file tells it: ``python ranked_engine.py PORT SCRIPT``.

Each rank is a process that attaches a tiny model through the client loader, journals its phases and keeps its lease.
The script is JSON, read at every start and at every answer: ``ranks``, ``mode``, ``config`` (changes of the identity),
``die`` (phases in which the next starts are killed, one each), ``barred`` (a family of quantisation), ``pause_s`` by
phase, and ``answer``.
"""

import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from weightcache.errors import UnsupportedQuantForIPCError
from weightcache.journal import Journal, boottime_ns
from weightcache.sdnotify import Notifier

SCRIPT = Path(sys.argv[2])
QUICK = ("compile", "cache_alloc", "graph_capture")


class Phases:
    """The phases of one rank."""

    def __init__(self, journal: Journal, script: dict, doom: str | None) -> None:
        self.journal, self.script, self.doom = journal, script, doom

    def run(self, name: str) -> None:
        with self.journal.phase(name):
            self.reach(name)
            time.sleep(self.script.get("pause_s", {}).get(name, 0.02))

    def reach(self, name: str) -> None:
        if self.doom == name:
            os.kill(os.getppid() if self.journal.context.rank else os.getpid(), signal.SIGKILL)


def load(phases: Phases, rank: int, ranks: int) -> object:
    from tests.weightcache.models import config, loader, skeleton

    from weightcache.client import attach

    script, barred = phases.script, None
    if family := script.get("barred"):
        barred = UnsupportedQuantForIPCError(f"{family} cannot travel", detail=family)
    model = skeleton()
    identity = config("tiny", **{"tp_size": ranks, "tp_rank": rank, **script.get("config", {})})
    with phases.journal.phase("load_weights"):
        phases.reach("load_weights")
        loading = loader(model, seed=rank)
        attach(model, identity, mode=script["mode"], load=loading, load_bytes=1, journal=phases.journal, barred=barred)
    return model


def rank_process(journal: Journal, script: dict, doom: str | None, rank: int, ranks: int) -> None:
    """A further rank: it loads, and holds what it loaded until rank 0 is gone."""
    model = load(Phases(journal.bound(rank=rank), script, doom if rank == ranks - 1 else None), rank, ranks)
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.1)
    del model


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.say({"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.say({"choices": [{"text": read()["answer"], "logprobs": None}]})

    def say(self, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Silent."""


def read() -> dict:
    return json.loads(SCRIPT.read_text())


def main() -> None:
    began_ns, journal = boottime_ns(), Journal.from_environment()
    script = read()
    doom = script["die"].pop(0) if script.get("die") else None
    if doom is not None:
        fresh = SCRIPT.with_suffix(".new")
        fresh.write_text(json.dumps(script))
        fresh.replace(SCRIPT)
    ranks = script.get("ranks", 1)
    journal = journal.bound(rank=0) if ranks > 1 else journal
    phases = Phases(journal, script, None if doom == "load_weights" and ranks > 1 else doom)
    with journal.phase("import", began_ns=began_ns):
        import tests.weightcache.models  # noqa: F401 - torch
    phases.run("tokenizer_init")
    if ranks > 1:
        phases.run("distributed_init")
    for rank in range(1, ranks):
        if os.fork() == 0:
            rank_process(journal, script, doom if doom == "load_weights" else None, rank, ranks)
            os._exit(0)
    model = load(phases, 0, ranks)
    for name in QUICK:
        phases.run(name)
    with journal.phase("server_ready"):
        server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Answers)
        Notifier.from_environment().ready()
    server.serve_forever()
    del model


if __name__ == "__main__":
    main()
