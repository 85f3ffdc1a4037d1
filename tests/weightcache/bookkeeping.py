"""Replay, accounts and collector of tests, and recoveries to tell them of."""

from types import SimpleNamespace

from prometheus_client import CollectorRegistry
from tests.fixtures.story import BOOT_WALL, SECOND, Story

from weightcache.episodes import Replay
from weightcache.slo import Objectives
from weightcache.telemetry.accounts import Accounts
from weightcache.telemetry.health import Health
from weightcache.telemetry.metrics import Collector


class Books:
    """Replay, accounts and collector, fed by stories."""

    def __init__(self, now=None, objectives=None, verdicts=None, **residents):
        empty = {"capacity": None, "resident_bytes": 0, "leases": 0, "generations": {}, "claims": [], "refused": {}}
        objectives = objectives or Objectives()
        self.replay, self.accounts, self.health = Replay(keep=16), Accounts(objectives), Health()
        residents = SimpleNamespace(**{**empty, **residents})
        forecast = SimpleNamespace(verdicts=verdicts or {})
        collector = Collector(self.replay, self.accounts, residents, self.health, objectives, forecast)
        collector.caught_up.set()
        self.now = None
        self.replay.clock.now = lambda: BOOT_WALL + round(self.now * SECOND)
        self.replay.clock.to_wall = lambda at_ns: at_ns
        self.registry = CollectorRegistry()
        self.registry.register(collector)

    def tell(self, *stories, now=0.0):
        for event in (event for story in stories for event in story.events):
            self.feed(event._replace(id=self.replay.position + 1))
        self.now = now
        return self

    def feed(self, event):
        self.accounts.feed(event, self.replay, self.replay.feed(event))

    def samples(self):
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in self.registry.collect()
            for sample in family.samples
        }

    def __call__(self, name, **labels):
        return self.registry.get_sample_value(name, labels)


WARM = {"page_cache": "warm", "compile_cache": "warm", "kernel_cache": "warm"}


def config(**changes):
    fields = {"model_path": "/models/ling", "checkpoint_digest": "d1", "tp_size": 8, "pp_size": 1, "dtype": "bfloat16"}
    return {**fields, "device_capability": "9.0", "engine": "sglang", **changes}


def cold(seconds, result="miss", *, episode="1" * 32, slot="a", at=0, state=WARM, **changes):
    """A recovery on eight GPUs."""
    story = Story(episode=episode, slot=slot).open(at).say(at, "attempt_start", attempt=1, starting_state=state)
    for rank in range(8):
        story.lookup(at + 1, result, rank=rank, config=config(**changes), reason="absent" if result == "miss" else None)
    return story.close(at + seconds, verified=True)


def warm(seconds, **facts):
    return cold(seconds, "hit", **facts)


def miss(seconds, episode="a" * 32, slot="a", outcome="ready", at=0, **facts):
    story = Story(episode=episode, slot=slot).open(at).say(at, "attempt_start", attempt=1)
    story.phase("load_weights", at + 1).lookup(at + 1, "miss", **{"reason": "absent", **facts})
    return story.close(at + seconds, outcome, verified=True)
