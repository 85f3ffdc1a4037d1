"""What moves the metrics that no recording and no live run moves: GPUs, losses, damage, operators.

A metric that nothing can move tells nobody anything; some of those there have been elsewhere were always 0.
"""

import json
from collections import Counter
from types import SimpleNamespace
from typing import Any, Final

from prometheus_client import CollectorRegistry
from tests.fixtures.story import BOOT_WALL, SECOND, Story
from tests.observability.history import RECORDINGS

from readmit.gate.metrics import GateMetrics
from readmit.gate.slots import Lease, Slot
from weightcache.episodes import Replay
from weightcache.fingerprint import CacheConfig
from weightcache.forecast import Verdict
from weightcache.registry import Generation, Registry
from weightcache.slo import Objectives
from weightcache.telemetry.accounts import Accounts
from weightcache.telemetry.health import Health
from weightcache.telemetry.metrics import Collector

CONSTANT: Final = {"readmit_build_info": "it is its labels that tell something; the fleet's dashboard counts them"}
"""Metrics that never move, and why they exist."""

_PROMISES: Final = {
    "thresholds_s": {"hit": 30.0},
    "outage_threshold_s": 5.0,
    "ready_ratio": {"slot": 0.9},
    "late_events": {"hit": 7},
    "phase_limits_s": {"import": 3.0},
}
_WARM: Final = {"page_cache": "warm", "compile_cache": "warm", "kernel_cache": "warm"}

Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def moved() -> set[str]:
    """Names of samples that differ between a calm node and one that everything happens to, and between their gates."""
    calm, busy = _calm(), _busy()
    return {name for name, labels in calm.keys() & busy.keys() if calm[name, labels] != busy[name, labels]}


def _calm() -> Values:
    return _collected(Objectives(), Registry(), Health(sinks=["file"]), _recovered(Story(), 5)) | _gate(False)


def _busy() -> Values:
    config, registry = _config(device_capability="9.0"), Registry(capacity=1)
    registry.claim(config.to_dict(), pid=1)
    registry.refused = Counter(protocol=1)
    registry.add(Generation("there", config, 5, 1, "memfd", None, {}, []))
    ones = Counter(file=1)
    health = Health(degraded=True, spool_bytes=5, lost=1, salvages=1, sinks=["file"], exported=ones, dropped=ones)
    cold = _looked(Story(episode="1" * 32), 0, "miss", config, reason="absent").close(500, verified=True)
    warm = _looked(Story(episode="2" * 32), 1000, "hit", config).close(1030, verified=False)
    story = Story(episode=None).say(1100, "publish", "published", generation="g", bytes=5, config=config.to_dict())
    story.say(1101, "lease_open", generation="g", lease="l").say(1200, "quarantine", "set", generation="g")
    story.say(1300, "release", "lost", generation="other")
    story.say(1400, "process", "exited", process="engine", pid=1)  # on purpose: nobody recovers it
    return _collected(Objectives.of(_PROMISES), registry, health, cold, warm, story, would_hit=False) | _gate(True)


def _collected(
    objectives: Objectives, registry: Registry, health: Health, *stories: Story, would_hit: bool = True
) -> Values:
    replay, accounts = Replay(), Accounts(objectives)
    forecast = SimpleNamespace(verdicts={"a": Verdict(would_hit)})
    collector = Collector(replay, accounts, registry, health, objectives, forecast)
    collector.caught_up.set()
    for number, event in enumerate((event for story in stories for event in story.events), 1):
        numbered = event._replace(id=number)
        accounts.feed(numbered, replay, replay.feed(numbered))
    replay.clock.now = lambda: BOOT_WALL + 2000 * SECOND  # type: ignore[method-assign]
    return _values(collector.collect())


def _gate(busy: bool) -> Values:
    metrics = GateMetrics(CollectorRegistry(), ["a"])
    slot = Slot("a", "http://127.0.0.1:1")
    if busy:
        for state in ("starting", "loading", "verifying"):
            slot.enter(state, "engine_started")
        slot.open(Lease(None, None, None, 0, overridden=True))
        slot.wrong_while_ready = 1
        metrics.cost(slot, SimpleNamespace(private_bytes=1, gpu_bytes=1, kv_tokens=1))  # type: ignore[arg-type]
        metrics.in_flight.inc()
        metrics.override_ends.set(1)
        metrics.unanswered.labels("a").set(1)
    metrics.fleet([slot], admitting=True, probe_set_suspect=busy)
    return _values(metrics.registry.collect())


def _recovered(story: Story, seconds: float) -> Story:
    return story.open(0).close(seconds, verified=True)


def _looked(story: Story, at: float, result: str, config: CacheConfig, **facts: Any) -> Story:
    story.open(at).say(at, "attempt_start", attempt=1, starting_state=_WARM)
    return story.lookup(at + 1, result, config=config.to_dict(), **facts)


def _config(**changes: Any) -> CacheConfig:
    """One of the recorded ones."""
    rows = map(json.loads, (RECORDINGS / "pair.jsonl").read_text().splitlines())
    published = next(row[-1]["config"] for row in rows if row[-3:-1] == ["publish", "published"])
    return CacheConfig.from_dict({**published, **changes})


def _values(families: Any) -> Values:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }
