from collections.abc import Iterator

import pytest
from tests.weightcache.caches import Cache, KeptCache


@pytest.fixture
def cache() -> Iterator[Cache]:
    """A weight cache without a daemon yet."""
    cache = Cache()
    yield cache
    cache.close()


@pytest.fixture
def served(cache: Cache) -> Cache:
    """A weight cache with a daemon of its own."""
    cache.start()
    return cache


@pytest.fixture(scope="module")
def shared() -> Iterator[Cache]:
    """A daemon for the tests of a module that leave it as it was; each uses identities of its own."""
    cache = Cache()
    cache.start()
    yield cache
    cache.close()


@pytest.fixture(scope="module")
def ours(shared: Cache) -> Iterator[Cache]:
    """The module's daemon, whose state folder and journal are this process's own as well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("READMIT_STATE", str(shared.state_dir))
        patch.setenv("READMIT_JOURNAL", str(shared.journal_path))
        yield shared


@pytest.fixture
def kept() -> Iterator[KeptCache]:
    """A weight cache under a keeper."""
    cache = KeptCache()
    cache.start_keeper()
    yield cache
    cache.close()


@pytest.fixture
def own_state(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process remembers stays with its cache."""
    monkeypatch.setenv("READMIT_STATE", str(cache.state_dir))
