"""How long until a death is known, by the tripwire and by the pidfd of the same process, which holds so much memory."""

import mmap
import select
import signal
import subprocess
import sys
import threading
import time
from typing import Any, Final

from gate_parts.processes import FOLDER, quantile
from readmit.gate.tripwire import Tripwire
from weightcache.process import Process

GIB: Final = 1 << 30
SIZES: Final = (0.6, 1.0, 4.0)
"""GiB of memory of its own; 0.6 is what the reference engine has."""
WAYS: Final = ("tripwire", "pidfd")


def measure(deaths: int) -> dict[str, Any]:
    """Milliseconds from SIGKILL, the sizes in turn.

    Args:
        deaths: of each size.
    """
    taken: dict[float, list[tuple[float, float]]] = {size: [] for size in SIZES}
    for _ in range(deaths):
        for size in SIZES:
            taken[size].append(death(size))
    found: dict[str, Any] = {}
    for size, times in taken.items():
        ways = dict(zip(WAYS, zip(*times, strict=True), strict=True))
        found[f"{size:g} GiB"] = {
            way: {share: round(quantile(ms, q), 2) for share, q in (("p50", 0.5), ("max", 1.0))}
            for way, ms in ways.items()
        } | {"n": deaths}
    return found


def death(gib: float) -> tuple[float, float]:
    """Kill a process with so much memory; milliseconds until the tripwire tells, and until the pidfd does."""
    argv = [sys.executable, "-m", "gate_parts.death", str(gib)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=FOLDER) as victim:
        assert victim.stdout is not None
        victim.stdout.readline()
        process = Process.open(victim.pid)
        assert process is not None
        tripped, told = threading.Event(), list[float]()

        def trip() -> None:
            told.append(time.perf_counter())
            tripped.set()

        wire = Tripwire(process.pid, process.start_ticks, trip)
        time.sleep(0.05)  # until it waits
        began = time.perf_counter()
        process.send_signal(signal.SIGKILL)
        select.select([process], [], [])
        ended = time.perf_counter()
        tripped.wait()
        wire.cut()
        process.close()
    return (told[0] - began) * 1000, (ended - began) * 1000


if __name__ == "__main__":
    memory = mmap.mmap(-1, int(float(sys.argv[1]) * GIB), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for place in range(0, len(memory), mmap.PAGESIZE):
        memory[place] = 1
    print("here", flush=True)
    time.sleep(3600)
