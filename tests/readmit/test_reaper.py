"""The reaper on a real daemon: what nobody uses goes after its time, and nothing else does."""

from collections.abc import Iterator

import pytest
from tests.weightcache.caches import Cache, wait_for
from tests.weightcache.clients import client, hold

from readmit.reaper import Reaper
from weightcache.errors import CacheMiss


@pytest.fixture
def cache() -> Iterator[Cache]:
    cache = Cache()
    cache.start()
    yield cache
    cache.close()


def test_what_nobody_uses_goes_after_its_time(cache: Cache) -> None:
    now = 0.0
    reaper = Reaper(cache.socket, 600, lambda: now)
    with client(hold, cache.socket, "tiny") as engine:
        _, generation, _ = engine.hear()
        assert reaper.look() == []
        now = 10_000.0
        assert reaper.look() == [], "it is in use, however long"
    wait_for(lambda: cache.leases() == 0, "the lease to end")
    assert reaper.look() == []
    now = 10_599.0
    assert reaper.look() == []
    now = 10_600.0
    assert reaper.look() == [generation]
    assert cache.generations() == []
    assert reaper.look() == []


def test_a_daemon_that_is_away_is_a_miss(cache: Cache) -> None:
    reaper = Reaper(cache.socket.with_name("none.sock"), 0)
    with pytest.raises(CacheMiss):
        reaper.look()
