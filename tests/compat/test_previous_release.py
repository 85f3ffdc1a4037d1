"""This release beside the one before it: socket, manifest, journal and kept descriptors work both ways."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.compat.releases import (
    LABEL,
    ROOT,
    Engine,
    Installed,
    engine,
    has_history,
    path_of,
    previous,
    unpack,
    wait_for,
)
from tests.weightcache.models import config
from tests.weightcache.publishing import attach, packed, publish, spoil

from weightcache import messages
from weightcache.errors import CacheMiss, ConfigError
from weightcache.frames import close_all
from weightcache.journal import Event
from weightcache.keeper.control import ask
from weightcache.manifest import read
from weightcache.slo import Objectives
from weightcache.telemetry.books import Books
from weightcache.version import VERSION

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(previous(), tmp_path_factory.mktemp("previous"))


@pytest.fixture(scope="module")
def old_engine(old: Path) -> Iterator[Engine]:
    with engine(old) as running:
        yield running


@pytest.fixture(scope="module")
def new_engine() -> Iterator[Engine]:
    with engine(ROOT) as running:
        yield running


def replace_keeper(cache: Installed, before: Path, after: Path) -> None:
    """Have the keeper be of another release, by its own means where both releases have them."""
    keeper = cache.processes[-1]
    if all((tree / "daemon" / "weightcache" / "keeper" / "handover.py").exists() for tree in (before, after)):
        assert ask(cache.runtime_dir, {"reexec": True}, timeout_s=120)["pid"] == keeper.pid
        return
    stored = in_keeping(cache)
    keeper.kill()
    keeper.wait()
    cache.start_keeper()
    wait_for(lambda: in_keeping(cache) == stored, "the daemon to store everything again")


def in_keeping(cache: Installed) -> int:
    """How many of the daemon's descriptors the keeper has, 0 while there is none."""
    try:
        (daemon,) = ask(cache.runtime_dir, {"status": True})["children"]
    except ConfigError:
        return 0
    return int(daemon["stored"])


@pytest.mark.parametrize("way", ["upgrade", "rollback"])
def test_a_node_changes_its_release_under_engines_of_both(
    way: str, old: Path, old_engine: Engine, new_engine: Engine
) -> None:
    before, after = (old, ROOT) if way == "upgrade" else (ROOT, old)
    version = {old: LABEL, ROOT: VERSION}
    cache = Installed(before)
    try:
        cache.start_keeper()
        assert cache.status()["version"] == version[before]

        def attach(running: Engine, name: str) -> tuple[str, str, str]:
            slot = "old" if running is old_engine else "new"
            order = {"name": name, "slot": slot, "socket": cache.socket, "journal": cache.journal_path}
            told = running(do="attach", **order)
            return told["path"], told["generation"], told["content"]

        # Each publishes, and the other maps the very bytes.
        published = {}
        for publisher, other, name in ((old_engine, new_engine, "x"), (new_engine, old_engine, "yy")):
            path, *published[name] = attach(publisher, name)
            assert path == "miss"
            assert attach(other, name) == ("hit", *published[name])
        assert cache.leases() == 4
        cache.ask(messages.Quarantine(generation=published["yy"][0], reason="wrong answers"))

        # The daemon of the other release takes over what this one's stored, with leases and verdicts.
        cache.install(after)
        assert cache.replace_daemon() == version[after]
        names = {generation for generation, _ in published.values()}
        assert {it["generation"] for it in cache.generations()} == names
        assert cache.leases() == 4
        assert {it["quarantined"] for it in cache.generations()} == {None, "wrong answers"}
        cache.ask(messages.Quarantine(generation=published["yy"][0], reason="lifted", lift=True))
        for running in (old_engine, new_engine):
            for name, expected in published.items():
                assert attach(running, name) == ("hit", *expected)

        wait_for(lambda: in_keeping(cache) == 13, "listener, leases and two generations of two files to be in keeping")
        replace_keeper(cache, before, after)
        assert cache.replace_daemon() == version[after]
        assert {it["generation"] for it in cache.generations()} == names
        assert cache.leases() == 8

        # And back: what the other release has written is read by this one.
        cache.install(before)
        assert cache.replace_daemon() == version[before]
        assert {it["generation"]: it["quarantined"] for it in cache.generations()} == dict.fromkeys(names)
        assert cache.leases() == 8
        contents = sorted(content for _, content in published.values())
        for running in (old_engine, new_engine):
            assert sorted(set(running(do="read")["content"])) == contents
            running(do="let go")
        wait_for(lambda: cache.leases() == 0, "the leases to end")
        wait_for(lambda: cache.metric("weightcache_lookups_total", result="hit") == 6, "the journal to be read")
        for tree in (old, ROOT):
            read = cache.report(tree)
            assert (read["started"], read["open"], read["hits"], read["misses"]) == (8, [], 6, 2)
            assert {it["path"]: it["closed"] for it in read["paths"]} == {"hit": 6, "miss": 2}
    finally:
        cache.close()


def test_a_daemon_that_knows_no_gpus_has_one_copy_which_the_engine_on_another_turns_down(old: Path) -> None:
    """It says what it would to an engine of its own time; where the weights are is in their manifest."""
    cache = Installed(old)
    try:
        cache.start_keeper()
        generation = publish(cache, spoil(packed(), arena="cuda_vmm", device="GPU-1"))
        connection, given, descriptors = attach(cache, device="GPU-2")
        assert given == generation
        assert read(descriptors[0], given)[1].device == "GPU-1"
        with pytest.raises(CacheMiss) as refused:
            connection.ask(messages.Claim(config=config().to_dict(), device="GPU-2"), messages.Claimed)
        assert refused.value.reason == "daemon_loading", "so that the engine keeps its weights to itself"
        close_all(descriptors)
        connection.close()
    finally:
        cache.close()


def test_a_release_that_knows_no_gpus_goes_on_from_a_snapshot_that_names_them(old: Path) -> None:
    """Or a rollback would forget quarantines of pruned days, and find no start of an engine that would hit."""
    books, fields = Books(Objectives()), config().to_dict()
    for number, gpu in enumerate(("GPU-1", "GPU-2")):
        facts = {"generation": gpu, "config": fields, "device": gpu}
        for kind, name in (("publish", "published"), ("lookup", "hit"), ("quarantine", "set")):
            books.feed(Event(number, "boot", 1, 1, "n", f"on {gpu}", None, None, None, kind, name, facts))
    told = subprocess.run(
        [sys.executable, "-c", _RESTORE],
        check=False,
        env={**os.environ, "PYTHONPATH": path_of(old)},
        input=json.dumps(books.snapshot().state),
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0, told.stderr
    quarantined, asked = json.loads(told.stdout)
    assert sorted(quarantined) == ["GPU-1", "GPU-2"]
    assert asked == {"on GPU-1": {"0": fields}, "on GPU-2": {"0": fields}}


_RESTORE = """
import json, sys
from weightcache.journal.snapshots import Snapshot
from weightcache.slo import Objectives
from weightcache.telemetry.books import Books
books = Books(Objectives())
books.restore(Snapshot(1, json.load(sys.stdin)))
print(json.dumps([books.recollection.quarantined, books.forecast.asked]))
"""


if not has_history():  # there are the recordings; a history that ends too soon is an error that says so
    del test_a_node_changes_its_release_under_engines_of_both
    del test_a_daemon_that_knows_no_gpus_has_one_copy_which_the_engine_on_another_turns_down
    del test_a_release_that_knows_no_gpus_goes_on_from_a_snapshot_that_names_them
