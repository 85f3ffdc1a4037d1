"""The live part: a real node is scraped while its engines die, and what Prometheus then says is what its journal says.

What clients ask of a gate is in no journal; here the clients count it themselves.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tests.observability import answers, expressions
from tests.observability.facts import Facts, Found
from tests.observability.figures import label, members
from tests.observability.lab import Lab
from tests.observability.servers import Prometheus, prometheus, wait_for
from tests.readmit.nodes import place

from readmit.gate.metrics import REQUEST_OUTCOMES
from readmit.gate.slots import REVOCATIONS
from readmit.probes import RESULTS
from weightcache.slo import Objectives
from weightcache.vocabulary import SLOT_STATES

OUTCOMES: Final = {200: "answered", 503: "not_ready"}
CALM_NS: Final = 400_000_000
"""A scrape is compared where the journal is silent for so long around it: what a process counts just before it journals
it would be on one side only."""


class Live:
    """A node's run, as seen by its clients, by Prometheus and by its journal."""

    def __init__(self, lab: Lab, server: Prometheus) -> None:
        self.lab, self.server = lab, server
        self.asked: Counter[str] = Counter()
        self.slowest_s = 0.0

    def ask(self, times: int, status: int) -> None:
        """Requests through the gate, all of which must end alike."""
        for _ in range(times):
            began = time.monotonic()
            assert self.lab.ask() == status
            self.slowest_s = max(self.slowest_s, time.monotonic() - began) if status == 200 else self.slowest_s
            self.asked[OUTCOMES[status]] += 1

    def run(self) -> None:
        """Start, be refused, be answered, lose an engine beside another one, lose the last one that was left."""
        lab = self.lab
        wait_for(lambda: self._up() == 2, "both targets are scraped")
        self.ask(2, 503)
        for slot in lab.slots:
            lab.until_closed(slot, 1)
        wait_for(lambda: lab.ready(*lab.slots), "the gate is open")
        self.ask(5, 200)
        assert lab.fault("a").path == "hit"
        wait_for(lambda: lab.ready(*lab.slots), "slot a is back")
        self.ask(3, 200)

    def calm(self) -> float:
        """The time of a scrape of both targets around which nothing happened, after all of the run."""
        after_s = time.time()

        def found() -> float | None:
            scraped = self.server.api("query", query=f"readmit_gate_ready[{math.ceil(time.time() - after_s) + 1}s]")
            times = [at for series in scraped["result"] for at, _ in series["values"] if at > after_s + 0.5]
            events = [row[0] for row in self._events()]
            return next((at for at in times if all(abs(at * 1e9 - it) > CALM_NS for it in events)), None)

        result = wait_for(found, "a scrape between two events")
        assert result is not None
        time.sleep(CALM_NS / 1e9 + 0.3)
        if any(abs(result * 1e9 - at) <= CALM_NS for (at,) in self._events()):
            return self.calm()
        return result

    def _events(self) -> list[tuple[int]]:
        import sqlite3

        with sqlite3.connect(self.lab.state_dir / "journal.sqlite3") as connection:
            return connection.execute("SELECT wall_ns FROM events ORDER BY id DESC LIMIT 400").fetchall()

    def _up(self) -> float:
        return sum(self.server.query("up").values())
