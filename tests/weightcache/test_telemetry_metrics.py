"""What the collector shows: every member from the start, few series, each of them moved by something."""

import itertools
import math
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fixtures.story import SECOND, Story, recovery
from tests.weightcache.bookkeeping import Books, cold, config, miss, warm

from weightcache.forecast import Verdict
from weightcache.slo import THRESHOLDS_S, bounds_s
from weightcache.telemetry.worst import WINDOWS_S
from weightcache.vocabulary import CAUSES, MISS_REASONS, OUTCOMES, PATHS


class TestEmpty:
    def test_every_member_of_the_closed_lists_exists_at_0(self):
        books = Books().tell()
        for path, outcome in itertools.product(PATHS, OUTCOMES):
            assert books("readmit_recoveries_total", path=path, outcome=outcome) == 0
        for path in PATHS:
            assert books("readmit_time_to_semantic_readiness_seconds_count", path=path) == 0
        for cause in CAUSES:
            assert books("readmit_recoveries_started_total", cause=cause) == 0
        for reason in MISS_REASONS:
            assert books("weightcache_misses_total", reason=reason, detail="") == 0
            assert books("readmit_cold_starts_total", reason=reason, detail="") == 0
        assert books("readmit_cold_starts_total", reason="fingerprint", detail="torch_version") == 0
        assert books("readmit_cold_starts_total", reason="quant_not_allowed", detail="awq") == 0
        for result in ("hit", "miss"):
            assert books("weightcache_lookups_total", result=result) == 0
        for window in WINDOWS_S:
            assert books("readmit_failure_tail_seconds", window=window) == 0

    def test_thresholds_are_exact_bounds(self):
        samples = Books().tell().samples()
        for path, threshold in THRESHOLDS_S.items():
            labels = (("le", str(float(threshold))), ("path", path))
            assert ("readmit_time_to_semantic_readiness_seconds_bucket", labels) in samples
            assert ("readmit_slo_threshold_seconds", (("path", path),)) in samples
        assert 77.0 in bounds_s([77])


@pytest.mark.parametrize("seconds", [0.05, 1, 40, 330, 1500])
@pytest.mark.parametrize(
    ("name", "path"), [("weightcache_load_seconds", "miss"), ("readmit_time_to_semantic_readiness_seconds", "miss")]
)
def test_no_load_is_beyond_the_last_bound(name, path, seconds):
    """What a percentile is worked out to be lies in the bucket of what it was."""
    story = Story().open(0).lookup(0, "miss", reason="absent").phase("load_weights", 0, seconds)
    books = Books().tell(story.close(seconds, verified=True))
    buckets = {
        float(labels["le"]): value
        for family in books.registry.collect()
        for sample, labels, value, *_ in family.samples
        if sample == f"{name}_bucket" and labels["path"] == path
    }
    (holding,) = (le for le, count in buckets.items() if count and not any(buckets[it] for it in buckets if it < le))
    assert seconds <= holding < math.inf


def test_few_series_for_two_slots_and_no_more_after_a_thousand_recoveries():
    books = Books().tell(recovery(slot="a"), recovery(slot="b", episode="b" * 32))
    before = len(books.samples())
    assert before <= 900
    for number in range(1000):
        facts = {"at": 200 * (number + 1), "reason": "fingerprint", "detail": f"x{number}"}
        books.tell(miss(100 + number % 7, f"{number:032x}", "ab"[number % 2], **facts))
    assert len(books.samples()) == before
    assert len(books.replay.episodes) <= 16
    assert len(books.accounts.worst["miss"].recoveries) < 10
    assert books("readmit_cold_starts_total", reason="fingerprint", detail="") == 1000, "a detail off the list is none"


def test_every_metric_moves():
    """A metric that no story can move tells nobody anything."""
    generations = {"g1": SimpleNamespace(quarantined=None), "g2": SimpleNamespace(quarantined="wrong answers")}
    verdicts = {"a": Verdict(True), "b": Verdict(False, "absent")}
    refused: dict[str, int] = {}
    facts = {"generations": generations, "claims": ["one"], "refused": refused}
    books = Books(capacity=9, resident_bytes=5, leases=2, verdicts=verdicts, **facts)
    unmoved = set(books.tell().samples().items())
    samples = set(books.tell(Story(episode="7" * 32).open(0), now=5).samples().items())  # nothing is ready
    books.tell(recovery(), miss(30, "2" * 32, slot="b"), miss(700, "3" * 32, "b", "abandoned", at=40))
    books.tell(recovery(slot="a", episode="8" * 32), recovery(slot="b", episode="9" * 32))  # the second takes over
    books.tell(cold(527, slot="g", episode="a" * 32), warm(32, slot="g", episode="b" * 32, at=600))
    story = Story(episode=None, slot=None)
    facts = {"generation": "g1", "bytes": 100, "config": config()}
    story.say(700, "publish", "published", **facts).say(701, "lease_open", generation="g1", lease="l")
    story.say(800, "publish", "published").say(800, "publish", "failed", reason="resource")
    story.say(800, "release", "evicted").say(800, "quarantine", "set").say(800, "probe", "wrong")
    story.say(800, "process", "readopted", process="daemon").say(800, "process", "exited", process="keeper")
    unverified = Story(episode="4" * 32).open(801).close(802, verified=False)
    open_ = Story(episode="5" * 32).open(810).say(811, "attempt_start", attempt=1).phase("import", 811)
    books.tell(story, unverified, open_, now=900)
    books.health.degraded, books.health.spool_bytes, books.health.lost, books.health.salvages = True, 5, 1, 1
    refused["protocol"] = 1
    books.health.sinks.append("file")
    books.health.exported["file"], books.health.dropped["file"] = 3, 1
    samples |= set(books.samples().items())
    samples |= set(books.tell(recovery(slot="c", episode="6" * 32), now=900).samples().items())
    moved = {name for (name, _), value in samples - unmoved if value}
    constant = {"readmit_build_info", "readmit_slo_threshold_seconds", "readmit_slo_outage_threshold_seconds"}
    constant |= {"readmit_slo_ready_ratio"}
    names = {sample.name for family in books.registry.collect() for sample in family.samples}
    there = {name for (name, _), value in unmoved if value}  # the registry's, from the start
    assert names - moved - constant - there == set()


def test_verdicts_about_the_next_start():
    verdicts = {"a": Verdict(True), "b": Verdict(False, "fingerprint", "torch_version")}
    books = Books(verdicts=verdicts).tell()
    assert books("weightcache_next_start_would_hit", slot="a", reason="") == 1
    assert books("weightcache_next_start_would_hit", slot="b", reason="fingerprint") == 0
    assert books("weightcache_next_start_would_hit", slot="b", reason="") is None


@st.composite
def histories(draw):
    """Events of several slots, in an order a journal could have them, cut off anywhere."""
    story, open_, number, at = Story(), {}, 0, 0.0
    for _ in range(draw(st.integers(1, 40))):
        at += draw(st.floats(0.01, 50))
        slot = draw(st.sampled_from("ab"))
        story.slot, story.episode = slot, open_.get(slot)
        rank, attempt = draw(st.integers(0, 1)), draw(st.integers(1, 2))
        action = draw(st.sampled_from(["open", "open", "begin", "end", "lookup", "attempt", "die", "close"]))
        if action == "open":
            number += 1
            story.episode = open_[slot] = f"{number:032x}"
            story.open(at, draw(st.sampled_from(CAUSES)))
        elif action == "close":
            story.close(at, draw(st.sampled_from(["ready", "abandoned"])), verified=draw(st.booleans()))
        elif action == "lookup":
            story.lookup(at, draw(st.sampled_from(["hit", "miss", "off"])), attempt=attempt, rank=rank, reason="absent")
        elif action == "attempt":
            story.say(at, "attempt_start", attempt=attempt)
        elif action == "die":
            story.say(at, "process", "exited", attempt=attempt, process="engine", signal=9)
        else:
            phase = draw(st.sampled_from(["spawn", "import", "load_weights", "load_weights.map", "graph_capture"]))
            story.say(at, f"phase_{action}", phase, attempt=attempt, rank=rank)
    return story


@settings(max_examples=40, deadline=None)
@given(histories(), st.integers(0, 40))
def test_books_balance_at_every_moment_and_after_every_restart(story, restart):
    books, highest = Books(), {}
    for number, event in enumerate(story.events, 1):
        books.feed(event._replace(id=number))
        books.now = (event.boottime_ns + 1) / SECOND
        replay = books.replay
        assert replay.started == replay.closed + len(replay.open_episodes)
        for episode in replay.episodes:
            assert sum(episode.phases_s().values()) == pytest.approx(episode.total_s)
        if number == restart:
            again = Books().tell(SimpleNamespace(events=story.events[:number]), now=books.now)
            assert again.samples() == books.samples()
            books = again
        samples = {key: value for key, value in books.samples().items() if key[0].endswith(("_total", "_count"))}
        assert all(value >= highest.get(key, 0) for key, value in samples.items())
        highest = samples
    ready = [slot for slot in books.accounts.availability.slots.values() if slot.state == "ready"]
    assert (books.accounts.availability.outage is None) or not ready
