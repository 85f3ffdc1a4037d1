"""The watcher on NVML as the daemon runs it, on a healthy GPU and through a fault that a program caused."""

import time
from typing import Any

from gpu_parts.processes import Talk
from weightcache.gpu_watch import Finding, GpuWatch


def watch(talk: Talk) -> dict[str, Any]:
    """Read what the watcher reads of a healthy GPU, say so, and wait for the fault that somebody causes then."""
    import pynvml

    findings: list[Finding] = []
    watcher = GpuWatch(findings.append)
    began = time.perf_counter()
    uuids = watcher.start()
    started = time.perf_counter() - began
    library: Any = watcher._nvml
    device = library._devices[uuids[0]]
    facts: dict[str, Any] = {
        "uuids": uuids,
        "driver": watcher._driver,
        "start_s": started,
        "xid_events_registered": library._events is not None,
        "health": {uuid: library.health(uuid)._asdict() for uuid in uuids},
        "ecc_mode": pynvml.nvmlDeviceGetEccMode(device),
        "remapped_rows": pynvml.nvmlDeviceGetRemappedRows(device),
    }
    told: list[int] = []
    wait = library.wait

    def noted(timeout_s: float) -> Any:
        fault = wait(timeout_s)
        if fault is not None:
            told.append(fault.number)
        return fault

    library.wait = noted
    talk.send("watching")
    deadline = time.monotonic() + 30
    still_watched = True
    while time.monotonic() < deadline and not told:
        still_watched = watcher.step(0.5)
    facts |= {
        "xids": told,
        "findings": [finding._asdict() for finding in findings],
        "still_watched": still_watched,
        "health_after": {uuid: library.health(uuid)._asdict() for uuid in uuids},
    }
    library.close()
    return facts
