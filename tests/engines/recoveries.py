"""Kill vLLM in every way and on every path, and say how it came back: a table, then one line of JSON.

``python -m tests.engines.recoveries [--kills N] [--parts off,shared,tp2,observed] [--again] [--with FILE]``

Exit status 1: processes or shared memory of a killed engine are left, an answer differs, or more than a tenth of a
recovery belongs to no phase. Times depend on what else the machine does: they are printed beside what is aimed at, and
judged by whoever reads them.
"""

import argparse
import copy
import json
import tempfile
import traceback
from pathlib import Path
from typing import Any, Final

import torch
import vllm
from tests.engines import checkpoints
from tests.engines.node import NAME, PROMPTS, Answer, Node, forget_pages, observed_start, p50

from readmit.demo_model import prepare
from weightcache.episodes import Episode
from weightcache.vocabulary import UNATTRIBUTED

PARTS: Final = ("off", "shared", "tp2", "observed")
KILLED: Final = ("api", "core", "worker")
PHASES: Final = {"import", "tokenizer_init", "distributed_init", "load_weights", "server_ready"}
"""What every start of vLLM goes through."""
EXPLAINED: Final = 0.1
"""Share of a recovery's time that may belong to no phase."""
SPEEDS: Final = 2
"""How often the speed of either engine is measured in a turn. Engines started alike differ more than one's requests."""
BLOCK_FP8: Final = (
    "compared by test_vllm_parity.py"
    if torch.cpu._is_amx_tile_supported()
    else "not in vLLM, which needs AMX for it: the reference engine's tests compare it"
)
TOLERANCE: Final = 0.1
"""Nats by which a log-probability in bf16 may move between batches."""


class Account:
    """What was seen so far."""

    def __init__(self) -> None:
        self.recovered: dict[str, list[Episode]] = {}
        """The recoveries from kills, by what they are counted as."""
        self.unattributed_elsewhere = 0.0
        """`unattributed_share` of parts that another process has run."""
        self.told: dict[str, list[Episode]] = {}
        """The same, and the starts before."""
        self.standby_s: list[float] = []
        self.orphans = self.shm_left = self.parity_failures = 0
        self.logprobs_apart = 0.0
        self.expected: dict[str, list[Answer]] = {}
        self.tp2: dict[str, Any] | None = None
        self.facts: dict[str, tuple[Any, str]] = {}
        """What else was measured, and what is aimed at."""

    def kill(self, node: Node, part: str, path: str, *, slot: str = "a", named: str, model: str = "demo") -> Episode:
        """Kill a part of an engine and account for its recovery on a path that must be the expected one.

        Args:
            node: whose engine it is.
            part: see `Node.kill`.
            path: how it must get its weights.
            slot: which engine.
            named: what to count it as.
            model: whose answers it must give.
        """
        episode, orphans, shm_left = node.kill(part, slot)
        assert (episode.cause, episode.outcome) == ("crash", "ready"), f"{episode.cause}, {episode.outcome}: {part}"
        assert path == episode.path, f"{episode.path} ({episode.reason}) in place of {path}"
        assert set(episode.phases_s()) >= PHASES, sorted(PHASES - set(episode.phases_s()))
        started, refusal = node.started(slot)
        assert started == ("forked" if slot in node.forked else None), f"{named}: {started}, {refusal}"
        self.orphans, self.shm_left = self.orphans + orphans, self.shm_left + shm_left
        self.recovered.setdefault(named, []).append(episode)
        self.tell(named, part, episode)
        self.check(node, slot, model)
        return episode

    def tell(self, named: str, part: str, episode: Episode) -> None:
        """Print a recovery."""
        self.told.setdefault(named, []).append(episode)
        pages = (episode.attempt.starting_state or {}).get("page_cache") if episode.attempt else None
        seconds = f"{episode.total_s:7.2f} s  files {pages}; {_phases(episode.phases_s())}"
        print(f"{named:8} {part:7} {episode.path:7} {seconds}", flush=True)

    def check(self, node: Node, slot: str = "a", model: str = "demo") -> None:
        """Compare an engine's answers with the first ones of its model; other ones twice in a row are a failure.

        The numbers move a little when the gate happens to ask at the same moment and vLLM batches the two, which can
        tip a token over. That they are equal to the bit is tested where nobody else asks (``test_vllm_parity``).
        """
        found = node.answers(slot)
        expected = self.expected.setdefault(model, found)
        if not self._alike(found, expected):
            self.parity_failures += not self._alike(node.answers(slot), expected)

    def _alike(self, found: list[Answer], expected: list[Answer]) -> bool:
        alike = True
        for (text, got), (right, wanted) in zip(found, expected, strict=True):
            apart = max(abs(one - other) for one, other in zip(got, wanted, strict=True))
            self.logprobs_apart = max(self.logprobs_apart, apart)
            alike = alike and text == right and apart <= TOLERANCE
        return alike

    @property
    def unattributed_share(self) -> float:
        """The share of their time that belongs to no phase, for the kind of recovery where it is largest."""
        shares = (
            sum(it.phases_s().get(UNATTRIBUTED, 0.0) for it in alike) / sum(it.total_s for it in alike)
            for alike in self.told.values()
        )
        return max(self.unattributed_elsewhere, *shares)

    def p50_s(self, named: str) -> float:
        return p50([episode.total_s for episode in self.recovered[named]])

    def hit_ms(self) -> dict[str, float]:
        """The median of ``load_weights`` and of each of its parts, where the demo model was mapped."""
        hits = [*self.recovered.get("hit", ()), *self.recovered.get("preload", ())]
        taken = [{"load_weights": it.phases_s()["load_weights"], **it.parts_s()} for it in hits]
        names = [name for name in taken[0] if name.startswith("load_weights")] if taken else []
        return {name: p50([1000 * seconds[name] for seconds in taken]) for name in names}

    def add(self, report: dict[str, Any]) -> None:
        """Account for the parts that another process has run, by its last line."""
        self.tp2 = report["tp2"]
        self.unattributed_elsewhere = report["unattributed_share"]
        self.parity_failures += report["parity_failures"]
        self.orphans, self.shm_left = self.orphans + report["orphans"], self.shm_left + report["shm_left"]

    def report(self) -> dict[str, Any]:
        """The last line."""
        paths = {
            name: {"n": len(self.recovered[name]), "p50_s": self.p50_s(name)}
            for name in ("off", "miss", "hit", "preload")
            if name in self.recovered
        }
        if self.standby_s:
            paths["standby"] = {"n": len(self.standby_s), "p50_s": p50(self.standby_s)}
        hit_ms = self.hit_ms()
        return {
            "engine": f"vllm {vllm.__version__} cpu",
            "paths": paths,
            "load_weights_hit_ms": hit_ms.get("load_weights"),
            "bind_ms": hit_ms.get("load_weights.bind"),
            "unattributed_share": round(self.unattributed_share, 4),
            "parity_failures": self.parity_failures,
            "tp2": self.tp2,
            "orphans": self.orphans,
            "shm_left": self.shm_left,
        }


def probes(text: str = "Paris") -> dict[str, Any]:
    expected = {"regex": text}
    return {"model": NAME, "probes": [{"name": "p", "prompt": PROMPTS[0], "max_tokens": 4, "expect": expected}]}


def off(account: Account, model: Path, kills: int) -> None:
    """Restarts from disk, without a cache; before the first start the files are not in memory."""
    node = Node(model, mode="off")
    try:
        forget_pages(model)
        node.start(probes())
        account.tell("off", "-", node.closed()[0])
        account.check(node)
        for number in range(kills):
            account.kill(node, KILLED[number % len(KILLED)], "off", named="off")
    finally:
        node.stop()


def shared(account: Account, model: Path, kills: int) -> None:
    """Two engines on the same weights: forked restarts of the one, plain ones and misses of the other, in turn."""
    node = Node(model, slots="ab", forked="a")
    speeds: dict[str, list[float]] = {"a": [], "b": []}
    try:
        node.start(probes())
        for slot in "ab":
            account.check(node, slot)
        resident = node.wait_for_resident()
        for number in range(kills):
            part = KILLED[number % len(KILLED)]
            # Either is first in turn: of two engines the one started last is the faster, however it was started.
            for slot in "ba" if number % 2 else "ab":
                account.kill(node, part, "hit", slot=slot, named="preload" if slot in node.forked else "hit")
            for _ in range(SPEEDS):
                for slot, measured in speeds.items():  # in turn: what else the machine does hits both
                    measured.append(node.tokens_per_s(slot))
            node.release()
            account.kill(node, part, "miss", slot="b", named="miss")
        account.standby_s = [takeover.total_s for takeover in node.takeovers()]
    finally:
        node.stop()
    assert len(account.standby_s) >= kills, "whoever serves dies at least once in each turn"
    misses = account.recovered["miss"]
    publish = [it.parts_s()["load_weights.publish"] for it in misses]
    ratio = account.p50_s("preload") / account.p50_s("hit")
    account.facts |= {
        "resident process": (resident, ""),
        "forked restart / plain restart": (round(ratio, 3), "at most 0.25"),
        "tokens per second, forked / plain": (round(p50(speeds["a"]) / p50(speeds["b"]), 3), "0.95 to 1.05"),
        "tokens per second, forked, plain": ((p50(speeds["a"]), p50(speeds["b"])), ""),
        "publishing, ms": (p50([1000 * seconds for seconds in publish]), ""),
        "publishing / recovery that misses": (
            round(max(seconds / it.total_s for seconds, it in zip(publish, misses, strict=True)), 4),
            "at most 0.1",
        ),
        "outage with a standby, s, worst": (round(max(account.standby_s), 3), "at most 1"),
    }


def tp2(account: Account, model: Path, kills: int) -> None:
    """Two ranks on the CPU: both hit, or it is no hit and says which rank missed."""
    with tempfile.TemporaryDirectory() as folder:
        small = checkpoints.write("llama", Path(folder) / "llama", tokenizer_of=model)
        node = Node(small, forked="a", arguments=("--tensor-parallel-size", "2"))
        try:
            node.start(probes(""))
            [first] = node.closed()
            account.check(node, model="llama")
            node.wait_for_resident()
            for number in range(kills):
                part = KILLED[number % len(KILLED)]
                hit = account.kill(node, part, "hit", named="tp2", model="llama")
                assert hit.attempt is not None
                lookups = {it.rank: it for it in hit.attempt.lookups}
                assert {rank: it.result for rank, it in lookups.items()} == {0: "hit", 1: "hit"}
            node.release(lookups[1].attributes["generation"])
            partial = account.kill(node, "api", "partial", named="partial", model="llama")
        finally:
            node.stop()
    assert first.path == "miss"
    assert partial.miss is not None
    joining = ("distributed_init.topology", "distributed_init.rendezvous")
    account.tp2 = {
        "n": kills,
        "p50_s": account.p50_s("tp2"),
        "hits": len(lookups),
        "partial": {"missed_rank": partial.miss.rank, "reason": partial.reason, "total_s": round(partial.total_s, 3)},
        "slowest_rank": _slowest(hit),
        "distributed_init": {part.partition(".")[2]: round(hit.parts_s()[part], 3) for part in joining},
    }
    assert partial.miss.rank == 1


def _phases(taken: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in taken.items())


def _slowest(episode: Episode) -> int:
    """The rank whose last phase ended last; the episode's phases must be that rank's."""
    ends = dict.fromkeys((0, 1), 0)
    loading: dict[int, float] = {}
    for interval, end_ns in episode.bounded():
        if interval.rank is not None:
            ends[interval.rank] = max(ends[interval.rank], end_ns)
            if interval.name == "load_weights":
                loading[interval.rank] = (end_ns - interval.begin_ns) / 1e9
    slowest = max(ends, key=lambda rank: (ends[rank], -rank))
    assert abs(episode.phases_s()["load_weights"] - loading[slowest]) < 1e-6
    return slowest


def observed(account: Account, model: Path, kills: int) -> None:
    """A start without our plug-in, of which we know what vLLM prints."""
    del kills
    account.tell("observed", "-", observed_start(model, probes()))


def run(part: str, account: Account, model: Path, kills: int, *, again: bool) -> Account:
    """The account with a part added to it.

    Args:
        part: of `PARTS`.
        account: of the parts before.
        model: see there.
        kills: on every path.
        again: whether it is tried a second time if it breaks off, from its beginning and on another node.
    """
    added = copy.deepcopy(account)
    try:
        globals()[part](added, model, kills)
    except (AssertionError, OSError):
        if not again:
            raise
        traceback.print_exc()
        print(f"{part} broke off; once more", flush=True)
        return run(part, account, model, kills, again=False)
    return added


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=3, help="kills on every path")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--again", action="store_true", help="try a part that breaks off a second time")
    parser.add_argument(
        "--with", dest="others", type=Path, help="what was said about other parts; its last line counts"
    )
    arguments = parser.parse_args()
    model, account = prepare(), Account()
    if arguments.others is not None:
        account.add(json.loads(arguments.others.read_text().splitlines()[-1]))
    for part in arguments.parts.split(","):
        account = run(part, account, model, arguments.kills, again=arguments.again)
    report = account.report()
    if hit_ms := account.hit_ms():
        account.facts |= {
            "load_weights on a hit, ms": (hit_ms.pop("load_weights"), "at most 400"),
            "bind, ms": (hit_ms["load_weights.bind"], "at most 30"),
            "parts of load_weights, ms": (_phases({name.partition(".")[2]: ms for name, ms in hit_ms.items()}), ""),
        }
    account.facts |= {
        "block-wise FP8 from disk and from the cache": (BLOCK_FP8, ""),
        "log-probabilities apart, nats, worst": (round(account.logprobs_apart, 4), f"at most {TOLERANCE}"),
        "belongs to no phase, share, worst": (report["unattributed_share"], f"at most {EXPLAINED}"),
    }
    print()
    for name, (value, aim) in account.facts.items():
        print(f"{name:40} {value!s:24} {aim}")
    print(json.dumps(report))
    if account.orphans or account.shm_left or account.parity_failures or account.unattributed_share > EXPLAINED:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
