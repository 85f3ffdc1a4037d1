"""What resident weights on a GPU survive: each case a real SIGKILL, every byte compared afterwards.

The real keeper and daemon run; engines are fresh processes. A case ends with `OK` or says what was wrong.

    python benchmarks/gpu_survival.py [--json OUT] [--only CASE ...] [--device cpu]

With ``--device cpu`` the cases that need no GPU run on a tiny model in host memory.
"""

import argparse
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_parts import models, roles
from gpu_parts.expect import expect
from gpu_parts.machine import describe_machine
from gpu_parts.node import Node
from gpu_parts.processes import Process, call, used_bytes

from weightcache.errors import CacheMiss


class Survival:
    """The cases. Each begins with the model resident and nobody attached, unless it says otherwise."""

    def __init__(self, node: Node, shape: models.Shape, where: torch.device) -> None:
        self.node = node
        self.shape = shape
        self.where = where
        self.on_gpu = where.type == "cuda"
        self.idle_bytes = used_bytes() if self.on_gpu else 0

    # -- cases --------------------------------------------------------------------------------------------------------

    def creator_after_publish(self) -> dict[str, Any]:
        self.node.release()
        creator = self._engine(roles.publish)
        seconds = creator.kill()
        return {"pidfd_s": seconds, **self._intact()}

    def engine_while_serving(self) -> dict[str, Any]:
        seconds = self._engine().kill()
        return {"pidfd_s": seconds, **self._intact()}

    def engine_during_map(self) -> dict[str, Any]:
        return self._killed_in("map")

    def engine_during_verify(self) -> dict[str, Any]:
        return self._killed_in("verify")

    def engine_during_bind(self) -> dict[str, Any]:
        return self._killed_in("bind")

    def daemon_alone(self) -> dict[str, Any]:
        """The engine never notices; the next daemon knows its lease."""
        engine = self._engine()
        status = self._kill_daemon()
        leases = [lease["pid"] for generation in status["generations"] for lease in generation["leases"]]
        expect(leases, [engine.pid])
        result = self._intact()
        engine.tell("check")
        expect(engine.answer()["differing"], [])
        engine.end()
        return {"leases_after": len(leases), **result}

    def daemon_and_engine(self) -> dict[str, Any]:
        engine = self._engine()
        before = self.node.kill_daemon()
        engine.kill()
        status = self.node.wait(not_pid=before)
        expect(len(status["generations"]), 1)
        self._await_leases(0)
        return self._intact()

    def daemon_during_publish(self) -> dict[str, Any]:
        """Nothing is half published; the publisher offers it to the next daemon, or keeps its weights to itself."""
        self.node.release()
        publisher = Process(roles.publish, self.shape, self.where, "stop")
        expect(publisher.answer(), "filled")
        status = self._kill_daemon()
        expect(status["generations"], [])
        publisher.tell("go on")
        found = publisher.answer()
        expect(found["differing"], [])
        publisher.end()
        resident = [generation["generation"] for generation in self.node.status()["generations"]]
        expect(resident, [found["generation"]] if found["generation"] else [])
        self.node.release()
        self._await_memory()
        return {"published_after_all": bool(resident), "why_not": found["private_because"], "then": self._published()}

    def daemon_while_storing(self) -> dict[str, Any]:
        """Killed at some moment around the hand-over, several times: either all of it is resident, or nothing."""
        outcomes = []
        for delay_ms in (0, 1, 3, 6, 10, 20):
            self.node.release(force=True)
            publisher = Process(roles.publish, self.shape, self.where, "stop")
            expect(publisher.answer(), "filled")
            publisher.tell("go on")
            time.sleep(delay_ms / 1000)
            status = self._kill_daemon()
            found = publisher.answer()
            expect(found["differing"], [])
            publisher.end()
            resident = len(status["generations"])
            outcomes.append({"delay_ms": delay_ms, "resident": resident, "publisher": found["generation"] is not None})
            if resident:
                self._intact()
        return {"outcomes": outcomes, "then": self._published()}

    def keeper_alone(self) -> dict[str, Any]:
        """The daemon goes on serving; a new keeper takes over its descriptors, and proves it by the daemon's death."""
        self.node.kill_keeper()
        first = self._intact()
        self.node.start_keeper()
        deadline = time.monotonic() + 30
        while not self.node.adopted() and time.monotonic() < deadline:
            time.sleep(0.02)
        self._kill_daemon()
        return {"while_gone": first, **self._intact()}

    def keeper_daemon_and_engine(self) -> dict[str, Any]:
        """Every holder at once: the weights are gone, and the next miss says why."""
        engine = self._engine()
        self.node.kill_keeper()
        self.node.kill_daemon()
        engine.kill()
        self._await_memory()
        self.node.start_keeper()
        self.node.wait()
        found = call(roles.miss, self.shape, self.where)
        expect((found["reason"], found["detail"]), ("residency_lost", "keeper_lost"))
        return {"miss": found["message"], "then": self._published()}

    def engine_that_writes(self) -> dict[str, Any]:
        """Its own error is typed and journaled; the next engine's weights are intact."""
        self._needs_gpu()
        found = call(roles.write_into, self.shape, self.where)
        expect((found.get("fault") or {}).get("reason"), "illegal_access")
        journaled = self.node.events("attempt_end")
        expect(bool(journaled) and journaled[-1]["error"]["reason"], "illegal_access")
        return {"raised": found["raised"], "fault": found["fault"]["message"], **self._intact()}

    def flipped_byte(self) -> dict[str, Any]:
        """The next attach is a miss ``integrity`` that names the tensor, and the generation is kept from everybody."""
        self._needs_gpu()
        rogue = call(roles.rogue_writer, self.shape, self.where, self.node.socket)
        self._await_leases(0)
        found = call(roles.miss, self.shape, self.where)
        expect((found["reason"], found["tensors"]), ("integrity", [rogue["tensor"]]))
        after = call(roles.miss, self.shape, self.where)
        expect(after["reason"], "quarantined")
        self.node.release()
        return {"rogue": rogue, "miss": found["message"], "after": after["message"], "then": self._published()}

    def two_engines(self) -> dict[str, Any]:
        """Both compute on one copy."""
        engines = [self._engine() for _ in range(2)]
        used = used_bytes() if self.on_gpu else 0
        for engine in engines:
            engine.tell("check")
        for engine in engines:
            expect(engine.answer()["differing"], [])
            engine.end()
        resident = self.node.status()["resident_bytes"]
        return {"used": used, "resident": resident, "idle": self.idle_bytes}

    def release_with_lease(self) -> dict[str, Any]:
        """Refused with the holder's pid; forced, the memory returns when the engine ends."""
        engine = self._engine()
        try:
            self.node.release()
            raise AssertionError("a leased generation was released")
        except CacheMiss as refused:
            message = str(refused)
        expect(str(engine.pid) in message, True)
        self.node.release(force=True)
        held = used_bytes() if self.on_gpu else 0
        engine.tell("check")
        expect(engine.answer()["differing"], [])
        engine.end()
        after = self._await_memory()
        return {"refused": message, "held": held, "after": after, "then": self._published()}

    def release_without_lease(self) -> dict[str, Any]:
        before = used_bytes() if self.on_gpu else 0
        self.node.release()
        return {"before": before, "after": self._await_memory(), "then": self._published()}

    # -- steps --------------------------------------------------------------------------------------------------------

    def _published(self) -> str:
        found = call(roles.publish, self.shape, self.where)
        expect(found["differing"], [])
        expect(found["private_because"], None)
        return str(found["generation"])

    def _engine(self, role: Callable[..., Any] = roles.attach) -> Process:
        engine = Process(role, self.shape, self.where, "hold")
        engine.answer()
        return engine

    def _intact(self) -> dict[str, Any]:
        """A fresh engine attaches, verifies, and compares every byte with its seed."""
        result = call(roles.attach, self.shape, self.where, "check")
        expect(result["differing"], [])
        return {"attach_s": result["attach_s"], "bytes_compared": result["bytes"]}

    def _killed_in(self, part: str) -> dict[str, Any]:
        engine = Process(roles.stop_at, self.shape, self.where, part)
        expect(engine.answer(), f"in {part}")
        engine.kill()
        self._await_leases(0)
        return self._intact()

    def _kill_daemon(self) -> dict[str, Any]:
        before = self.node.kill_daemon()
        return self.node.wait(not_pid=before)

    def _await_leases(self, count: int) -> None:
        deadline = time.monotonic() + 10
        leases = -1
        while time.monotonic() < deadline:
            leases = sum(len(generation["leases"]) for generation in self.node.status()["generations"])
            if leases == count:
                return
            time.sleep(0.02)
        raise AssertionError(f"expected {count} leases, found {leases}")

    def _await_memory(self) -> int:
        """GPU memory is back at what it was before the first model, but for 64 MiB; bytes used."""
        if not self.on_gpu:
            return 0
        deadline = time.monotonic() + 20
        while (used := used_bytes()) > self.idle_bytes + (64 << 20):
            if time.monotonic() > deadline:
                raise AssertionError(f"{used - self.idle_bytes} bytes of GPU memory did not return")
            time.sleep(0.01)
        return used

    def _needs_gpu(self) -> None:
        if not self.on_gpu:
            raise NeedsGpuError


class NeedsGpuError(Exception):
    """The case means nothing in host memory."""


CASES = [
    *("creator_after_publish", "engine_while_serving", "engine_during_map", "engine_during_verify"),
    *("engine_during_bind", "daemon_alone", "daemon_and_engine", "keeper_alone", "engine_that_writes"),
    *("two_engines", "release_with_lease", "release_without_lease", "flipped_byte", "daemon_during_publish"),
    *("daemon_while_storing", "keeper_daemon_and_engine"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    where = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    machine = describe_machine(options.device)
    if options.device == "cuda":
        import cuda.bindings.driver  # noqa: F401 - before the fork, without touching the GPU

        import weightcache.arena.cuda_vmm  # noqa: F401
    gc.freeze()
    results: dict[str, Any] = {}
    with Node() as node:
        shape = models.llama_8b() if options.device == "cuda" else models.tiny()
        survival = Survival(node, shape, where)
        survival._published()
        for name in options.only or CASES:
            began = time.monotonic()
            try:
                results[name] = {"ok": True, "found": getattr(survival, name)()}
            except NeedsGpuError:
                results[name] = {"not_run": "needs a GPU"}
            except Exception:  # noqa: BLE001 - the other cases are still worth their run
                results[name] = {"ok": False, "failed": traceback.format_exc()}
            took = time.monotonic() - began
            verdict = results[name].get("failed") or results[name].get("not_run") or "OK"
            print(f"{name:<28} {took:6.1f} s  {verdict}", flush=True)
            if not results[name].get("ok", True):
                recover(survival)
            if options.json:
                options.json.write_text(
                    json.dumps({"machine": machine, "model": shape.name, "cases": results}, indent=1)
                )
        log = node.log.read_text()[-3000:]
    failed = [name for name, result in results.items() if not result.get("ok", True)]
    if failed:
        print(log)
    print("failed:", failed or "none", f"of {len(results)}")
    os._exit(bool(failed))  # children of failed cases may still be waiting to be told something


def recover(survival: Survival) -> None:
    """Leave the next case what it expects."""
    try:
        survival.node.wait()
        survival.node.release(force=True)
        survival._published()
    except Exception:  # noqa: BLE001 - the next case will say what is wrong
        print(traceback.format_exc(), file=sys.stderr)


if __name__ == "__main__":
    main()
