"""What the tests of phases run in place of the engine and the keeper: the same, with phases made slower.

``slow_phases.py engine FOLDER ARGUMENT...`` and ``slow_phases.py keeper FOLDER SPEC``. FOLDER/slow has the seconds that
a phase loses and the names of those that do; when they were lost is written to FOLDER/nap-PHASE, as two boottimes in
nanoseconds. What is slowed is the work that the phase consists of, never the marks around it.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

what, folder, *arguments = sys.argv[1:]


def seconds_of(phase: str) -> float:
    """What this phase is to lose."""
    seconds, *asked = Path(folder, "slow").read_text().split()
    return float(seconds) if phase in asked else 0.0


def nap(phase: str) -> None:
    """Lose the time, once."""
    seconds, slept = seconds_of(phase), Path(folder, f"nap-{phase}")
    if not seconds or slept.exists():
        return
    began = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    time.sleep(seconds)
    slept.write_text(json.dumps([began, time.clock_gettime_ns(time.CLOCK_BOOTTIME)]))


def slowed(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def slow(*positional: Any, **named: Any) -> Any:
        nap(phase)
        return function(*positional, **named)

    return slow


class SlowImport(MetaPathFinder):
    """Finds nothing, slowly."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> None:
        if name == "transformers":
            nap("import")


def run_engine() -> None:
    nap("spawn")
    sys.meta_path.insert(0, SlowImport())
    from readmit import engine

    read_tokenizer, warm_up = engine.read_tokenizer, engine.warm_up

    def read(*positional: Any) -> Any:
        # What follows is imported by now.
        from weightcache import attachment

        attachment.Attachment.load_privately = slowed("load_weights", attachment.Attachment.load_privately)  # type: ignore[method-assign]
        return slowed("tokenizer_init", read_tokenizer)(*positional)

    def warm(generator: Any) -> None:
        slowed("kernel_warmup", warm_up)(generator)
        import uvicorn

        uvicorn.Server.startup = slowed("server_ready", uvicorn.Server.startup)  # type: ignore[method-assign]
        generator.stream = slowed("semantic_verify", generator.stream)

    engine.read_tokenizer, engine.warm_up = read, warm
    engine.main(arguments)


def run_keeper() -> None:
    from weightcache.keeper import __main__, lives

    lives.SessionEnd = slowed("detect", lives.SessionEnd)  # type: ignore[misc,assignment]
    backoff_s = lives.Slot.backoff_s

    def pause(slot: Any) -> float:
        return seconds_of("backoff") or backoff_s(slot)

    lives.Slot.backoff_s = pause  # type: ignore[method-assign]
    sys.exit(__main__.main(arguments))


if __name__ == "__main__":
    run_engine() if what == "engine" else run_keeper()
