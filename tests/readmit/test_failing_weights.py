"""Resident weights of which every engine dies: after two attempts the next one reads the disk, also without a gate."""

import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from tests.fixtures import http
from tests.readmit.nodes import free_port
from tests.weightcache.caches import Cache, wait_for
from tests.weightcache.models import Tiny, config, fill
from tests.weightcache.publishing import publish

from weightcache.publish import pack

ENGINE = Path(__file__).with_name("failing_engine.py")


@pytest.fixture
def bad(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Cache, str]]:
    """A weight cache that holds weights which are not numbers, and their generation."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    cache = Cache()
    cache.start()
    try:
        model = Tiny()
        fill(model)
        with torch.no_grad():
            model.embed.weight[0, 0] = float("nan")
        yield cache, publish(cache, pack(model, config(), origin="a bad load"))
    finally:
        cache.close()


def test_two_failed_attempts_in_a_row_end_in_a_load_from_disk(bad: tuple[Cache, str]) -> None:
    cache, generation = bad
    port = free_port()
    command = [sys.executable, "-m", "readmit.cli", "run", "--backoff", "0", "--", sys.executable, str(ENGINE)]
    cache.run([*command, str(port)])

    def answered() -> bool:
        try:
            return http.get(f"http://127.0.0.1:{port}", timeout=60).status_code == 200
        except httpx.TransportError:
            return False

    wait_for(answered, "an answer")
    lookups = [event for event in cache.lookups() if event.slot == "a"]
    assert [event.name for event in lookups] == ["hit", "hit", "miss"]
    assert lookups[-1].attributes["reason"] == "quarantined"
    (quarantine,) = cache.events("WHERE kind = 'quarantine'")
    assert quarantine.attributes["generation"] == generation
    assert "killed by SIGABRT, killed by SIGABRT" in quarantine.attributes["reason"]
    wait_for(lambda: cache.metric("weightcache_misses_total", reason="quarantined") == 1, "the miss to be counted")
    assert cache.metric("weightcache_quarantines_total") == 1
    states = {each["generation"]: bool(each["quarantined"]) for each in cache.generations()}
    assert states.pop(generation)
    assert list(states.values()) == [False], "what was read from disk is resident now"
