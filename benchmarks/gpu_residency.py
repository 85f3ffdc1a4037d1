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
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from gpu_parts import disk, engine, legacy, models, roles, serving, sparse, watching
from gpu_parts.fresh import Clients
from gpu_parts.node import Node
from gpu_parts.processes import Process, call, gpu_memory_peak, used_bytes
from gpu_parts.report import Report

from weightcache.keeper.child import QUICK_S

GIB = models.GIB


class Benchmark:
    def __init__(self, options: argparse.Namespace) -> None:
        self.where = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
        self.on_gpu = self.where.type == "cuda"
        self.runs = options.runs
        self.quick = options.quick
        self.report = Report(options.json, options.device)
        self.node = Node()
        self.attached: dict[str, list[dict[str, Any]]] = {}

    # -- parts, in the order of their worth ---------------------------------------------------------------------------

    def fused(self) -> dict[str, Any]:
        """96 GiB in 2,000 tensors: publish within the memory bound, attach, verify, restart the daemon, tear down."""
        shape = self._shape(models.fused(96))
        found = self._publish(shape)
        self._attaches(shape, "attach 96 GiB, 2,000 tensors", must=0.060, aim=0.040)
        found["variants"] = self._variants(shape)
        if self.on_gpu:
            again = call(roles.verify_again, shape, self.where, self.node.socket)
            self.report.figure("verify 96 GiB, again in one process", again["again_s"], "s", must=0.040, aim=0.025)
        if not self.quick:
            restarts = self._daemon_restarts(shape)
            self._kernel_cold(shape)
            self._teardown(shape)
            restarts += self._daemon_restarts(shape)
            self.report.figure("daemon SIGKILL to serving again", restarts, "s", must=0.5, aim=0.2)
        found["holders"] = self._holders()
        found["memory_after_release"] = self._release()
        return found

    def from_files(self) -> dict[str, Any]:
        """96 GiB in 30,000 tensors, read from files straight into the arena."""
        shape = self._shape(models.unfused(96))
        folder = Path(tempfile.mkdtemp(prefix="readmit-sparse-")) / "checkpoint"
        memory: dict[str, int] = {}
        try:
            files = call(sparse.write, shape, folder)
            time.sleep(2.1)  # younger files could still change unseen
            with gpu_memory_peak(memory):
                found = call(roles.publish_from_files, shape, self.where, folder, timeout_s=200)
        finally:
            disk.remove(folder.parent)
        if not found["generation"]:
            raise AssertionError(f"{shape.name} was not published: {found}")
        above = (memory["peak"] - memory["before"] - found["model_bytes"]) / GIB
        note = f"{found['model_bytes'] / GIB:.1f} GiB in {found['tensors']} tensors, CUDA context included"
        self.report.figure(f"files to published arena: peak above the weights ({note})", [above], "GiB", must=4)
        rate = files["bytes"] / found["read_s"] / GIB
        self.report.figure("files (holes) to arena, hashed, 30,060 tensors", [rate], "GiB/s")
        self._attaches(shape, "attach 96 GiB, 30,000 tensors", end="check sparse", must=0.400, aim=0.250)
        return {**found, "files": files, "memory": memory, "memory_after_release": self._release()}

    def unfused(self) -> dict[str, Any]:
        """96 GiB in 30,000 tensors that an engine loaded by itself, and that move to the arena."""
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
            found["watch"] = self._watch(shape)
        self._release()
        return found

    def versus(self) -> dict[str, Any]:
        """96 GiB in 2,000 tensors, ours and one CUDA IPC handle a tensor, in turn and twice: fresh clients of both."""
        shape = self._shape(models.fused(96))
        ours, theirs = Clients(self.runs, self.where), Clients(self.runs, self.where)
        found: dict[str, list[dict[str, Any]]] = {"ours": [], "theirs": []}
        try:
            for turn in (self.runs // 2, self.runs - self.runs // 2):  # a GPU cannot hold both at once
                self._publish(shape, told=False)
                found["ours"] += [ours.call(roles.attach, shape, self.where) for _ in range(turn)]
                self._release()
                found["theirs"] += self._legacy(theirs, shape, turn)
        finally:
            ours.close()
            theirs.close()
        legacy.compare(self.report, found["ours"], found["theirs"], "2,000 tensors")
        return found

    def legacy_unfused(self) -> dict[str, Any]:
        """One CUDA IPC handle a tensor, 30,000 tensors."""
        clients = Clients(4, self.where)
        try:
            theirs = self._legacy(clients, self._shape(models.unfused(96)), 4)
        finally:
            clients.close()
        if ours := self.attached.get("attach 96 GiB, 30,000 tensors"):
            legacy.compare(self.report, ours, theirs, "30,000 tensors")
        return {"theirs": theirs}

    def serving(self) -> dict[str, Any]:
        """The reference engine, bf16 and FP8: from disk, published, killed and mapped; the same answers each time."""
        try:
            return serving.measure(self.report, self.where)
        finally:
            self._release()

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
        """Disk to arena, cold and warm, beside what others do."""
        return disk.measure(self.report, self.quick)

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

    def _publish(self, shape: models.Shape, told: bool = True) -> dict[str, Any]:
        memory: dict[str, int] = {}
        if self.on_gpu:
            with gpu_memory_peak(memory):
                found = call(roles.publish, shape, self.where, timeout_s=300)
        else:
            found = call(roles.publish, shape, self.where)
        if found["differing"] or not found["generation"]:
            raise AssertionError(f"{shape.name} was not published as it should be: {found}")
        if self.on_gpu and told:
            gib = found["model_bytes"] / GIB
            above = (memory["peak"] - memory["before"] - found["model_bytes"]) / GIB
            loader = (found["torch_bytes"] - found["model_bytes"]) / GIB
            note = f"{gib:.1f} GiB in {found['tensors']} tensors, CUDA context included"
            self.report.figure(f"publish {shape.name}: peak above the weights ({note})", [above], "GiB", must=4)
            self.report.figure("  of it torch's own, from loading: memory reserved above the weights", [loader], "GiB")
            self.report.figure(f"publish {shape.name}: time", [found["phases"]["publish"]], "s")
        return {**found, "memory": memory}

    def _attaches(
        self, shape: models.Shape, work: str, runs: int | None = None, end: str = "check", **bounds: float
    ) -> None:
        runs = runs or self.runs
        clients = Clients(runs, self.where)
        try:
            ends = [end, *["end"] * (runs - 1)]
            results = [clients.call(roles.attach, shape, self.where, each) for each in ends]
        finally:
            clients.close()
        if results[0]["differing"]:
            raise AssertionError(f"{shape.name}: {results[0]['differing'][:3]} are not what was published")
        self.attached[work] = results
        self.report.figure(work, [result["attach_s"] for result in results], "s", **bounds)
        self.report.figure("  a fixed piece of Python in each", [result["pace_s"] for result in results], "s")
        whole = [result["load_weights_s"] for result in results]
        self.report.figure(f"  load_weights, skeleton included: {work}", whole, "s")
        for part in results[0]["phases"]:
            self.report.figure(f"    {part}", [result["phases"][part] for result in results], "s")
        if self.on_gpu:
            for mark, pick in (("launch", 0), ("launch", -1), ("wait", -1), ("verified", -1)):
                which = {("launch", 0): "first ", ("launch", -1): "last "}.get((mark, pick), "")
                self.report.figure(f"    until {which}{mark}", [it["marks"][mark][pick] for it in results], "s")

    def _variants(self, shape: models.Shape) -> dict[str, Any]:
        """The same attach done otherwise, in turn: what verifying ahead is worth, and what verifying costs."""
        ways: dict[str, tuple[float, int | None]] = {
            "verified once everything is mapped": (1.0, 1 << 20),
            "not verified": (0.0, None),
        }
        count = 3 if self.on_gpu else 1
        clients = Clients(count * len(ways), self.where)
        found: dict[str, list[float]] = {}
        try:
            for _ in range(count):
                for name, (share, first) in ways.items():
                    result = clients.call(roles.attach, shape, self.where, "end", share, first)
                    found.setdefault(name, []).append(result["attach_s"])
        finally:
            clients.close()
        for name, seconds in found.items():
            self.report.figure(f"  attach {shape.name}, {name}", seconds, "s")
        return found

    def _watch(self, shape: models.Shape) -> dict[str, Any]:
        """NVML's watcher on this GPU, and what it makes of an engine that writes into its weights."""
        watcher = Process(watching.watch)
        watcher.answer()
        culprit = Process(roles.write_into, shape, self.where)
        written = culprit.answer()
        culprit.end()
        found = watcher.answer()
        watcher.end()
        found["writer"] = written
        if found["xids"] != [31] or found["findings"] or not found["still_watched"]:
            raise AssertionError(f"the watcher made something else of a program's own fault: {found}")
        return dict(found)

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

    def _legacy(self, clients: Clients, shape: models.Shape, times: int) -> list[dict[str, Any]]:
        """What fresh clients took that opened one handle a tensor."""
        with tempfile.TemporaryDirectory() as folder:
            holder = Process(legacy.holder, shape, f"{folder}/socket")
            try:
                holder.answer(300)
                return [clients.call(legacy.client, shape, f"{folder}/socket") for _ in range(times)]
            finally:
                holder.kill()

    def run(self, only: list[str], limit_s: float) -> None:
        parts = ["fused", "serving"]
        if self.on_gpu:
            parts = ["fused", "versus", "llama", "unfused", "serving"]
            parts += ["from_files", "disk", "sizes", "engine", "legacy_unfused"]
        else:
            parts += ["llama", "unfused"]
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
    parser.add_argument("--quick", action="store_true", help="leave out restarts, teardown and a never compiled kernel")
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
