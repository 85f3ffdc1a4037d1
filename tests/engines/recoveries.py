"""Kill vLLM in every way and on every path, and say how it came back: a table, then one line of JSON.

``python -m tests.engines.recoveries [--kills N] [--parts plain,preload,standby,tp2]``
"""

import argparse
import json
import os
import signal
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Final

import vllm
from tests.engines import checkpoints
from tests.engines.node import NAME, PROMPTS, Node, p50

from readmit.demo_model import prepare
from weightcache.episodes import Episode
from weightcache.vocabulary import UNATTRIBUTED

PARTS: Final = ("plain", "preload", "standby", "tp2")
KILLED: Final = ("api", "core", "worker")
TOLERANCE: Final = 0.1
"""Nats by which a log-probability in bf16 may move between batches."""


class Account:
    """What was seen so far."""

    def __init__(self) -> None:
        self.totals: dict[str, list[float]] = {}
        self.episodes: list[Episode] = []
        self.orphans = self.shm_left = self.parity_failures = 0
        self.logprobs_apart = 0.0
        self.expected: dict[str, Any] = {}

    def kill(self, node: Node, part: str, path: str, model: str = "demo") -> Episode:
        """Kill a part of an engine and account for its recovery on a path that must be the expected one."""
        episode, orphans, shm_left = node.kill(part)
        assert episode.outcome == "ready", f"{episode.outcome} after the death of {part}"
        assert path in (episode.path, "preload"), f"{episode.path} ({episode.reason}) in place of {path}"
        self.orphans, self.shm_left = self.orphans + orphans, self.shm_left + shm_left
        self.totals.setdefault(path, []).append(episode.total_s)
        self.episodes.append(episode)
        self.check(node, model)
        phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in episode.phases_s().items())
        print(f"{path:8} {part:7} {episode.cause:7} {episode.total_s:7.2f} s   {phases}", flush=True)
        return episode

    def check(self, node: Node, model: str = "demo") -> None:
        """Compare an engine's answers with the first ones of its model.

        The text must be the same. Log-probabilities move a little when the gate happens to ask at the same moment and
        vLLM batches the two; that they are equal to the bit is tested where nobody else asks (``test_vllm_loader``).
        """
        found = node.answers()
        for (text, got), (right, wanted) in zip(found, self.expected.setdefault(model, found), strict=True):
            apart = max(abs(one - other) for one, other in zip(got, wanted, strict=True))
            self.logprobs_apart = max(self.logprobs_apart, apart)
            self.parity_failures += text != right or apart > TOLERANCE

    def hits(self) -> list[Episode]:
        return [episode for episode in self.episodes if episode.path == "hit"]


def probes(text: str = "Paris") -> dict[str, Any]:
    expected = {"regex": text}
    return {"model": NAME, "probes": [{"name": "p", "prompt": PROMPTS[0], "max_tokens": 8, "expect": expected}]}


def plain(account: Account, model: Path, kills: int) -> dict[str, Any]:
    """Restarts that import everything, from disk and from the cache."""
    for mode, paths in (("off", ("off",)), ("client", ("hit", "miss"))):
        node = Node(model, mode=mode)
        try:
            node.start(probes())
            account.check(node)
            for path in paths:
                for number in range(kills):
                    if path == "miss":
                        node.release()
                    account.kill(node, KILLED[number % len(KILLED)], path)
            speed = node.tokens_per_s()
        finally:
            node.stop()
    return {"tokens_per_s": round(speed, 1)}


def preload(account: Account, model: Path, kills: int) -> dict[str, Any]:
    """Restarts forked from a resident process."""
    node = Node(model, preload=True)
    try:
        node.start(probes())
        account.check(node)
        resident = node.wait_for_resident()
        plain_speed = node.tokens_per_s()
        for number in range(kills):
            account.kill(node, KILLED[number % len(KILLED)], "preload")
        return {
            "resident": resident,
            "forked": sum(how == "forked" for how in node.started()),
            "tokens_per_s": {"plain": round(plain_speed, 1), "forked": round(node.tokens_per_s(), 1)},
        }
    finally:
        node.stop()


def standby(account: Account, model: Path, kills: int) -> dict[str, Any]:
    """The service's outage when one of two engines on the same weights dies."""
    node = Node(model, slots="ab", preload=True)
    try:
        node.start(probes())
        node.wait_for_resident()
        for _ in range(kills):
            pid, began = node.processes()["api"][0], time.monotonic()
            before = len(node.closed())
            os.kill(pid, signal.SIGKILL)
            while True:
                try:
                    urllib.request.urlopen(f"http://{node.gate}/readyz", timeout=5).read()
                    break
                except (urllib.error.URLError, OSError):
                    time.sleep(0.01)
            account.totals.setdefault("standby", []).append(time.monotonic() - began)
            while len(node.closed()) == before:
                time.sleep(0.2)
        return {}
    finally:
        node.stop()


def tp2(account: Account, model: Path, kills: int) -> dict[str, Any]:
    """Two ranks on the CPU: both hit, or it is no hit and says which rank missed."""
    with tempfile.TemporaryDirectory() as folder:
        small = checkpoints.write("llama", Path(folder) / "llama", tokenizer_of=model)
        node = Node(small, preload=True, arguments=("--tensor-parallel-size", "2"))
        try:
            node.start(probes(""))
            [first] = node.closed()
            account.check(node, "llama")
            node.wait_for_resident()
            for number in range(kills):
                account.kill(node, KILLED[number % len(KILLED)], "hit", "llama")
            hit = account.episodes[-1]
            lookups = hit.attempt.lookups if hit.attempt else []
            node.release(next(it.attributes["generation"] for it in lookups if it.rank == 1))
            partial, _, _ = node.kill("api")
            missed = partial.miss
            return {
                "first": first.path,
                "ranks": sorted(it.rank for it in lookups),
                "hits": sum(it.result == "hit" for it in lookups),
                "partial": partial.path,
                "missed_rank": missed.rank if missed else None,
                "distributed_init_s": round(hit.phases_s().get("distributed_init", 0.0), 3),
            }
        finally:
            node.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=3, help="kills on every path")
    parser.add_argument("--parts", default=",".join(PARTS))
    arguments = parser.parse_args()
    model, account, found = prepare(), Account(), {}
    for part in arguments.parts.split(","):
        found[part] = globals()[part](account, model, arguments.kills)
    hits = account.hits()
    parts = [episode.parts_s() for episode in hits]
    total = sum(episode.total_s for episode in account.episodes)
    unattributed = sum(episode.phases_s().get(UNATTRIBUTED, 0.0) for episode in account.episodes)
    report = {
        "engine": f"vllm {vllm.__version__} cpu",
        "paths": {path: {"n": len(times), "p50_s": p50(times)} for path, times in account.totals.items()},
        "load_weights_hit_ms": p50([1000 * it.phases_s()["load_weights"] for it in hits]) if hits else None,
        "bind_ms": p50([1000 * it["load_weights.bind"] for it in parts]) if hits else None,
        "unattributed_share": round(unattributed / total, 4) if total else None,
        "parity_failures": account.parity_failures,
        "logprobs_apart": round(account.logprobs_apart, 4),
        "tp2": found.get("tp2"),
        "orphans": account.orphans,
        "shm_left": account.shm_left,
        **{part: facts for part, facts in found.items() if part != "tp2" and facts},
    }
    print(json.dumps(report))
    if account.orphans or account.shm_left or account.parity_failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
