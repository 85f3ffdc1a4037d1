"""Would the next start hit? Verdicts against a registry, over real files, and from a real daemon."""

import urllib.request
from pathlib import Path
from typing import Any

import pytest
from tests.fixtures import checkpoints
from tests.weightcache.caches import Cache, wait_for
from tests.weightcache.clients import client, hold
from tests.weightcache.models import config

from weightcache import identity, messages
from weightcache.checkpoint import Checkpoint
from weightcache.fingerprint import CacheConfig
from weightcache.forecast import Forecast, Verdict
from weightcache.journal import Event
from weightcache.registry import Claim, Generation, Loss, Registry


def resident(registry: Registry, identity: CacheConfig, name: str = "g") -> Generation:
    generation = Generation(name, identity, 100, 1, "memfd", None, {}, [])
    registry.add(generation)
    return generation


def lookup(identity: CacheConfig | None, result: str = "hit", rank: int = 0, slot: str | None = "a") -> Event:
    facts: dict[str, Any] = {} if identity is None else {"config": identity.to_dict()}
    return Event(1, "boot", 1, 1, "n", slot, "e" * 32, 1, rank, "lookup", result, facts)


def changed(identity: CacheConfig, **fields: Any) -> CacheConfig:
    return CacheConfig.from_dict({**identity.to_dict(), **fields})


class Foresight:
    """A forecast that has looked and judged."""

    def __init__(self, *lookups: Event) -> None:
        self.registry = Registry()
        self.forecast = Forecast(self.registry)
        for event in lookups:
            self.forecast.learn(event)

    def __call__(self, slot: str = "a") -> Verdict:
        self.forecast.look()
        self.forecast.judge()
        return self.forecast.verdicts[slot]


def test_what_is_resident_would_be_hit() -> None:
    would = Foresight(lookup(config()))
    assert would().reason == "absent"
    resident(would.registry, config())
    assert would() == Verdict(True)


@pytest.mark.parametrize("field", ["torch_version", "dtype", "layout_id"])
def test_a_field_that_differs_is_named(field: str) -> None:
    would = Foresight(lookup(config()))
    resident(would.registry, changed(config(), **{field: "other"}))
    assert would()[:3] == (False, "fingerprint", field)


def test_quarantined_lost_and_loading_weights_would_not_be_hit() -> None:
    would = Foresight(lookup(config()))
    generation = resident(would.registry, config())
    generation.quarantined = "wrong answers"
    assert would().reason == "quarantined"
    would.registry.remove("g")
    would.registry.losses = [Loss("g", config(), "node_reboot")]
    assert would()[1:3] == ("residency_lost", "node_reboot")
    would.registry.claims = [Claim(config(), 7)]
    assert would().reason == "daemon_loading"


def test_a_replica_is_told_about_its_own_gpu() -> None:
    asked = lookup(config())
    asked.attributes["device"] = "GPU-1"
    would = Foresight(asked)
    resident(would.registry, config(), "there").device = "GPU-2"
    assert would().reason == "device"
    resident(would.registry, config(), "here").device = "GPU-1"
    assert would() == Verdict(True)


def test_one_rank_that_would_miss_is_enough() -> None:
    ranks = [changed(config(), tp_size=2, tp_rank=rank) for rank in range(2)]
    would = Foresight(*(lookup(each, rank=rank) for rank, each in enumerate(ranks)))
    resident(would.registry, ranks[0], "g0")
    assert would().reason == "absent"
    resident(would.registry, ranks[1], "g1")
    assert would().would_hit


@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"dp_size": 2}])
def test_ranks_of_another_parallelism_are_forgotten(sizes: dict[str, int]) -> None:
    wide = [lookup(changed(config(), **sizes), rank=rank) for rank in range(2)]
    would = Foresight(*wide, lookup(config()))
    resident(would.registry, config())
    assert would().would_hit


def test_only_slots_that_use_the_cache_are_judged() -> None:
    would = Foresight(lookup(config()), lookup(None, "off"), lookup(config(), slot=None), lookup(None, slot="old"))
    would.forecast.look()
    would.forecast.judge()
    assert would.forecast.verdicts == {}


def test_whoever_publishes_says_more_than_who_looked_up() -> None:
    unknown = changed(config(), checkpoint_digest=None)
    published = lookup(config())._replace(kind="publish", name="published")
    would = Foresight(lookup(unknown, "miss"), published)
    assert would.forecast.asked == {"a": {0: config().to_dict()}}
    assert would.forecast.learned == 2
    would.forecast.learn(published)
    assert would.forecast.learned == 2, "the same again"


class TestFiles:
    """The checkpoint may have become another one since it was asked for."""

    @pytest.fixture
    def model(self, tmp_path: Path) -> Path:
        return checkpoints.plain(tmp_path / "model")

    def foresee(self, model: Path, state: Path, digest: str) -> Foresight:
        asked = changed(config(), model_path=str(model), checkpoint_digest=digest)
        would = Foresight()
        would.forecast = Forecast(would.registry, state)
        would.forecast.learn(lookup(asked))
        resident(would.registry, asked)
        return would

    def test_files_as_they_were_are_known_without_reading_them(
        self, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        digest = identity.prove(Checkpoint.open(model), state=tmp_path / "state")
        monkeypatch.setattr("weightcache.identity.prove", None)
        assert self.foresee(model, tmp_path / "state", digest)() == Verdict(True)

    def test_files_that_changed_would_not_be_hit(self, model: Path, tmp_path: Path) -> None:
        digest = identity.prove(Checkpoint.open(model), state=tmp_path / "state")
        would = self.foresee(model, tmp_path / "state", digest)
        shard = model / checkpoints.SHARDS[0]
        shard.write_bytes(shard.read_bytes()[:-1] + b"\x01")
        assert would()[:3] == (False, "fingerprint", "checkpoint_digest")

    def test_a_folder_that_the_daemon_cannot_see_is_taken_as_unchanged(self, tmp_path: Path) -> None:
        assert self.foresee(tmp_path / "elsewhere", tmp_path / "state", "d" * 64)() == Verdict(True)


def test_a_daemon_tells_before_the_cold_start(served: Cache) -> None:
    def shows(reason: str, value: float) -> bool:
        with urllib.request.urlopen(f"http://127.0.0.1:{served.port}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        there = [line for line in lines if line.startswith("weightcache_next_start_would_hit{")]
        return there == [f'weightcache_next_start_would_hit{{reason="{reason}",slot="a"}} {value}']

    with client(hold, served.socket, "m", "a", served.journal_path) as engine:
        assert engine.hear()[0] == "miss"
        wait_for(lambda: shows("", 1.0), "the verdict that the published weights would be hit")
        generation = served.generations()[0]["generation"]
        served.ask(messages.Quarantine(generation=generation, reason="wrong answers"))
        wait_for(lambda: shows("quarantined", 0.0), "the verdict about quarantined weights")
