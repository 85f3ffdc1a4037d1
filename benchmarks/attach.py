"""How long attaching to resident weights takes, beside loading the same weights from disk.

A synthetic checkpoint (30,000 tensors, 4 GiB by default) is published once through the real daemon; then fresh
processes attach and load from disk in turn. The skeleton is given to both: the clock of an attach runs from connecting
to the last buffer. The bf16 row reads bytes into private memory; the FP8 row's disk load quantises what it reads in
blocks of 128 x 128 as well, as an engine's post-processing would.

    python benchmarks/attach.py [--json OUT] [--tensors 30000] [--gib 4] [--runs 5]
"""

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from weightcache import CacheConfig, attach
from weightcache.checkpoint import Checkpoint
from weightcache.starting_state import page_cache_fraction

WIDTH = 280
BLOCK = 128
SHARDS = 8


class Layer(nn.Module):
    """One matrix as a checkpoint stores it: bf16, or FP8 with the inverse scale of every block."""

    def __init__(self, rows: int, fp8: bool) -> None:
        super().__init__()
        dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
        self.weight = nn.Parameter(torch.empty(rows, WIDTH, dtype=dtype), requires_grad=False)
        if fp8:
            blocks = (-(-rows // BLOCK), -(-WIDTH // BLOCK))
            self.weight_scale_inv = nn.Parameter(torch.empty(blocks, dtype=torch.float32), requires_grad=False)


class Model(nn.Module):
    """Layers in groups of 100, as the experts of a mixture lie in its decoder layers."""

    def __init__(self, tensors: int, gib: float, fp8: bool) -> None:
        super().__init__()
        layers = tensors // 2 if fp8 else tensors
        rows = max(1, round(gib * 2**30 / 2 / WIDTH / layers))
        groups = [[Layer(rows, fp8) for _ in range(start, min(start + 100, layers))] for start in range(0, layers, 100)]
        self.groups = nn.ModuleList(nn.ModuleList(group) for group in groups)


def skeleton(options: argparse.Namespace) -> Model:
    with torch.device("meta"):
        return Model(options.tensors, options.gib, options.dtype == "fp8")


def identity(options: argparse.Namespace) -> CacheConfig:
    return CacheConfig(
        model_path=str(options.folder),
        model_arch="Synthetic",
        checkpoint_digest="synthetic",
        quant_method="fp8" if options.dtype == "fp8" else "none",
        dtype="bfloat16",
        torch_version=torch.__version__,
        engine="benchmark",
        layout_id="benchmark",
    )


def write_checkpoint(folder: Path, tensors: int, gib: float, fp8: bool) -> None:
    """A bf16 checkpoint with the weights of `Model`, in `SHARDS` files."""
    from safetensors.torch import save_file

    with torch.device("meta"):
        model = Model(tensors, gib, fp8)
    names = [(name, tuple(value.shape)) for name, value in model.named_parameters() if name.endswith("weight")]
    torch.manual_seed(0)
    pool = torch.randn(1 << 24).to(torch.bfloat16)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["Synthetic"], "model_type": "synthetic"}))
    index, total = {}, 0
    for shard in range(SHARDS):
        members = names[shard::SHARDS]
        file = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        content = {}
        for number, (name, shape) in enumerate(members):
            count = shape[0] * shape[1]
            start = (number * 7919) % (pool.numel() - count)
            content[name] = pool[start : start + count].clone().view(shape)
            index[name] = file
            total += count * 2
        save_file(content, folder / file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    )


def read_from_disk(model: Model, options: argparse.Namespace) -> None:
    """Every tensor into private memory, quantised on the way where the model is FP8."""
    modules = dict(model.named_modules())
    for name, tensor in Checkpoint.open(options.folder).read():
        layer = modules[name.rpartition(".")[0]]
        if options.dtype == "fp8":
            layer.weight, layer.weight_scale_inv = (nn.Parameter(part, False) for part in quantise(tensor))
        else:
            layer.weight = nn.Parameter(tensor, requires_grad=False)


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 in blocks of 128 x 128, and the inverse scale of each; vectorised over the whole matrix."""
    rows, columns = weight.shape
    padded = nn.functional.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    tall, wide = padded.shape[0] // BLOCK, padded.shape[1] // BLOCK
    largest = padded.abs().view(tall, BLOCK, -1).amax(1).view(tall, wide, BLOCK).amax(2)
    scale = largest.float().clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    factors = (1 / scale).repeat_interleave(BLOCK, dim=1)[:, None, :columns]
    scaled = padded.view(tall, BLOCK, -1)[:, :, :columns].float() * factors
    return scaled.view(-1, columns)[:rows].to(torch.float8_e4m3fn), scale


def child(options: argparse.Namespace) -> None:
    """One measurement in this fresh process, printed as JSON."""
    model = skeleton(options)
    began = time.perf_counter()
    if options.child == "disk":
        read_from_disk(model, options)
        print(json.dumps({"ms": (time.perf_counter() - began) * 1000}))
        return
    outcome = attach(
        model,
        identity(options),
        load=lambda progress: read_from_disk(model, options),
        socket=options.socket,
        verify=options.child == "verify",
    )
    took = (time.perf_counter() - began) * 1000
    parts = {name: seconds * 1000 for name, seconds in outcome.phases.items()}
    print(json.dumps({"ms": took, "path": outcome.path, "bytes": outcome.bytes, "parts": parts}))
    if options.child == "publish":
        sys.stdout.flush()
        signal.pause()


def measure(options: argparse.Namespace, kind: str) -> dict[str, Any]:
    done = subprocess.run(_child_command(options, kind), check=True, stdout=subprocess.PIPE)
    measured: dict[str, Any] = json.loads(done.stdout)
    if kind != "disk" and measured["path"] != "hit":
        raise SystemExit(f"an attach that should hit was a {measured['path']}")
    return measured


def _child_command(options: argparse.Namespace, kind: str) -> list[str]:
    values = {name: getattr(options, name) for name in ("tensors", "gib", "dtype", "folder", "socket")}
    pairs = [text for name, value in values.items() for text in (f"--{name}", str(value))]
    return [sys.executable, __file__, "--child", kind, *pairs]


def rows(options: argparse.Namespace, console: Console) -> Iterator[dict[str, Any]]:
    """One result for each dtype."""
    for dtype in ("bf16", "fp8"):
        options.dtype = dtype
        options.folder = options.work / dtype
        console.print(f"[dim]{dtype}: writing {options.gib} GiB in {options.tensors} tensors ...")
        write_checkpoint(options.folder, options.tensors, options.gib, dtype == "fp8")
        with subprocess.Popen(_child_command(options, "publish"), stdout=subprocess.PIPE) as publisher:
            assert publisher.stdout is not None
            published = json.loads(publisher.stdout.readline())
            publisher.kill()  # what follows attaches to weights whose publisher is dead
        if published["path"] != "miss" or not published["bytes"]:
            raise SystemExit(f"publishing failed: {published}")
        attaches, verifies, disks = [], [], []
        cached = page_cache_fraction(sorted(options.folder.glob("*.safetensors")))
        for run in range(options.runs):
            console.print(f"[dim]{dtype}: run {run + 1} of {options.runs}")
            attaches.append(measure(options, "attach"))
            disks.append(measure(options, "disk"))
            verifies.append(measure(options, "verify"))
        yield summary(options, attaches, verifies, disks, cached, published["bytes"])
        shutil.rmtree(options.folder)


def summary(
    options: argparse.Namespace,
    attaches: list[dict[str, Any]],
    verifies: list[dict[str, Any]],
    disks: list[dict[str, Any]],
    cached: float | None,
    arena_bytes: int,
) -> dict[str, Any]:
    attach_ms = [run["ms"] for run in attaches]
    disk_ms = statistics.median(run["ms"] for run in disks)
    return {
        "dtype": options.dtype,
        "tensors": options.tensors,
        "gib": options.gib,
        "arena_gib": round(arena_bytes / 2**30, 3),
        "n": len(attaches),
        "page_cache_fraction": cached,
        "attach_ms": {"p50": round(statistics.median(attach_ms), 1), "max": round(max(attach_ms), 1)},
        "attach_parts_ms": {
            name: round(statistics.median(run["parts"][name] for run in attaches), 1) for name in attaches[0]["parts"]
        },
        "verify_ms": round(statistics.median(run["parts"]["verify"] for run in verifies), 1),
        "disk_load_ms": {"p50": round(disk_ms, 1)},
        "ratio": round(disk_ms / statistics.median(attach_ms), 1),
    }


def table(results: list[dict[str, Any]]) -> Table:
    shown = Table(title=f"Attach against disk load, fresh processes, {machine()}")
    for column in (
        "dtype",
        "tensors",
        "GiB",
        "n",
        "attach p50 / max ms",
        "full verify ms",
        "disk load p50 ms",
        "ratio",
    ):
        shown.add_column(column, justify="right")
    for row in results:
        both = f"{row['attach_ms']['p50']} / {row['attach_ms']['max']}"
        values = (row["dtype"], row["tensors"], row["gib"], row["n"], both, row["verify_ms"])
        shown.add_row(*map(str, (*values, row["disk_load_ms"]["p50"], f"{row['ratio']} x")))
    return shown


def machine() -> str:
    return f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, page cache warm"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--tensors", type=int, default=30_000)
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--work", type=Path, help="where checkpoints are written (default: a temporary folder)")
    for hidden in ("--child", "--dtype"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    for hidden in ("--folder", "--socket"):
        parser.add_argument(hidden, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
        return
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(dir=options.work, prefix="attach-") as folder:
        options.work = Path(folder)
        options.socket = options.work / "cache.sock"
        os.environ["READMIT_STATE"] = folder
        os.environ["OMP_WAIT_POLICY"] = "passive"  # threads that spin for each other slow every row on a busy machine
        command = [
            sys.executable,
            "-m",
            "weightcache.daemon",
            "--socket",
            str(options.socket),
            "--metrics",
            "127.0.0.1:0",
        ]
        with subprocess.Popen(command) as daemon:
            try:
                while not options.socket.exists():
                    time.sleep(0.01)
                results = list(rows(options, console))
            finally:
                daemon.terminate()
    Console().print(table(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
