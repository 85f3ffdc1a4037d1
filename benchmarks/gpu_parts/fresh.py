"""Fresh interpreters for the clients that are timed: imports done, a CUDA context made, nothing else.

They are started together, since importing takes seconds, and then used one after the other. A forked process would do
for everything else; but it pays, in the middle of what is timed, for every page that it shares with its parent.
"""

import base64
import gc
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


class Clients:
    """So many fresh processes, each good for one call."""

    def __init__(self, count: int, where: torch.device) -> None:
        here = str(Path(__file__).parent.parent)
        path = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._waiting = [
            subprocess.Popen(
                [sys.executable, "-m", "gpu_parts.fresh", str(where)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": path},
            )
            for _ in range(count)
        ]
        for process in self._waiting:
            _answer(process)

    def call(self, function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
        """What ``function(None, *arguments)`` returns in a fresh process, and that process's ``pace_s``."""
        process = self._waiting.pop()
        assert process.stdin is not None
        process.stdin.write(base64.b64encode(pickle.dumps((function, arguments))) + b"\n")
        process.stdin.flush()
        found = _answer(process)
        process.wait(60)
        return found

    def close(self) -> None:
        for process in self._waiting:
            process.kill()
            process.wait()


def _answer(process: "subprocess.Popen[bytes]") -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a fresh client ended with status {process.wait()}")
    answer: dict[str, Any] = json.loads(line)
    return answer


def _pace() -> float:
    """Seconds of a fixed piece of Python: on some machines a process is fast or slow from its start to its end."""
    began = time.perf_counter()
    sum(number * number for number in range(100_000))
    return time.perf_counter() - began


def main() -> None:
    where = torch.device(sys.argv[1])
    if where.type == "cuda":
        import cuda.bindings.driver  # noqa: F401 - an engine's imports

        import weightcache.arena.cuda_vmm  # noqa: F401
    from gpu_parts import legacy, roles  # noqa: F401
    from gpu_parts.processes import cuda_context

    out = os.fdopen(os.dup(1), "w")
    print(json.dumps({"context_s": cuda_context(where)}), file=out, flush=True)
    function, arguments = pickle.loads(base64.b64decode(sys.stdin.readline()))  # our own parent's
    gc.collect()
    pace = _pace()
    print(json.dumps({**function(None, *arguments), "pace_s": pace}), file=out, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
