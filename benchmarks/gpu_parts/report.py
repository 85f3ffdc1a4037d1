"""What a run found."""

import json
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_parts.machine import describe_machine


class Report:
    """Figures and what else was found, written after each, so that a run cut short keeps what it had."""

    def __init__(self, path: Path | None, device: str) -> None:
        self._path = path
        self._began = time.monotonic()
        self.rows: list[dict[str, Any]] = []
        self.parts: dict[str, Any] = {}
        self.machine = describe_machine(device)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def figure(self, work: str, values: list[float], unit: str, **facts: Any) -> None:
        """A row: what, how often, median and maximum, and what was asked of it (``must``, ``aim``)."""
        row = {"work": work, "n": len(values), "median": statistics.median(values), "max": max(values), "unit": unit}
        self.rows.append({**row, "values": values, **facts})
        bound = f"  must {facts['must']:g}" if "must" in facts else ""
        print(
            f"{work:<72} n={row['n']:<3} median {row['median']:10.4g} max {row['max']:10.4g} {unit}{bound}", flush=True
        )
        self.write()

    def part(self, name: str, run: Callable[[], Any], limit_s: float) -> None:
        """Run a part, unless time is up; a failure ends the part alone."""
        if self.elapsed_s > limit_s:
            self.parts[name] = {"not_run": f"time was up after {self.elapsed_s:.0f} s"}
            print(f"-- {name}: not run, no time left", flush=True)
            return
        began = time.monotonic()
        print(f"-- {name} (at {self.elapsed_s:.0f} s)", flush=True)
        try:
            self.parts[name] = {"found": run(), "seconds": round(time.monotonic() - began, 2)}
        except Exception:  # noqa: BLE001 - one figure's failure must not cost the others a run on the machine
            self.parts[name] = {"failed": traceback.format_exc()}
            print(traceback.format_exc(), flush=True)
        self.write()

    def write(self) -> None:
        if self._path:
            content = {"machine": self.machine, "seconds": self.elapsed_s, "figures": self.rows, "parts": self.parts}
            self._path.write_text(json.dumps(content, indent=1))
