"""What huge pages do for resident weights in host memory, beside small ones, in turn in one run.

- reserve, fill: what publishing them takes, besides reading a checkpoint.
- first touch: what a new engine's first pass over its weights pays for page faults.
- product: the same weights times a few rows, as a short prompt needs it: one thread, bfloat16.
- release: the last mapping and descriptor go.

    python benchmarks/huge_pages.py [--json OUT] [--mib 256] [--rounds 9]
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table

from weightcache.arena import huge_pages
from weightcache.arena.memfd import MemfdMapping, MemfdWriter

WIDTH = 1024
ROWS = 5
STEPS = ("reserve", "fill", "first touch", "product", "release")


def ms(step: Callable[[], object]) -> float:
    """How long a step takes, in milliseconds."""
    began = time.perf_counter()
    step()
    return (time.perf_counter() - began) * 1e3


def multiplied(weights: torch.Tensor, prompt: torch.Tensor) -> float:
    """How long all products take, in milliseconds."""
    return ms(lambda: [torch.mm(each, prompt) for each in weights])


def one_round(content: torch.Tensor, prompt: torch.Tensor) -> list[float]:
    """The `STEPS` of one arena, in milliseconds."""
    size = content.nbytes
    began = time.perf_counter()
    writer = MemfdWriter(size)
    times = [(time.perf_counter() - began) * 1e3, ms(lambda: writer.write(0, content))]
    (descriptor,) = writer.seal()
    mapping = MemfdMapping(descriptor, size)
    weights = torch.frombuffer(mapping._memory, dtype=torch.bfloat16).view(-1, WIDTH, WIDTH)
    pages = weights.view(torch.uint8).view(-1)[:: os.sysconf("SC_PAGE_SIZE")]
    times.append(ms(pages.sum))
    times.append(statistics.median(multiplied(weights, prompt) for _ in range(5)))
    began = time.perf_counter()
    del pages, weights, mapping
    os.close(descriptor)
    return [*times, (time.perf_counter() - began) * 1e3]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures to this file")
    parser.add_argument("--mib", type=int, default=256, help="size of the weights (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="of each kind (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    content = torch.randn(options.mib << 19).bfloat16()
    prompt = torch.randn(WIDTH, ROWS).bfloat16()
    took: dict[str, list[list[float]]] = {"small": [], "huge": []}
    with torch.inference_mode():
        for _ in range(options.rounds):
            with mock.patch.object(huge_pages, "reserve", return_value=False):
                took["small"].append(one_round(content, prompt))
            took["huge"].append(one_round(content, prompt))
    medians = {
        kind: {
            step: round(statistics.median(column), 2)
            for step, column in zip(STEPS, zip(*rows, strict=True), strict=True)
        }
        for kind, rows in took.items()
    }
    table = Table("ms", *STEPS, title=f"{options.mib} MiB of weights, medians of {options.rounds}")
    for kind, found in medians.items():
        table.add_row(f"{kind} pages", *(f"{value:g}" for value in found.values()))
    Console().print(table)
    if options.json:
        machine = {"cpus": os.cpu_count(), "kernel": platform.release(), "python": sys.version.split()[0]}
        options.json.write_text(
            json.dumps({"mib": options.mib, "n": options.rounds, "ms": medians, "machine": machine}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
