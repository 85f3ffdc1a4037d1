"""Replicas of one model on two GPUs of a node, by one daemon: each engine maps the copy on its own GPU.

The real keeper and daemon run; every byte is compared with its seed. A step that goes wrong ends the run.

    python benchmarks/gpu_replicas.py [--json OUT]
"""

import argparse
import gc
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from gpu_parts import models, roles
from gpu_parts.expect import expect
from gpu_parts.machine import describe_machine
from gpu_parts.node import Node
from gpu_parts.processes import Talk, call, gpu_memory

from weightcache import client, device
from weightcache.errors import CacheMiss

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


class Replicas:
    """The steps; each goes on from where the one before left the node."""

    def __init__(self, node: Node, shape: models.Shape) -> None:
        self.node = node
        self.shape = shape
        self.idle = gpu_memory()

    def weights_on_another_gpu_are_a_miss(self) -> dict[str, Any]:
        expect(call(roles.publish, self.shape, FIRST)["differing"], [])
        found = call(roles.miss, self.shape, SECOND)
        uuids = call(_uuids)
        expect([found["reason"], found["expected"], found["found"]], ["device", uuids[1], uuids[0]])
        return {"miss": found["message"], "expected": found["expected"], "found": found["found"]}

    def a_replica_publishes_its_own_copy(self) -> dict[str, Any]:
        """While its process's current GPU is another one."""
        found = call(roles.publish, self.shape, SECOND)
        expect([found["path"], found["reason"], found["private_because"]], ["miss", "device", None])
        expect(found["differing"], [])
        there = [generation["device"] for generation in self.node.status()["generations"]]
        expect(there, call(_uuids))
        return {"generations": there, "memory": gpu_memory()}

    def each_engine_maps_the_copy_on_its_own_gpu(self) -> dict[str, Any]:
        results = {str(where): call(roles.attach, self.shape, where, "check") for where in (FIRST, SECOND)}
        expect([result["differing"] for result in results.values()], [[], []])
        expect(len({result["generation"] for result in results.values()}), 2)
        return {where: {"attach_s": result["attach_s"], "bytes": result["bytes"]} for where, result in results.items()}

    def one_process_maps_both(self) -> dict[str, Any]:
        found: dict[str, Any] = call(_attach_both, self.shape)
        expect(found.pop("differing"), [[], []])
        expect(found["current_device"], 0)
        return found

    def a_gpu_is_known_by_its_uuid(self) -> dict[str, Any]:
        """The second GPU as the only one that a process sees, and so its number 0."""
        uuid = call(_uuids)[1]
        found = call(_attach_alone, self.shape, uuid)
        expect(found["differing"], [])
        held = {generation["generation"]: generation["device"] for generation in self.node.status()["generations"]}
        expect(held[found["generation"]], uuid)
        return {"attach_s": found["attach_s"], "device": uuid}

    def a_daemon_that_dies_leaves_both(self) -> dict[str, Any]:
        began, before = time.perf_counter(), self.node.kill_daemon()
        status = self.node.wait(not_pid=before)
        seconds = time.perf_counter() - began
        expect(len(status["generations"]), 2)
        return {"seconds": seconds, **self.each_engine_maps_the_copy_on_its_own_gpu()}

    def a_flipped_byte_on_one_is_no_harm_to_the_other(self) -> dict[str, Any]:
        rogue = call(roles.rogue_writer, self.shape, SECOND, self.node.socket)
        found = call(roles.miss, self.shape, SECOND)
        expect([found["reason"], found["tensors"]], ["integrity", [rogue["tensor"]]])
        expect(call(roles.miss, self.shape, SECOND)["reason"], "quarantined")
        expect(call(roles.attach, self.shape, FIRST, "check")["differing"], [])
        return {"miss": found["message"]}

    def a_fresh_copy_replaces_the_bad_one_alone(self) -> dict[str, Any]:
        expect(call(roles.publish, self.shape, SECOND)["reason"], "quarantined")
        return self.each_engine_maps_the_copy_on_its_own_gpu()

    def memory_returns_on_both(self) -> dict[str, Any]:
        held = gpu_memory()
        self.node.release(force=True)
        deadline = time.monotonic() + 20
        while any(now > idle + (64 << 20) for now, idle in zip(gpu_memory(), self.idle, strict=True)):
            if time.monotonic() > deadline:
                raise AssertionError(f"GPU memory did not return: {self.idle} before, {gpu_memory()} after")
            time.sleep(0.01)
        return {"held": held, "after": gpu_memory()}


def _uuids(_: Talk) -> list[str]:
    return [device.describe(ordinal).uuid for ordinal in range(torch.cuda.device_count())]


def _attach_both(_: Talk, shape: models.Shape) -> dict[str, Any]:
    """Two engines in one process, whose current GPU stays the first."""
    torch.zeros(1, device=FIRST)
    engines = {where: models.skeleton(shape) for where in (SECOND, FIRST)}
    outcomes = [
        client.attach(model, models.config(shape, where), policies=roles.NO_FALLBACK, device=where.index)
        for where, model in engines.items()
    ]
    return {
        "differing": [models.differing(model) for model in engines.values()],
        "current_device": torch.cuda.current_device(),
        "phases": [outcome.phases for outcome in outcomes],
    }


def _attach_alone(talk: Talk, shape: models.Shape, uuid: str) -> dict[str, Any]:
    os.environ["CUDA_VISIBLE_DEVICES"] = uuid
    return roles.attach(talk, shape, FIRST, "check")


STEPS = [name for name, step in vars(Replicas).items() if callable(step) and not name.startswith("_")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    machine = describe_machine("cuda")
    import cuda.bindings.driver  # noqa: F401 - before the fork, without touching the GPU

    import weightcache.arena.cuda_vmm  # noqa: F401

    gc.freeze()
    results: dict[str, Any] = {}
    with Node() as node:
        replicas = Replicas(node, models.llama_8b())
        for name in STEPS:
            began = time.monotonic()
            try:
                results[name] = getattr(replicas, name)()
            except (AssertionError, RuntimeError, CacheMiss) as error:
                print(f"{name}: {error}\n{node.log.read_text()[-3000:]}", flush=True)
                os._exit(1)  # children of a failed step may still be waiting to be told something
            print(f"{name:<48} {time.monotonic() - began:6.1f} s  OK", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "steps": results}, indent=1))


if __name__ == "__main__":
    main()
