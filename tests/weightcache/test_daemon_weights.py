"""Claims, publications, leases and room, asked of a real daemon over its socket."""

import os
import subprocess
import sys
import threading
from typing import Any

import pytest
from tests.weightcache import clients
from tests.weightcache.caches import Cache, descriptors, memory_files, wait_for
from tests.weightcache.models import config
from tests.weightcache.publishing import attach, packed, publish, publishing, spoil

from weightcache import messages
from weightcache.errors import CacheMiss
from weightcache.frames import close_all


def refused(cache: Cache, request: messages.Request) -> CacheMiss:
    with pytest.raises(CacheMiss) as miss:
        cache.ask(request)
    return miss.value


def test_what_is_published_is_handed_out_and_leased(served: Cache) -> None:
    with publishing(served, packed()) as (_, generation):
        assert [each["slot"] for each in served.generations()[0]["leases"]] == ["publisher"]
    wait_for(lambda: served.leases() == 0, "the publisher's lease to end")
    connection, found, received = attach(served)
    assert found == generation
    described = served.generations()[0]
    assert described["config"] == config().to_dict()
    assert described["publisher"]["pid"] == os.getpid()
    assert described["publisher"]["origin"] == "by hand"
    assert [(lease["slot"], lease["pid"]) for lease in described["leases"]] == [("a", os.getpid())]
    close_all(received)
    connection.close()
    wait_for(lambda: served.leases() == 0, "the lease to end with its connection")
    kinds = [(event.kind, event.name) for event in served.events("WHERE kind NOT IN ('process') ORDER BY id")]
    assert kinds == [("publish", "published"), *[("lease_open", ""), ("lease_close", "")] * 2]
    published = served.events("WHERE kind = 'publish'")[0].attributes
    assert published["config"] == config().to_dict()
    assert served.ask(messages.Explain(config=config().to_dict())).data["would_hit"] is True


def test_a_claim_is_held_by_one_and_ends_with_its_connection(served: Cache) -> None:
    loading = served.connect()
    loading.ask(messages.Claim(config=config().to_dict(), bytes=100), messages.Claimed)
    assert loading.tell(messages.Progress(done=40, total=100))
    wait_for(lambda: served.status()["claims"][0]["done"] == 40, "the progress to be known")
    other = served.connect()
    with pytest.raises(CacheMiss) as taken:
        other.ask(messages.Claim(config=config().to_dict()), messages.Claimed)
    assert (taken.value.reason, taken.value.data["done"]) == ("daemon_loading", 40)
    with pytest.raises(CacheMiss) as waiting:
        attach(served)
    assert waiting.value.reason == "daemon_loading"
    loading.close()
    wait_for(lambda: not served.status()["claims"], "the claim to end")
    other.ask(messages.Claim(config=config().to_dict()), messages.Claimed)
    other.close()


def test_who_waits_gets_the_weights_when_they_come(served: Cache) -> None:
    loading = served.connect()
    loading.ask(messages.Claim(config=config().to_dict()), messages.Claimed)
    got: list[Any] = []
    waiting = [threading.Thread(target=lambda: got.append(attach(served, wait_s=60))) for _ in range(3)]
    for thread in waiting:
        thread.start()
    wait_for(lambda: served.status()["connections"] == 5, "all of them to wait")
    what = packed()
    _, received = loading.ask(messages.Publish(descriptors=2), messages.Published, what.descriptors)
    for thread in waiting:
        thread.join()
    assert len({generation for _, generation, _ in got}) == 1
    assert served.leases() == 4
    for connection, _, files in got:
        close_all(files)
        connection.close()
    close_all(received)
    what.close()
    loading.close()


def test_who_waits_for_a_load_that_fails_is_told_at_once(served: Cache) -> None:
    loading = served.connect()
    loading.ask(messages.Claim(config=config().to_dict()), messages.Claimed)
    failures: list[CacheMiss] = []

    def wait() -> None:
        try:
            attach(served, wait_s=600)
        except CacheMiss as miss:
            failures.append(miss)

    waiting = threading.Thread(target=wait)
    waiting.start()
    wait_for(lambda: served.status()["connections"] == 3, "it to wait")
    loading.close()
    waiting.join(60)
    assert [miss.reason for miss in failures] == ["absent"]


def test_publishing_takes_a_claim(served: Cache) -> None:
    what = packed()
    connection = served.connect()
    with pytest.raises(CacheMiss, match="takes a claim"):
        connection.ask(messages.Publish(descriptors=2), messages.Published, what.descriptors)
    what.close()
    connection.close()


@pytest.mark.parametrize(
    ("changes", "reason", "text"),
    [
        ({"config": config("another")}, "import_mismatch", "another identity"),
        ({"chunks": [1 << 30]}, "manifest_invalid", "another size"),
        ({"arena": "elsewhere"}, "manifest_invalid", "no known kind"),
        ({"shapes": [(1,)]}, "manifest_invalid", "another length"),
    ],
)
def test_what_does_not_hold_is_not_published(served: Cache, changes: dict[str, Any], reason: str, text: str) -> None:
    served.metric("weightcache_leases")
    before = descriptors(served.processes[0].pid)
    with pytest.raises(CacheMiss, match=text) as rejected:
        publish(served, spoil(packed(), **changes), claimed=config())
    assert rejected.value.reason == reason
    assert served.generations() == []
    wait_for(lambda: descriptors(served.processes[0].pid) == before, "the daemon to close what it got")


def test_what_is_not_sealed_or_no_memory_at_all_is_not_published(served: Cache) -> None:
    what = packed()
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, what.manifest.size)
    pipe = os.pipe()
    for arena in ([unsealed], [pipe[0]], [], [what.descriptors[1]] * 2):
        connection = served.connect()
        connection.ask(messages.Claim(config=config().to_dict()), messages.Claimed)
        sent = [what.descriptors[0], *arena]
        with pytest.raises(CacheMiss) as rejected:
            connection.ask(messages.Publish(descriptors=len(sent)), messages.Published, sent)
        assert rejected.value.reason == "manifest_invalid"
        connection.close()
    close_all([unsealed, *pipe])
    what.close()
    assert served.generations() == []


def test_release_waits_for_engines_unless_it_is_forced(served: Cache) -> None:
    generation = publish(served, packed())
    connection, _, received = attach(served)
    close_all(received)
    in_use = refused(served, messages.Release(generation=generation))
    assert (in_use.reason, in_use.detail) == ("resource", "capacity")
    assert f"pid {os.getpid()} (slot a)" in str(in_use)
    assert refused(served, messages.Release()).reason == "resource"
    assert len(served.generations()) == 1
    assert served.ask(messages.Release(generation=generation, force=True)).data == {"released": [generation]}
    assert served.generations() == []
    connection.close()
    assert refused(served, messages.Release(generation=generation)).reason == "absent"
    released = served.events("WHERE kind = 'release'")
    assert [(event.name, event.attributes["generation"]) for event in released] == [("released", generation)]
    assert memory_files(served.processes[0].pid) == 0
    assert refused(served, messages.Quarantine(generation=generation, reason="x")).reason == "absent"


def test_released_weights_stay_with_the_engine_that_maps_them(served: Cache) -> None:
    with clients.client(clients.hold, served.socket, "tiny") as client:
        _, generation, before = client.hear()
        served.ask(messages.Release(generation=generation, force=True))
        assert memory_files(served.processes[0].pid) == 0
        client.go_on()
        assert client.hear() == before


def test_one_release_gives_up_all_that_is_free(served: Cache) -> None:
    names = [publish(served, packed(config(name))) for name in ("one", "two", "three")]
    wait_for(lambda: served.leases() == 0)
    assert served.ask(messages.Release()).data == {"released": names}
    assert served.ask(messages.Release()).data == {"released": []}


def test_quarantine_keeps_weights_from_all_and_can_be_lifted(served: Cache) -> None:
    generation = publish(served, packed())
    assert served.ask(messages.Quarantine(generation=generation, reason="wrong answers")).data["quarantined"]
    with pytest.raises(CacheMiss, match="wrong answers") as kept:
        attach(served)
    assert kept.value.reason == "quarantined"
    served.ask(messages.Quarantine(generation=generation, reason="proven right", lift=True))
    connection, _, received = attach(served)
    close_all(received)
    connection.close()
    assert [event.name for event in served.events("WHERE kind = 'quarantine' ORDER BY id")] == ["set", "lifted"]


def test_room_is_made_by_evicting_what_is_free_and_never_what_is_used(cache: Cache) -> None:
    size = packed().manifest.size
    cache.start("--capacity", str(2 * size))
    first = publish(cache, packed(config("one")))
    second = publish(cache, packed(config("two")))
    wait_for(lambda: cache.leases() == 0)
    used, _, received = attach(cache, config("one"))
    close_all(received)
    third = publish(cache, packed(config("three")))
    wait_for(lambda: cache.leases() == 1, "the publisher's lease to end")
    assert {each["generation"] for each in cache.generations()} == {first, third}
    evicted = cache.events("WHERE kind = 'release' AND name = 'evicted'")
    assert [event.attributes["generation"] for event in evicted] == [second]
    with publishing(cache, packed(config("four"))) as (_, fourth):
        with pytest.raises(CacheMiss, match="do not fit") as full:
            publish(cache, packed(config("five")))
        assert (full.value.reason, full.value.detail) == ("resource", "capacity")
        assert (full.value.data["needed"], full.value.data["available"]) == (size, 0)
        assert {each["generation"] for each in cache.generations()} == {first, fourth}
    used.close()


def test_many_publishers_at_once_stay_within_the_capacity(cache: Cache) -> None:
    size = packed().manifest.size
    cache.start("--capacity", str(2 * size))
    results: list[str] = []
    start = threading.Barrier(6)

    def engine(number: int) -> None:
        what = packed(config(f"model {number}"))
        start.wait()
        try:
            with publishing(cache, what):
                results.append("published")
                done.wait(60)
        except CacheMiss as miss:
            results.append(miss.reason)

    done = threading.Event()
    engines = [threading.Thread(target=engine, args=(number,)) for number in range(6)]
    for thread in engines:
        thread.start()
    wait_for(lambda: len(results) == 6, "all of them to have an answer")
    assert cache.status()["resident_bytes"] <= 2 * size
    done.set()
    for thread in engines:
        thread.join()
    assert sorted(results) == ["published"] * 2 + ["resource"] * 4


def test_replacing_drops_what_is_stale_and_free(served: Cache) -> None:
    old = publish(served, packed(config(revision="old")))
    used = publish(served, packed(config(revision="older")))
    wait_for(lambda: served.leases() == 0)
    connection, _, received = attach(served, config(revision="older"))
    close_all(received)
    new = publish(served, packed(), replace=True)
    assert {each["generation"] for each in served.generations()} == {used, new}
    replaced = served.events("WHERE kind = 'release' AND name = 'replaced'")
    assert [event.attributes["generation"] for event in replaced] == [old]
    connection.close()


def test_a_killed_client_leaves_nothing_behind(served: Cache) -> None:
    daemon = served.processes[0].pid
    publish(served, packed())
    wait_for(lambda: served.leases() == 0)
    served.metric("weightcache_leases")
    before = descriptors(daemon), memory_files(daemon)
    for name in ("tiny", "unheard of"):  # one that maps, and one that loads and publishes
        with clients.client(clients.hold, served.socket, name) as client:
            client.hear()
            client.kill()
    wait_for(lambda: served.leases() == 0, "leases to end")
    served.ask(
        messages.Release(
            generation=next(
                each["generation"]
                for each in served.generations()
                if each["config"]["model_path"] == "/models/unheard of"
            )
        )
    )
    wait_for(lambda: (descriptors(daemon), memory_files(daemon)) == before, "descriptors to return")


def test_a_client_cannot_change_what_others_map(served: Cache) -> None:
    with clients.client(clients.hold, served.socket, "tiny") as first:
        _, _, good = first.hear()
        with clients.client(clients.write_into, served.socket, "tiny") as vandal:
            assert vandal.hear() != good
        with clients.client(clients.hold, served.socket, "tiny") as second:
            path, _, found = second.hear()
        first.go_on()
        assert (path, found, first.hear()) == ("hit", good, good)


def test_a_thousand_attaches_leave_the_daemon_as_it_was(served: Cache) -> None:
    daemon = served.processes[0].pid
    publish(served, packed())
    for round_ in range(1001):
        connection, _, received = attach(served)
        close_all(received)
        connection.close()
        if round_ == 0:
            served.metric("weightcache_leases")
            wait_for(lambda: served.leases() == 0)
            before = descriptors(daemon), memory_files(daemon), sorted(os.listdir(served.runtime_dir))
    wait_for(lambda: served.leases() == 0, "every lease to end")
    # Of the questions asked above, one whose connection the daemon had not closed yet may be among the first ones.
    wait_for(lambda: descriptors(daemon) <= before[0], "descriptors to be as few as after the first")
    assert (memory_files(daemon), sorted(os.listdir(served.runtime_dir))) == before[1:]
    assert served.generations()[0]["hits"] == 1001
    assert len(served.events("WHERE kind = 'lease_open'")) == len(served.events("WHERE kind = 'lease_close'")) == 1002


def test_the_daemon_imports_no_engine() -> None:
    check = (
        "import sys, weightcache.daemon; "
        "print([name for name in ('torch', 'transformers', 'vllm', 'sglang', 'safetensors', 'numpy', 'readmit') "
        "if name in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"
