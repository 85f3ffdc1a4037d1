"""How much is resident beside an engine's own weights."""

import pytest
from tests.weightcache.caches import Cache
from tests.weightcache.models import config, loader, skeleton

from weightcache.client import attach
from weightcache.errors import CacheMiss
from weightcache.occupancy import Occupancy, ask, by_device


def test_what_is_not_an_engines_own_is_told_by_the_daemon(served: Cache) -> None:
    models = {}
    for name, width in (("one", 16), ("two", 64)):
        model = models[name] = skeleton(width=width)
        models[name + " outcome"] = attach(
            model, config(name), load=loader(model, width=width), load_bytes=1, socket=served.socket
        )
    one, two = models["one outcome"], models["two outcome"]
    found = ask(served.socket, own=one.generation)
    assert found == Occupancy(resident=one.bytes + two.bytes, leased=one.bytes + two.bytes, own=one.bytes)
    assert found.others == two.bytes
    assert ask(served.socket, device="GPU-elsewhere") == Occupancy()


def test_devices_are_counted_apart() -> None:
    generations = [
        {"generation": "a", "bytes": 5, "device": None, "leases": []},
        {"generation": "b", "bytes": 7, "device": "GPU-1", "leases": [{}]},
        {"generation": "c", "bytes": 11, "device": "GPU-1", "leases": []},
    ]
    assert by_device(generations, "c") == {"host": Occupancy(5, 0, 0), "GPU-1": Occupancy(18, 7, 11)}


def test_without_a_daemon_it_is_a_miss(cache: Cache) -> None:
    with pytest.raises(CacheMiss) as caught:
        ask(cache.socket)
    assert caught.value.reason == "no_daemon"
