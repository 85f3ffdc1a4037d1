"""What an attach comes to: a hit, or a load from disk that is published; its lease; its settings."""

import copy
import gc
import io
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.weightcache.attaching import fresh, load, only_lookup
from tests.weightcache.caches import Cache, wait_for
from tests.weightcache.models import config, contents

from weightcache.client import attach
from weightcache.errors import ConfigError
from weightcache.journal import Journal
from weightcache.protocol import trusted_uids

pytestmark = pytest.mark.usefixtures("own_state")


def test_the_first_loads_and_publishes_and_the_next_hits(served: Cache) -> None:
    model, outcome = load(served)
    assert (outcome.path, outcome.reason, outcome.private_because) == ("miss", "absent", None)
    assert outcome.generation == served.generations()[0]["generation"]
    second, hit = load(served)
    assert (hit.path, hit.generation, hit.reason) == ("hit", outcome.generation, None)
    assert contents(model) == contents(second) == contents(fresh())
    assert set(hit.phases) == {"connect", "match", "map", "bind", "buffers"}
    assert served.leases() == 2
    assert [event.name for event in served.lookups()] == ["miss", "hit"]
    assert served.lookups()[0].attributes["policy"] == "fallback"
    wait_for(lambda: served.metric("weightcache_lookups_total", result="hit") == 1, "the hit to be counted")
    assert served.metric("weightcache_misses_total", reason="absent") == 1
    assert served.metric("weightcache_misses_total") == served.metric("weightcache_lookups_total", result="miss") == 1
    del model, second
    gc.collect()
    wait_for(lambda: served.leases() == 0, "leases to end with their models")


def test_what_was_published_and_adopted_is_one_copy(served: Cache) -> None:
    model, _ = load(served)
    mapped = Path("/proc/self/maps").read_text()
    assert "memfd:weightcache-arena" in mapped
    start = next(
        range(*(int(edge, 16) for edge in line.split()[0].split("-")))
        for line in mapped.splitlines()
        if "memfd:weightcache-arena" in line
    )
    assert model.embed.weight.data_ptr() in start
    assert model.inv_freq.data_ptr() not in start


def test_a_model_can_be_copied_and_saved_and_its_copy_holds_no_lease(served: Cache) -> None:
    model, _ = load(served)
    twin = copy.deepcopy(model)
    assert contents(twin) == contents(model)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    assert contents(torch.load(saved, weights_only=False)) == contents(model)
    assert served.leases() == 1
    twin.embed.weight.data.zero_()
    assert contents(model) == contents(fresh())


def test_attaching_the_same_model_again_moves_its_lease(served: Cache) -> None:
    model, first = load(served)
    again = attach(model, config(), socket=served.socket, journal=Journal(None))
    assert (again.path, again.generation) == ("hit", first.generation)
    gc.collect()
    wait_for(lambda: served.leases() == 1, "the first lease to end")
    assert contents(model) == contents(fresh())


def test_parts_are_journaled_and_what_is_verified_says_so(served: Cache) -> None:
    load(served)
    load(served, verify=0.5)
    parts = served.events("WHERE kind = 'phase_end' ORDER BY id")
    names = [event.name.removeprefix("load_weights.") for event in parts]
    assert {"connect", "match", "map", "verify", "bind", "buffers", "read", "publish"} == set(names)
    failed = [event.name for event in parts if event.attributes.get("error")]
    assert failed == ["load_weights.match"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mode": "fast"}, "mode"),
        ({"policies": {"abscent": "fail"}}, "policy"),
        ({"policies": {"absent": "give up"}}, "policy"),
        ({"wait_s": float("nan")}, "wait_s"),
        ({"wait_s": -1.0}, "wait_s"),
        ({"mode": "off", "load": None}, "mode"),
        ({"socket": Path("/" + "x" * 200)}, "path_too_long"),
    ],
)
def test_settings_that_cannot_work_are_no_misses(cache: Cache, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(cache, **options)
    assert refused.value.reason == reason


def test_mode_off_asks_nobody(cache: Cache) -> None:
    model, outcome = load(cache, mode="off")
    assert (outcome.path, outcome.generation) == ("off", None)
    assert contents(model) == contents(fresh())
    assert only_lookup(cache).name == "off"
    assert not cache.runtime_dir.exists()


def test_a_second_user_of_one_machine_is_trusted_when_named(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    assert trusted_uids({}) == {os.geteuid(), 0}
    assert trusted_uids({"WEIGHTCACHE_UID": "12345"}) == {os.geteuid(), 0, 12_345}
    monkeypatch.setenv("WEIGHTCACHE_UID", "somebody")
    cache.runtime_dir.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(cache.socket))
        with pytest.raises(ConfigError, match="somebody"):
            load(cache)


IMPORTS = """
import sys
import torch, safetensors, msgspec
before = {name.partition(".")[0] for name in sys.modules}
import weightcache.client
after = {name.partition(".")[0] for name in sys.modules}
print(*sorted(name for name in after - before if name not in sys.stdlib_module_names))
"""


def test_a_client_imports_only_what_it_may() -> None:
    said = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["weightcache"]


def test_importing_the_client_costs_little(capsys: pytest.CaptureFixture[str]) -> None:
    """Reported, not judged: benchmarks/residency.py does that."""
    timed = (
        "import time, torch; began = time.perf_counter(); import weightcache.client; print(time.perf_counter() - began)"
    )
    said = subprocess.run([sys.executable, "-c", timed], capture_output=True, text=True, check=True)
    with capsys.disabled():
        print(f" importing the client adds {float(said.stdout) * 1000:.1f} ms to torch", end="")
    assert float(said.stdout) > 0
