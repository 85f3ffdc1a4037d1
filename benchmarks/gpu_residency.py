"""Resident weights on one GPU: every figure, in one command of at most 8 minutes.

The real keeper and daemon run. The clients whose attach is timed are fresh interpreters with their imports done and a
CUDA context made; publishers and others are forked from a process that has never touched the GPU. The path that engines
ship today (one CUDA IPC handle a tensor) is measured beside ours on the same tensors, its clients fresh too. What fails
or finds no time is reported as that.

    python benchmarks/gpu_residency.py [--json OUT] [--only PART ...] [--limit-s 480] [--device cpu]

With ``--device cpu`` the machinery runs on tiny models in host memory; its figures mean nothing.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_parts import disk, engine, legacy, models, roles
from gpu_parts.fresh import Clients
from gpu_parts.machine import describe_machine
from gpu_parts.node import Node
from gpu_parts.processes import Process, call, gpu_memory_peak, used_bytes

from weightcache.keeper.child import QUICK_S

GIB = models.GIB


class Report:
    """Figures and what else was found, written after every part, so that a run cut short keeps what it had."""

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


class Benchmark:
    def __init__(self, options: argparse.Namespace) -> None:
        self.where = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
        self.on_gpu = self.where.type == "cuda"
        self.runs = options.runs
        self.report = Report(options.json, options.device)
        self.node = Node()

    # -- parts, in the order of their worth ---------------------------------------------------------------------------

    def fused(self) -> dict[str, Any]:
        """96 GiB in 2,000 tensors: publish within the memory bound, attach, verify, restart the daemon, tear down."""
        shape = self._shape(models.fused(96))
        found = self._publish(shape)
        self._attaches(shape, "attach 96 GiB, 2,000 tensors", must=0.060, aim=0.040)
        if self.on_gpu:
            again = call(roles.verify_again, shape, self.where, self.node.socket)
            self.report.figure("verify 96 GiB, again in one process", again["again_s"], "s", must=0.040, aim=0.025)
        restarts = self._daemon_restarts(shape)
        self._kernel_cold(shape)
        self._teardown(shape)
        restarts += self._daemon_restarts(shape)
        self.report.figure("daemon SIGKILL to serving again", restarts, "s", must=0.5, aim=0.2)
        found["holders"] = self._holders()
        found["memory_after_release"] = self._release()
        return found

    def unfused(self) -> dict[str, Any]:
        """96 GiB in 30,000 tensors."""
        shape = self._shape(models.unfused(96))
        found = self._publish(shape)
        self._attaches(shape, "attach 96 GiB, 30,000 tensors", must=0.400, aim=0.250)
        found["memory_after_release"] = self._release()
        return found

    def llama(self) -> dict[str, Any]:
        """An 8B model: attach, and compute on it."""
        shape = self._shape(models.llama_8b())
        found = self._publish(shape)
        self._attaches(shape, "attach an 8B bf16 model", must=0.015, aim=0.008)
        if self.on_gpu:
            found["speed"] = call(roles.attach_and_compute, shape, self.where)
            for name, times in found["speed"].items():
                self.report.figure(f"mapped over ordinary memory: {name}", [times["ratio"]], "ratio", must=1.01)
        self._release()
        return found

    def legacy_fused(self) -> dict[str, Any]:
        return self._legacy(models.fused(96), "2,000")

    def legacy_unfused(self) -> dict[str, Any]:
        return self._legacy(models.unfused(96), "30,000")

    def sizes(self) -> dict[str, Any]:
        """Attach time against size, at 2,000 tensors."""
        found = {}
        for gib in (14, 48, 120):
            shape = self._shape(models.fused(gib))
            found[shape.name] = self._publish(shape)
            self._attaches(shape, f"attach {gib} GiB, 2,000 tensors", runs=max(3, self.runs // 2))
            self._release()
        return found

    def disk(self) -> dict[str, Any]:
        """Disk to arena, cold and warm."""
        folder = Path(tempfile.mkdtemp(prefix="readmit-disk-")) / "checkpoint"
        try:
            found = {"written": call(disk.write_checkpoint, folder, 8.0)}
            reads, cold, warm, files = [], [], [], []
            for turn in range(3):
                found[f"left_in_cache_{turn}"] = disk.drop(folder)
                reads.append(call(disk.direct_reads, folder))
                disk.drop(folder)
                cold.append(call(disk.into_arena, folder, None, turn == 0))
            for _ in range(3):
                found["in_cache"] = disk.warm(folder)
                warm.append(call(disk.into_arena, folder, False, False))
                files.append(call(disk.load_file, folder))
            found |= {"cold": cold, "warm": warm, "load_file": files, "direct_reads": reads}
            rates = [result["bytes_per_s"] / GIB for result in cold]
            self.report.figure("parallel O_DIRECT reads", [rate / GIB for rate in reads], "GiB/s")
            self.report.figure("disk to arena, cold", rates, "GiB/s")
            ratio = statistics.median(rates) / (statistics.median(reads) / GIB)
            self.report.figure("disk to arena over O_DIRECT reads", [ratio], "ratio", at_least=0.9)
            rates = [result["bytes_per_s"] / GIB for result in warm]
            others = [result["bytes_per_s"] / GIB for result in files]
            self.report.figure("page cache to arena", rates, "GiB/s")
            self.report.figure("safetensors load_file to GPU", others, "GiB/s")
            ratio = statistics.median(rates) / statistics.median(others)
            self.report.figure("page cache to arena over load_file", [ratio], "ratio", at_least=1.5, aim=3)
            return found
        finally:
            disk.remove(folder.parent)

    def engine(self) -> dict[str, Any]:
        """A model of transformers: loaded from disk and published, then mapped; eager and captured."""
        folder = Path(tempfile.mkdtemp(prefix="readmit-engine-"))
        try:
            size = call(engine.make_checkpoint, folder / "model")
            results = [call(engine.load_and_generate, folder / "model", mode) for mode in ("client", "client", "off")]
            answers = {tuple(result[kind]) for result in results for kind in ("tokens", "captured_tokens")}
            paths = [result["path"] for result in results]
            if paths != ["miss", "hit", "off"] or len(answers) != 1:
                raise AssertionError(f"paths {paths}, {len(answers)} different answers: {results}")
            for result in results:
                self.report.figure(f"transformers, 0.4B, {result['path']}: load", [result["load_s"]], "s")
            return {"bytes": size, "runs": results}
        finally:
            disk.remove(folder)

    # -- steps --------------------------------------------------------------------------------------------------------

    def _shape(self, shape: models.Shape) -> models.Shape:
        return shape if self.on_gpu else models.tiny()

    def _publish(self, shape: models.Shape) -> dict[str, Any]:
        memory: dict[str, int] = {}
        if self.on_gpu:
            with gpu_memory_peak(memory):
                found = call(roles.publish, shape, self.where, timeout_s=300)
        else:
            found = call(roles.publish, shape, self.where)
        if found["differing"] or not found["generation"]:
            raise AssertionError(f"{shape.name} was not published as it should be: {found}")
        if self.on_gpu:
            gib = found["model_bytes"] / GIB
            above = (memory["peak"] - memory["before"] - found["model_bytes"]) / GIB
            loader = (found["torch_bytes"] - found["model_bytes"]) / GIB
            note = f"{gib:.1f} GiB in {found['tensors']} tensors, CUDA context included"
            self.report.figure(f"publish {shape.name}: peak above the weights ({note})", [above], "GiB", must=4)
            self.report.figure("  of it torch's own, from loading: memory reserved above the weights", [loader], "GiB")
            self.report.figure(f"publish {shape.name}: time", [found["phases"]["publish"]], "s")
        return {**found, "memory": memory}

    def _attaches(self, shape: models.Shape, work: str, runs: int | None = None, **bounds: float) -> None:
        runs = runs or self.runs
        clients = Clients(runs, self.where)
        try:
            ends = ["check", *["end"] * (runs - 1)]
            results = [clients.call(roles.attach, shape, self.where, end) for end in ends]
        finally:
            clients.close()
        if results[0]["differing"]:
            raise AssertionError(f"{shape.name}: {results[0]['differing'][:3]} are not what was published")
        self.report.figure(work, [result["attach_s"] for result in results], "s", **bounds)
        whole = [result["load_weights_s"] for result in results]
        self.report.figure(f"  load_weights, skeleton included: {work}", whole, "s")
        for part in results[0]["phases"]:
            self.report.figure(f"    {part}", [result["phases"][part] for result in results], "s")

    def _kernel_cold(self, shape: models.Shape) -> None:
        """The first attach on a node where nobody has compiled the digest's kernel."""
        home = os.environ.get("READMIT_HOME")
        results = []
        for _ in range(2):
            with tempfile.TemporaryDirectory() as empty:
                os.environ |= {"READMIT_HOME": empty, "TRITON_CACHE_DIR": empty}
                results.append(call(roles.attach, shape, self.where))
        del os.environ["TRITON_CACHE_DIR"]
        if home is None:
            del os.environ["READMIT_HOME"]
        else:
            os.environ["READMIT_HOME"] = home
        whole = [result["load_weights_s"] for result in results]
        self.report.figure("  load_weights, kernel never compiled", whole, "s")

    def _daemon_restarts(self, shape: models.Shape) -> list[float]:
        """Two deaths of a daemon that had lived for a while; the keeper makes a third in a row wait."""
        seconds, adopted = [], []
        while (left := QUICK_S + 0.5 - self.node.status()["uptime_s"]) > 0:
            time.sleep(left)
        for _ in range(2):
            before = self.node.daemon_pid()
            began = time.perf_counter()
            self.node.kill_daemon()
            status = self.node.wait(not_pid=before)
            seconds.append(time.perf_counter() - began)
            adopted.append(len(status["generations"]))
        if set(adopted) != {1}:
            raise AssertionError(f"generations after restarts: {adopted}")
        result = call(roles.attach, shape, self.where, "check")
        if result["differing"]:
            raise AssertionError(result["differing"])
        return seconds

    def _teardown(self, shape: models.Shape) -> None:
        seconds = []
        for _ in range(3):
            engine = Process(roles.attach, shape, self.where, "hold")
            engine.answer()
            seconds.append(engine.kill())
        self.report.figure("SIGKILL of an engine with everything mapped, to its pidfd", seconds, "s")

    def _holders(self) -> dict[str, Any]:
        """What keeper and daemon take of the GPU while they hold everything."""
        if not self.on_gpu:
            return {}
        import pynvml

        pynvml.nvmlInit()
        device = pynvml.nvmlDeviceGetHandleByIndex(0)
        running = {
            process.pid: process.usedGpuMemory for process in pynvml.nvmlDeviceGetComputeRunningProcesses(device)
        }
        pids = {"keeper": self.node.keeper_pid(), "daemon": self.node.daemon_pid()}
        links = {name: _gpu_files(pid) for name, pid in pids.items()}
        resident = self.node.status()["resident_bytes"]
        own = {name: running.get(pid, 0) for name, pid in pids.items()}
        self.report.figure("GPU memory of keeper and daemon", [sum(own.values()) / 2**20], "MiB", must=0, aim=0)
        return {"used": used_bytes(), "resident": resident, "nvml_processes": running, "own": own, "files": links}

    def _release(self) -> dict[str, int]:
        if not self.on_gpu:
            self.node.release()
            return {}
        before = used_bytes()
        self.node.release()
        deadline = time.monotonic() + 10
        while used_bytes() > GIB and time.monotonic() < deadline:
            time.sleep(0.01)
        return {"before": before, "after": used_bytes()}

    def _legacy(self, shape: models.Shape, tensors: str) -> dict[str, Any]:
        holder = Process(legacy.holder, shape)
        holder.answer(300)
        results, exports = [], []
        clients = Clients(4, self.where)
        try:
            for _ in range(4):
                holder.tell("export")
                seconds, payload = holder.answer()
                exports.append(seconds)
                results.append(clients.call(legacy.client, shape, payload))
        finally:
            clients.close()
        holder.kill()
        totals = [result["total"] for result in results]
        self.report.figure(f"CUDA IPC, one handle a tensor, {tensors} tensors: client", totals, "s")
        self.report.figure(f"  export by the holder, {tensors} tensors", exports, "s")
        ours = [row for row in self.report.rows if row["work"] == f"attach 96 GiB, {tensors} tensors"]
        if ours:
            client, export = statistics.median(totals), statistics.median(exports)
            work = f"faster than CUDA IPC a tensor, {tensors} tensors"
            self.report.figure(f"{work}: its client alone", [client / ours[0]["median"]], "times", at_least=4, aim=8)
            self.report.figure(
                f"{work}: with the export it waits for", [(client + export) / ours[0]["median"]], "times"
            )
        return {"clients": results, "exports": exports}

    def run(self, only: list[str], limit_s: float) -> None:
        parts = ["fused", "llama", "unfused"]
        if self.on_gpu:
            parts += ["legacy_fused", "legacy_unfused", "engine", "sizes", "disk"]
        with self.node:
            for name in parts:
                if not only or name in only:
                    self.report.part(name, getattr(self, name), limit_s)
                    if self.node.status()["generations"]:  # a part that failed leaves its model behind
                        self.node.release(force=True)
            self.report.parts["daemon_log"] = self.node.log.read_text()[-4000:]
        self.report.write()


def _gpu_files(pid: int) -> dict[str, int]:
    """How many descriptors of each GPU device file a process has open."""
    found: dict[str, int] = {}
    for entry in os.scandir(f"/proc/{pid}/fd"):
        target = os.readlink(entry.path)
        if "nvidia" in target or "dmabuf" in target:
            found[target] = found.get(target, 0) + 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--limit-s", type=float, default=420.0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    if options.device == "cuda":
        import cuda.bindings.driver  # noqa: F401 - as an engine's imports: before the fork, without touching the GPU

        import weightcache.arena.cuda_vmm  # noqa: F401
    gc.collect()
    gc.freeze()
    benchmark = Benchmark(options)
    print(json.dumps(benchmark.report.machine, indent=1), flush=True)
    benchmark.run(options.only, options.limit_s)
    failed = [name for name, part in benchmark.report.parts.items() if "failed" in part]
    print("failed:", failed or "nothing", f"after {benchmark.report.elapsed_s:.0f} s")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
