"""What the kubelet does with a container's probes, second by second, without waiting.

After https://kubernetes.io/docs/concepts/configuration/liveness-readiness-startup-probes/: liveness and readiness are
asked once start-up has succeeded; a container is killed after ``failureThreshold`` failures in a row.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

Answers = Callable[[str, float], bool]
"""Whether the probe of a route succeeds at a time, in seconds since the container started."""


class Life(NamedTuple):
    """``killed_s`` is None while nobody kills; ``ready_s`` are the times at which readiness changed, from not ready."""

    killed_s: float | None
    by: str | None
    ready_s: list[float]


def route(probe: dict[str, Any]) -> str:
    return str(probe["httpGet"]["path"]) if "httpGet" in probe else " ".join(probe["exec"]["command"])


def live(container: dict[str, Any], answers: Answers, until_s: float) -> Life:
    """Run a container's probes until it is killed or a time has come."""
    started = "startupProbe" not in container
    due = {kind: float(container[kind].get("initialDelaySeconds", 0)) for kind in KINDS if kind in container}
    failures = dict.fromkeys(due, 0)
    ready, changes = False, []
    while True:
        asked = [kind for kind in due if (kind == "startupProbe") != started]
        if not asked:
            return Life(None, None, changes)
        kind = min(asked, key=lambda it: due[it])
        probe, at = container[kind], due[kind]
        if at > until_s:
            return Life(None, None, changes)
        good = answers(route(probe), at)
        # One without an answer costs its time-out, and is over only then.
        over = at if good else at + probe.get("timeoutSeconds", 1)
        due[kind] = max(at + probe.get("periodSeconds", 10), over)
        failures[kind] = 0 if good else failures[kind] + 1
        if kind == "startupProbe" and good:
            started = True
            due = {it: max(time, at) for it, time in due.items()}
        failed = failures[kind] >= probe.get("failureThreshold", 3)
        if kind == "readinessProbe":
            if good != ready and (good or failed):
                ready = good
                changes.append(over)
        elif failed:
            return Life(over, kind, changes)


KINDS = ("startupProbe", "livenessProbe", "readinessProbe")
