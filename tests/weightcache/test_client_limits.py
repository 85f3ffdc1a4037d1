"""Memory, capacity and descriptors that are short: a lack with its numbers, never a crash."""

import os

import pytest
from tests.weightcache.attaching import fresh, load, only_lookup
from tests.weightcache.caches import Cache, few_descriptors, wait_for
from tests.weightcache.models import config, contents, skeleton
from tests.weightcache.publishing import packed, publish

from weightcache import client, messages
from weightcache.client import attach
from weightcache.errors import CacheMiss
from weightcache.journal import Journal
from weightcache.memory import Available

pytestmark = pytest.mark.usefixtures("own_state")


def test_no_memory_for_a_second_copy_is_a_lack_with_both_counts(served: Cache) -> None:
    publish(served, packed(config(dtype="float16")))
    with pytest.raises(CacheMiss) as short:
        load(served, load_bytes=1 << 50, policies={"fingerprint": "fallback"})
    assert (short.value.reason, short.value.detail) == ("resource", "memory")
    assert short.value.data["needed"] == 1 << 50
    assert 0 < short.value.data["available"] < 1 << 50
    row = only_lookup(served).attributes
    assert (row["reason"], row["detail"], row["policy"]) == ("resource", "memory", "fail")
    assert row["because"]["reason"] == "fingerprint"
    wait_for(lambda: not served.status()["claims"], "the claim to be given up")


def test_useless_copies_go_where_memory_is_short(served: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarantined generation must not keep its own engine from starting."""
    bad = publish(served, packed())
    wait_for(lambda: served.leases() == 0)
    served.ask(messages.Quarantine(generation=bad, reason="wrong answers"))

    def available() -> Available:
        return Available(10 if any(each["generation"] == bad for each in served.generations()) else 1 << 40, "a limit")

    monkeypatch.setattr(client.memory, "available", available)
    _, outcome = load(served, load_bytes=100)
    assert outcome.reason == "quarantined"
    assert [each["generation"] for each in served.generations()] == [outcome.generation]


def test_without_room_for_the_copying_weights_stay_private(served: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client.memory, "available", lambda: Available(150, "a limit"))
    model, outcome = load(served, load_bytes=100)
    assert contents(model) == contents(fresh())
    assert outcome.generation is None
    assert "second copy" in str(outcome.private_because)
    assert served.status()["claims"] == []


def test_without_room_in_the_cache_weights_stay_private(cache: Cache) -> None:
    cache.start("--capacity", "1")
    model, outcome = load(cache)
    assert contents(model) == contents(fresh())
    assert (outcome.generation, cache.generations()) == (None, [])
    assert "capacity" in str(outcome.private_because)
    failed = cache.events("WHERE kind = 'publish' ORDER BY id")
    assert [event.name for event in failed] == ["begin", "failed"]
    assert (failed[1].attributes["reason"], failed[1].attributes["detail"]) == ("resource", "capacity")


def test_what_cannot_fit_replaces_nothing(cache: Cache) -> None:
    cache.start("--capacity", "1MiB")
    old = publish(cache, packed(config(revision="old")))
    wait_for(lambda: cache.leases() == 0)
    _, outcome = load(cache, load_bytes=2 << 20)
    assert outcome.reason == "fingerprint"
    assert old in [each["generation"] for each in cache.generations()]


def test_out_of_descriptors_is_a_lack_and_not_a_crash(served: Cache) -> None:
    publish(served, packed())
    model = skeleton()
    silent = Journal(None)
    for left in (0, 1, 2):
        with few_descriptors(left=left), pytest.raises(CacheMiss) as lack:
            attach(model, config(), socket=served.socket, journal=silent)
        assert (lack.value.reason, lack.value.detail) == ("resource", "descriptors")
    attach(model, config(), socket=served.socket, journal=silent)
    assert contents(model) == contents(fresh())


def test_an_engine_that_cannot_publish_for_want_of_descriptors_serves_all_the_same(
    served: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory_file(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", no_memory_file)
    model, outcome = load(served)
    assert contents(model) == contents(fresh())
    assert "no memory file can be made" in str(outcome.private_because)
