"""Kill vLLM in every way and on every path, and say how it came back: a table, then one line of JSON.

``python -m tests.engines.recoveries [--kills N] [--parts off,shared,tp2,observed]``
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any, Final

import vllm
from tests.engines import checkpoints
from tests.engines.node import NAME, PROMPTS, Node, observed_start, p50

from readmit.demo_model import prepare
from weightcache.episodes import Episode
from weightcache.vocabulary import UNATTRIBUTED

PARTS: Final = ("off", "shared", "tp2", "observed")
KILLED: Final = ("api", "core", "worker")
EXPLAINED: Final = 0.1
"""Share of a recovery's time that may belong to no phase."""
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

    def kill(self, node: Node, part: str, path: str, *, named: str | None = None, model: str = "demo") -> Episode:
        """Kill a part of an engine and account for its recovery on a path that must be the expected one.

        Args:
            node: whose slot ``a`` it is.
            part: see `Node.kill`.
            path: how it must get its weights.
            named: what to count it as, by default the path. ``preload`` is measured as a takeover as well.
            model: whose answers it must give.
        """
        named = named or path

        def meanwhile() -> None:
            if named == "preload":
                self.totals.setdefault("standby", []).append(node.takeover_s())

        episode, orphans, shm_left = node.kill(part, meanwhile=meanwhile)
        assert episode.outcome == "ready", f"{episode.outcome} after the death of {part}"
        assert path == episode.path, f"{episode.path} ({episode.reason}) in place of {path}"
        assert {"tokenizer_init", "distributed_init", "load_weights", "server_ready"} <= set(episode.phases_s())
        started = node.started("a")[-1]
        assert (started == "forked") == (named not in PLAIN), f"{started} in place of {named}"
        self.orphans, self.shm_left = self.orphans + orphans, self.shm_left + shm_left
        self.totals.setdefault(named, []).append(episode.total_s)
        self.episodes.append(episode)
        self.check(node, model)
        print(f"{named:8} {part:7} {episode.cause:7} {episode.total_s:7.2f} s   {_phases(episode)}", flush=True)
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

    def on(self, path: str) -> list[Episode]:
        return [episode for episode in self.episodes if episode.path == path]


PLAIN: Final = ("off", "miss", "hit")
"""What is restarted by importing everything."""


def probes(text: str = "Paris") -> dict[str, Any]:
    expected = {"regex": text}
    return {"model": NAME, "probes": [{"name": "p", "prompt": PROMPTS[0], "max_tokens": 8, "expect": expected}]}


def off(account: Account, model: Path, kills: int) -> dict[str, Any]:
    """Restarts from disk, without a cache."""
    node = Node(model, mode="off")
    try:
        node.start(probes())
        account.check(node)
        for number in range(kills):
            account.kill(node, KILLED[number % len(KILLED)], "off")
    finally:
        node.stop()
    return {}


def shared(account: Account, model: Path, kills: int) -> dict[str, Any]:
    """One of two engines on the same weights dies: plain and forked restarts in turn, and restarts that miss."""
    node = Node(model, slots="ab", preload=True)
    speeds: dict[str, list[float]] = {"plain": [], "forked": []}
    try:
        node.start(probes())
        account.check(node)
        for number in range(kills):
            part = KILLED[number % len(KILLED)]
            resident = node.wait_for_resident()
            node.outdate_residents()
            account.kill(node, part, "hit")
            speeds["plain"].append(node.tokens_per_s())
            node.wait_for_resident()
            account.kill(node, part, "hit", named="preload")
            speeds["forked"].append(node.tokens_per_s())
            node.outdate_residents()
            node.release()
            account.kill(node, part, "miss")
    finally:
        node.stop()
    plain, forked = p50(speeds["plain"]), p50(speeds["forked"])
    published = [it.parts_s()["load_weights.publish"] / it.total_s for it in account.on("miss")]
    return {
        "resident": resident,
        "preload_to_plain": round(p50(account.totals["preload"]) / p50(account.totals["hit"]), 3),
        "tokens_per_s": {"plain": plain, "forked": forked, "ratio": round(forked / plain, 3)},
        "publish_share_of_miss": round(max(published), 4),
    }


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
            recovered = [
                account.kill(node, KILLED[number % len(KILLED)], "hit", named="tp2", model="llama")
                for number in range(kills)
            ]
            hit = recovered[-1]
            lookups = hit.attempt.lookups if hit.attempt else []
            node.release(next(it.attributes["generation"] for it in lookups if it.rank == 1))
            partial, _, _ = node.kill("api")
            missed = partial.miss
            return {
                "n": kills,
                "p50_s": p50(account.totals.pop("tp2")),
                "first": first.path,
                "ranks": sorted(it.rank for it in lookups),
                "hits": sum(it.result == "hit" for it in lookups),
                "partial": partial.path,
                "missed_rank": missed.rank if missed else None,
                "distributed_init_s": round(hit.phases_s().get("distributed_init", 0.0), 3),
                "rendezvous_s": round(hit.parts_s()["distributed_init.rendezvous"], 3),
            }
        finally:
            node.stop()


def observed(account: Account, model: Path, kills: int) -> dict[str, Any]:
    """A start without our plug-in, of which we know what vLLM prints."""
    del account, kills
    episode = observed_start(model, probes())
    phases = episode.phases_s()
    print(f"observed {episode.path:7} {episode.total_s:7.2f} s   {_phases(episode)}", flush=True)
    return {
        "path": episode.path,
        "total_s": round(episode.total_s, 3),
        "unattributed_share": round(phases.get(UNATTRIBUTED, 0.0) / episode.total_s, 4),
    }


def _phases(episode: Episode) -> str:
    return ", ".join(f"{name} {seconds:.2f}" for name, seconds in episode.phases_s().items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=3, help="kills on every path")
    parser.add_argument("--parts", default=",".join(PARTS))
    arguments = parser.parse_args()
    model, account, found = prepare(), Account(), {}
    for part in arguments.parts.split(","):
        found[part] = globals()[part](account, model, arguments.kills)
    hits = [episode for episode in account.on("hit") if episode.attempt and len(episode.attempt.lookups) == 1]
    total = sum(episode.total_s for episode in account.episodes)
    unattributed = sum(episode.phases_s().get(UNATTRIBUTED, 0.0) for episode in account.episodes)
    report = {
        "engine": f"vllm {vllm.__version__} cpu",
        "paths": {path: {"n": len(times), "p50_s": p50(times)} for path, times in account.totals.items()},
        "load_weights_hit_ms": p50([1000 * it.phases_s()["load_weights"] for it in hits]) if hits else None,
        "bind_ms": p50([1000 * it.parts_s()["load_weights.bind"] for it in hits]) if hits else None,
        "unattributed_share": round(unattributed / total, 4) if total else None,
        "parity_failures": account.parity_failures,
        "logprobs_apart": round(account.logprobs_apart, 4),
        "tp2": found.get("tp2"),
        "orphans": account.orphans,
        "shm_left": account.shm_left,
        **{part: facts for part, facts in found.items() if part != "tp2" and facts},
    }
    print(json.dumps(report))
    unexplained = max(report["unattributed_share"] or 0.0, found.get("observed", {}).get("unattributed_share", 0.0))
    if account.orphans or account.shm_left or account.parity_failures or unexplained > EXPLAINED:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
