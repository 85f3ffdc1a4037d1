"""The demo, step by step."""

import contextlib
import http.client
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from readmit.demo import controls
from readmit.demo.node import Node
from readmit.demo.reference import right_answers
from readmit.demo.traffic import Traffic
from readmit.demo_model import second_checkpoint
from weightcache.episodes import Episode, Replay
from weightcache.errors import ConfigError
from weightcache.memory import resident_bytes

PROBES: Final = ("The capital of France is", "def fibonacci(n):", "One, two, three, four,")
PROBE_TOKENS: Final = 4
PROMPT: Final = "The capital of France is"
PROMPT_TOKENS: Final = 1

Tell = Callable[[str], None]


class Demo:
    """One run.

    Args:
        folder: an empty folder for all it makes.
        model: the prepared model.
        prompt: what the steady client asks.
        step: told at the beginning of each step.
        tell: told what is going on within one.
    """

    def __init__(self, folder: Path, model: Path, prompt: str, step: Tell, tell: Tell) -> None:
        self.folder = folder
        self.prompt = prompt
        self.step = step
        self.tell = tell
        self.source = model
        # Its own copy, because the steps rename and replace its files.
        self.model = folder / model.name
        self.twin = folder / "second" / model.name
        self.probe_file = folder / "probes.json"
        self.recoveries: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}
        self.node: Node

    def run(self) -> dict[str, Any]:
        """All steps; returns the report."""
        first, second = self._prepare()
        self.node = Node(self.folder, "node", self.model, self.probe_file)
        traffic = Traffic(self.node.url, self.model.name, self.prompt, PROMPT_TOKENS)
        traffic.right = frozenset({first["answer"]})
        traffic.start()
        try:
            self._off()
            self._miss_then_hits()
            self._daemon_dies()
            self._both_die_without_files()
            traffic.right = frozenset({first["answer"], second["answer"]})
            self._other_checkpoint(second["probes"], lambda: _only(traffic, second["answer"]))
            self._standby(second["answer"])
            self._controls(second["probes"])
        finally:
            counts = traffic.stop()
        return self._report(counts)

    def _prepare(self) -> list[dict[str, Any]]:
        self.step(
            "0  right answers from plain transformers, for the model and for a second checkpoint of equal headers"
        )
        shutil.copytree(self.source, self.model)
        second_checkpoint(self.model, self.twin)
        prepared: list[dict[str, Any]] = []
        for model in (self.model, self.twin):
            self.tell(f"asking {model}")
            questions = [(prompt, PROBE_TOKENS) for prompt in PROBES]
            *golden, answer = right_answers(model, [*questions, (self.prompt, PROMPT_TOKENS)])
            if not answer:
                raise ConfigError(
                    "prompt",
                    f"the model ends its answer to {self.prompt!r} before the first word, which proves nothing",
                    expected="a prompt that it continues",
                    found="an empty answer from plain transformers",
                    remedy="Choose another --prompt: this model continues sentences, such as 'The capital of Italy is'",
                )
            probes = {
                "model": self.model.name,
                "engine": "transformers",
                "probes": [
                    {"name": f"golden-{number}", "prompt": prompt, "max_tokens": PROBE_TOKENS, "expect": {"text": text}}
                    for number, (prompt, text) in enumerate(zip(PROBES, golden, strict=True), 1)
                ],
            }
            prepared.append({"answer": answer, "probes": probes})
        self._use_probes(prepared[0]["probes"])
        self.facts["answers"] = {"prompt": self.prompt, "first": prepared[0]["answer"], "second": prepared[1]["answer"]}
        return prepared

    def _off(self) -> None:
        self.step("1  cold start, weight cache off; then kill -9, to have the same starting state as a hit")
        with self._recovery("1 cold start, off"):
            self.node.up("off")
        with self._recovery("1 kill -9, off"):
            self.node.kill("a")
        self.node.down()

    def _miss_then_hits(self) -> None:
        self.step("2  client mode, daemon empty: a miss with its reason; the engine loads from disk and publishes")
        with self._recovery("2 daemon empty"):
            self.node.up("client")
        self.step("3  kill -9 the engine: a hit")
        for number in (1, 2):
            with self._recovery(f"3 kill -9 engine ({number})"):
                self.node.kill("a")

    def _daemon_dies(self) -> None:
        self.step("4  kill -9 the daemon while the engine serves: it keeps answering, the daemon re-adopts")
        engine, before = self.node.pid("a"), self.node.cache_status()
        with ThreadPoolExecutor(1) as beside:
            killed = time.perf_counter()
            self.node.kill("daemon")
            answer = beside.submit(self.node.complete, self.prompt, PROMPT_TOKENS)
            self.node.wait_served(before["pid"])
            took = time.perf_counter() - killed
        after = self.node.cache_status()
        kept = [each["generation"] for each in after["generations"]] == [
            each["generation"] for each in before["generations"]
        ]
        self.facts["daemon"] = {
            "rss_mib": after["rss_mib"],
            "readopt_s": round(took, 3),
            "generations_kept": kept,
            "leases_kept": sum(len(each["leases"]) for each in after["generations"]),
            "engine_kept": self.node.pid("a") == engine,
            "answer_meanwhile": answer.result(),
        }
        self.facts["keeper"] = {"rss_mib": round(resident_bytes(self.node.keeper_pid) / 2**20, 1)}
        self.tell(f"serving again {took:.3f} s after SIGKILL, lease of the engine included")

    def _both_die_without_files(self) -> None:
        self.step("5  the shard files are renamed away, then kill -9 daemon and engine together: a hit all the same")
        shards = sorted(self.model.glob("*.safetensors"))
        for shard in shards:
            shard.rename(shard.with_suffix(".away"))
        with self._recovery("5 kill -9 both, no files"):
            self.node.kill("daemon", "a")
        for shard in shards:
            shard.with_suffix(".away").rename(shard)

    def _other_checkpoint(self, probes: dict[str, Any], switched: Callable[[], None]) -> None:
        self.step(
            "6  a second real checkpoint at the same path, equal headers: a miss, explained, replaced; then a hit"
        )
        for shard in sorted(self.twin.glob("*.safetensors")):
            os.replace(shard, self.model / shard.name)
        with self._recovery("6 second checkpoint"):
            self.node.kill("a")
            self._use_probes(probes)
        switched()
        with self._recovery("6 kill -9 engine"):
            self.node.kill("a")

    def _standby(self, answer: str) -> None:
        self.step("7  two slots on the same weights: kill -9 what serves, and the standby takes over; two clocks run")
        node = Node(self.folder, "pair", self.model, self.probe_file, self.node.socket, slots=("a", "b"))
        traffic = Traffic(node.url, self.model.name, self.prompt, PROMPT_TOKENS)
        traffic.right = frozenset({answer})
        node.up("client")
        try:
            serving = node.wait_all_ready()["serving"]
            traffic.start()
            try:
                known = node.last_episode()
                killed = time.perf_counter()
                node.kill(serving)
                answered_s = self._next_answer(node, killed)
                for _ in node.wait_ready(known):  # the takeover is what ends first
                    pass
                parked = next(slot for slot in node.wait_all_ready()["slots"] if not slot["active"])
            finally:
                counts = traffic.stop()
            with contextlib.closing(node.journal()) as journal:
                replay = Replay()
                replay.catch_up(journal)
            standby = next(it for it in reversed(replay.episodes) if it.path == "standby")
            engine = next(it for it in reversed(replay.episodes) if it.slot == serving)
            step = "7 kill -9, standby"
            self.recoveries.append(account(step, standby, node.complete(self.prompt, PROMPT_TOKENS)))
        finally:
            node.down()
        self.facts["standby"] = {
            "kill_to_answer_s": round(answered_s, 4),
            "service_outage_s": round(standby.total_s, 4),
            "engine_recovery_s": round(engine.total_s, 3),
            "engine_path": engine.path,
            "parked": parked["cost"],
            "client": counts,
        }
        self.tell(f"{step}: service outage {standby.total_s:.3f} s, engine recovery {engine.total_s:.2f} s")

    def _next_answer(self, node: Node, since: float) -> float:
        """Seconds since then until the gate gives an answer that begins after it."""
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):  # the kill broke it off
                node.complete(self.prompt, PROMPT_TOKENS)
                return time.perf_counter() - since

    def _controls(self, probes: dict[str, Any]) -> None:
        self.step("8  controls: a wrong golden answer keeps the gate shut; a damaged manifest is refused")
        golden = controls.wrong_golden_answer(self.folder, self.model, self.node.socket, probes)
        self.tell(f"gate: {golden['because']}")
        config = self.node.cache_status()["generations"][0]["config"]
        manifest = controls.damaged_manifest(self.node.socket, config)
        self.tell(f"daemon: {manifest['because']}")
        self.facts["controls"] = {
            "wrong_golden_refused": golden["refused"],
            "damaged_manifest_refused": manifest["refused"],
            "because": {"wrong_golden": golden["because"], "damaged_manifest": manifest["because"]},
        }

    def _use_probes(self, probes: dict[str, Any]) -> None:
        fresh = self.probe_file.with_suffix(".new")
        fresh.write_text(json.dumps(probes, indent=1))
        fresh.replace(self.probe_file)

    @contextlib.contextmanager
    def _recovery(self, step: str) -> Iterator[None]:
        """Around what starts an episode: wait for its end and keep its account."""
        before = self.node.last_episode()
        yield
        for body in self.node.wait_ready(before):
            self.tell(f"{step}: {body.get('phase', 'starting')}, {body.get('elapsed_s', 0)} s")
        answer = self.node.complete(self.prompt, PROMPT_TOKENS)
        with contextlib.closing(self.node.journal()) as journal:
            replay = Replay()
            replay.catch_up(journal)
        episode = replay.episodes[-1]
        self.recoveries.append(account(step, episode, answer))
        self.tell(f"{step}: {episode.path} in {episode.total_s:.2f} s")

    def _report(self, traffic: dict[str, Any]) -> dict[str, Any]:
        tried = [each for each in self.recoveries if each["path"] in ("hit", "partial", "miss")]
        hits = sum(each["path"] == "hit" for each in tried)
        return {
            "model": {
                "name": self.model.name,
                "bytes": sum(file.stat().st_size for file in self.model.glob("*.safetensors")),
                **self.facts["answers"],
            },
            "recoveries": self.recoveries,
            "standby": self.facts["standby"],
            "controls": self.facts["controls"],
            "daemon": self.facts["daemon"],
            "keeper": self.facts["keeper"],
            "client": traffic,
            "hit_rate": {"hits": hits, "attempts": len(tried), "rate": round(hits / len(tried), 3)},
        }


def account(step: str, episode: Episode, answer: str) -> dict[str, Any]:
    """One recovery as the report has it."""
    miss = episode.miss
    return {
        "step": step,
        "path": episode.path,
        "cause": episode.cause,
        "outcome": episode.outcome,
        "reason": episode.reason,
        "detail": episode.detail,
        "message": miss.attributes.get("message") if miss else None,
        "differences": miss.attributes.get("differences", []) if miss else [],
        "total_s": round(episode.total_s, 3),
        "phases": {name: round(seconds, 4) for name, seconds in episode.phases_s().items()},
        "parts": {name: round(seconds, 4) for name, seconds in episode.parts_s().items()},
        "episode": episode.id,
        "first_answer": answer,
    }


def _only(traffic: Traffic, answer: str) -> None:
    traffic.right = frozenset({answer})
