"""What an attach comes to: a hit, or one reason of the closed list with its policy, its row and its counter."""

import copy
import gc
import io
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.weightcache.caches import Cache, descriptors, few_descriptors, wait_for
from tests.weightcache.models import Tiny, become, config, contents, fill, loader, skeleton
from tests.weightcache.publishing import flipped, packed, publish, publishing, spoil

from weightcache import client, messages
from weightcache.arena.memfd import MemfdMapping
from weightcache.arena.seals import sealed_file
from weightcache.attachment import Attachment, Outcome
from weightcache.binding import Binding
from weightcache.client import attach
from weightcache.errors import CacheMiss, CheckpointError, ConfigError, ImportRejected, UnsupportedQuantForIPCError
from weightcache.fingerprint import CacheConfig
from weightcache.frames import encode, send_frame
from weightcache.journal import Context, Event, Journal
from weightcache.manifest import generation_of
from weightcache.memory import Available
from weightcache.policy import policy_for
from weightcache.protocol import trusted_uids
from weightcache.vocabulary import MISS_REASONS


@pytest.fixture(autouse=True)
def own_state(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("READMIT_STATE", str(cache.state_dir))


def load(cache: Cache, identity: CacheConfig | None = None, seed: int = 0, **options: Any) -> tuple[Tiny, Outcome]:
    """Attach with a loader behind it."""
    model = skeleton()
    settings = {"load": loader(model, seed), "load_bytes": 1, "socket": cache.socket, "journal": journal(cache)}
    return model, attach(model, identity or config(), **{**settings, **options})


def journal(cache: Cache) -> Journal:
    return Journal(cache.journal_path, Context("n", "a"))


def fresh(seed: int = 0) -> Tiny:
    model = Tiny()
    fill(model, seed)
    return model


def only_lookup(cache: Cache) -> Event:
    """The one row that an attach leaves, once."""
    (lookup,) = cache.lookups()
    return lookup


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


def _nobody(cache: Cache) -> None:
    cache.runtime_dir.mkdir(mode=0o700)


def _dead_socket(cache: Cache) -> None:
    cache.start().kill()
    cache.processes[0].wait()


def _file_in_the_way(cache: Cache) -> None:
    _nobody(cache)
    cache.socket.write_text("")


def _datagrams(cache: Cache) -> None:
    _nobody(cache)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.bind(str(cache.socket))


def _stopped(cache: Cache) -> None:
    cache.start().send_signal(signal.SIGSTOP)


def _others(cache: Cache) -> None:
    _nobody(cache)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(str(cache.socket))
    os.chown(cache.socket, 12_345, 12_345)


def _loading(cache: Cache) -> None:
    cache.start()
    connection = cache.connect()
    connection.ask(messages.Claim(config=config().to_dict()), messages.Claimed)
    cache.kept_open = connection  # type: ignore[attr-defined]


def _resident(cache: Cache, **changes: Any) -> None:
    cache.start()
    publish(cache, packed(config(**changes)))


def _leased(cache: Cache) -> None:
    cache.start()
    cache.kept_open = publishing(cache, packed(config(dtype="float16")))  # type: ignore[attr-defined]
    cache.kept_open.__enter__()  # type: ignore[attr-defined]


def _lost(cache: Cache) -> None:
    _resident(cache)
    cache.processes[0].kill()
    cache.processes[0].wait()
    cache.start()


def _quarantined(cache: Cache) -> None:
    _resident(cache)
    cache.ask(messages.Quarantine(generation=cache.generations()[0]["generation"], reason="wrong answers"))


def _on_a_gpu(cache: Cache) -> None:
    cache.start()
    publish(cache, spoil(packed(), arena="cuda_vmm", device="GPU-1"))


def _other_shape(cache: Cache) -> None:
    cache.start()
    good = packed()
    shapes = [
        (shape[0] // 2, shape[1] * 2) if len(shape) == 2 and 0 not in shape else shape for shape in good.manifest.shapes
    ]
    publish(cache, spoil(good, shapes=shapes))


def _without_a_buffer(cache: Cache) -> None:
    """What a release that forgot a buffer would publish."""
    cache.start()
    good = packed()
    row = good.manifest.names.index("inv_freq")
    columns = {
        name: _drop(getattr(good.manifest, name), row) for name in ("names", "dtype", "shapes", "strides", "offsets")
    }
    kinds = good.manifest.kinds[:row] + good.manifest.kinds[row + 1 :]
    digests = good.manifest.digests[: row * 32] + good.manifest.digests[(row + 1) * 32 :]
    aliases = {name: target - (target > row) for name, target in good.manifest.aliases.items()}
    publish(cache, spoil(good, **columns, kinds=kinds, digests=digests, aliases=aliases))


def _drop(column: list[Any], row: int) -> list[Any]:
    return [*column[:row], *column[row + 1 :]]


def _flipped(cache: Cache) -> None:
    cache.start()
    publish(cache, flipped(packed()))


PREPARED: dict[str, tuple[Callable[[Cache], None], dict[str, Any], str | None]] = {
    "no_daemon": (_nobody, {}, None),
    "refused": (_dead_socket, {}, None),
    "refused, a file": (_file_in_the_way, {}, None),
    "refused, datagrams": (_datagrams, {}, None),
    "timeout": (_stopped, {}, None),
    "peer_refused": (_others, {}, None),
    "daemon_loading": (_loading, {"wait_s": 0.3}, None),
    "absent": (lambda cache: cache.start() and None, {}, None),
    "fingerprint": (lambda cache: _resident(cache, dtype="float16"), {}, "dtype"),
    "fingerprint, in use": (_leased, {}, "dtype"),
    "residency_lost": (_lost, {}, "keeper_lost"),
    "quarantined": (_quarantined, {}, None),
    "device": (_on_a_gpu, {}, None),
    "import_mismatch": (_other_shape, {}, None),
    "state_unrestorable": (_without_a_buffer, {}, None),
    "integrity": (_flipped, {"verify": 1.0}, None),
}
POLICIES = {"daemon_loading": "wait", "fingerprint": "replace"}


@pytest.mark.parametrize("case", PREPARED)
def test_a_miss_has_its_reason_and_the_model_its_weights_from_disk(cache: Cache, case: str) -> None:
    if case == "peer_refused" and os.getuid() != 0:
        pytest.fail("giving a socket to somebody else takes root")
    prepare, options, detail = PREPARED[case]
    reason = case.partition(",")[0]
    prepare(cache)
    before = len(cache.lookups())
    model, outcome = load(cache, seed=7, **options)
    assert (outcome.path, outcome.reason, outcome.detail) == ("miss", reason, detail)
    assert contents(model) == contents(fresh(seed=7))
    (row,) = cache.lookups()[before:]
    found = row.attributes
    assert (row.name, row.slot, found["reason"], found["detail"]) == ("miss", "a", reason, detail)
    assert found["policy"] == POLICIES.get(reason, "fallback") == policy_for(reason, "client")
    if case == "timeout":
        cache.processes[0].send_signal(signal.SIGCONT)
    if cache.processes and cache.processes[-1].poll() is None:
        wait_for(
            lambda: cache.metric("weightcache_misses_total", reason=reason, detail=detail or "") == before + 1,
            "the miss to be counted",
        )


@pytest.mark.parametrize("case", PREPARED)
def test_a_miss_that_may_not_fall_back_raises_and_leaves_the_model_as_it_was(cache: Cache, case: str) -> None:
    if case == "peer_refused" and os.getuid() != 0:
        pytest.fail("giving a socket to somebody else takes root")
    prepare, options, detail = PREPARED[case]
    reason = case.partition(",")[0]
    prepare(cache)
    before = len(cache.lookups()), descriptors()
    model = skeleton()
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    with pytest.raises(CacheMiss) as missed:
        attach(
            model,
            config(),
            load=loader(model),
            policies={reason: "fail"},
            socket=cache.socket,
            journal=journal(cache),
            **options,
        )
    assert (missed.value.reason, missed.value.detail) == (reason, detail)
    after = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    assert all(after[name] is tensor for name, tensor in tensors.items())
    (row,) = cache.lookups()[before[0] :]
    assert (row.attributes["reason"], row.attributes["policy"]) == (reason, "fail")
    del missed
    gc.collect()
    assert descriptors() <= before[1] + 3  # the journal's own


def test_every_reason_of_the_closed_list_is_reached_somewhere() -> None:
    """The others come from fakes and limits: the tests below and those of fake daemons."""
    elsewhere = {
        "protocol",
        "protocol_version",
        "daemon_died",
        "quant_not_allowed",
        "ipc_unavailable",  # only a GPU's memory can be kept from being handed over
        "manifest_invalid",
        "resource",
    }
    assert {case.partition(",")[0] for case in PREPARED} | elsewhere == set(MISS_REASONS)


def test_weights_that_may_not_travel_stay_private(served: Cache) -> None:
    barred = UnsupportedQuantForIPCError("AWQ does not travel", detail="awq")
    model, outcome = load(served, barred=barred)
    assert (outcome.reason, outcome.detail, outcome.generation) == ("quant_not_allowed", "awq", None)
    assert "mode off" in str(outcome.message)
    assert contents(model) == contents(fresh())
    assert served.generations() == []
    with pytest.raises(UnsupportedQuantForIPCError):
        load(served, barred=barred, policies={"quant_not_allowed": "fail"})


class FakeDaemon:
    """Greets, and answers an attach with a generation of its own making."""

    def __init__(self, cache: Cache, *answers: Callable[[socket.socket], None]) -> None:
        cache.runtime_dir.mkdir(mode=0o700)
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(str(cache.socket))
        self.server.listen()
        self.greeting = encode(messages.Welcome("1", "fake"))
        self.answers = answers
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        for answer in self.answers:
            peer, _ = self.server.accept()
            with peer:
                peer.recv(65536)
                peer.sendall(self.greeting)
                peer.recv(65536)
                answer(peer)
                while True:
                    try:
                        if not peer.recv(65536):
                            break
                    except ConnectionError:
                        break

    def close(self) -> None:
        self.thread.join()
        self.server.close()


def offering(*files: int, generation: str) -> Callable[[socket.socket], None]:
    """An answer that hands over these descriptors."""

    def answer(peer: socket.socket) -> None:
        attached = messages.Attached(generation=generation, descriptors=len(files))
        send_frame(peer, memoryview(encode(attached)), files)
        peer.shutdown(socket.SHUT_WR)

    return answer


@contextmanager
def unsealed(size: int) -> Iterator[int]:
    descriptor = os.memfd_create("arena", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    yield descriptor
    os.close(descriptor)


def test_what_a_daemon_must_not_offer_is_refused(cache: Cache) -> None:
    """An arena without seals, of another size, in pieces or not there; a manifest of another name or identity."""
    good, other = packed(), packed(config(dtype="float16"))
    manifest, arena = good.descriptors
    name, others_name = generation_of(good.manifest.encode()), generation_of(other.manifest.encode())
    short = sealed_file("short", bytes(good.manifest.size - 1))
    with unsealed(good.manifest.size) as writable:
        offers = {
            "manifest_invalid": [
                offering(manifest, writable, generation=name),
                offering(manifest, short, generation=name),
                offering(manifest, arena, arena, generation=name),
                offering(manifest, generation=name),
                offering(manifest, arena, generation=others_name),
                offering(arena, manifest, generation=name),
                offering(writable, arena, generation=name),
            ],
            "import_mismatch": [offering(other.descriptors[0], arena, generation=others_name)],
        }
        fake = FakeDaemon(cache, *(answer for each in offers.values() for answer in each))
        for reason, answers in offers.items():
            for _ in answers:
                model = skeleton()
                with pytest.raises(ImportRejected) as refused:
                    attach(model, config(), socket=cache.socket, journal=Journal(None))
                assert refused.value.reason == reason
                assert all(parameter.is_meta for parameter in model.parameters())
        fake.close()
    os.close(short)
    good.close()
    other.close()


def test_bytes_of_a_rogue_publisher_are_caught_and_kept_from_all(served: Cache) -> None:
    bad = publish(served, flipped(packed()))
    model, outcome = load(served, verify=1.0)
    assert outcome.reason == "integrity"
    assert contents(model) == contents(fresh())
    states = {each["generation"]: each["quarantined"] for each in served.generations()}
    assert "are not what was published: seen" in states[bad]
    assert outcome.generation in states
    assert states[outcome.generation or ""] is None
    _, next_one = load(served, verify=1.0)
    assert (next_one.path, next_one.generation) == ("hit", outcome.generation)
    wait_for(lambda: served.metric("weightcache_quarantines_total") == 1, "the quarantine to be counted")
    reasons = served.events("WHERE kind = 'quarantine'")
    assert [event.slot for event in reasons] == ["a"]


def test_a_lease_on_what_was_refused_is_given_back(served: Cache) -> None:
    publish(served, flipped(packed()))
    wait_for(lambda: served.leases() == 0)
    with pytest.raises(CacheMiss):
        load(served, verify=1.0, policies={"integrity": "fail"})
    wait_for(lambda: served.leases() == 0, "the lease to be given back")
    served.ask(messages.Release())


def arenas() -> set[str]:
    """The arenas that this process has mapped, by inode; other tests' models may still be waiting for collection."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:weightcache-arena" in line}


def test_a_fallback_drops_what_it_had_mapped_first(served: Cache) -> None:
    """While it verifies, the refused arena is mapped; when the loader runs, it is not any more."""
    publish(served, flipped(packed()))
    model = skeleton()
    before = arenas()
    seen: list[set[str]] = []

    def loading(progress: Callable[[int, int], None]) -> None:
        seen.append(arenas() - before)
        become(model, fresh())

    attach(model, config(), load=loading, load_bytes=1, socket=served.socket, verify=1.0, journal=Journal(None))
    assert seen == [set()]
    assert len(arenas() - before) == 1


@pytest.mark.parametrize("broken", [TypeError, AttributeError, KeyError, ZeroDivisionError])
def test_a_programming_error_is_not_turned_into_a_fallback(
    served: Cache, monkeypatch: pytest.MonkeyPatch, broken: type[Exception]
) -> None:
    publish(served, packed())
    wait_for(lambda: served.leases() == 0)

    def fail(*_: object) -> None:
        raise broken("ours")

    for owner, name in ((MemfdMapping, "views"), (Binding, "place_parameters"), (Attachment, "_bind")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            with pytest.raises(broken):
                load(served)
    wait_for(lambda: served.leases() == 0, "leases to be given back")


def test_errors_of_the_files_are_not_misses(served: Cache) -> None:
    def loading(_: Callable[[int, int], None]) -> None:
        raise CheckpointError("truncated", "the file is short")

    with pytest.raises(CheckpointError):
        load(served, load=loading)
    wait_for(lambda: not served.status()["claims"], "the claim to be given up")
    assert len(served.lookups()) == 1


def test_a_loader_that_leaves_values_out_is_found(served: Cache) -> None:
    with pytest.raises(ImportRejected) as left:
        load(served, load=lambda progress: None)
    assert left.value.reason == "state_unrestorable"
    assert served.generations() == []


def test_an_upgrade_costs_one_cold_start(served: Cache) -> None:
    old = publish(served, packed(config(revision="old")))
    wait_for(lambda: served.leases() == 0)
    _, outcome = load(served, config(revision="new"))
    assert (outcome.reason, outcome.detail) == ("fingerprint", "revision")
    assert outcome.differences == [{"field": "revision", "expected": "new", "found": "old"}]
    assert [each["generation"] for each in served.generations()] == [outcome.generation] != [old]
    assert load(served, config(revision="new"))[1].path == "hit"


def test_one_field_alone_never_attaches(served: Cache) -> None:
    publish(served, packed())
    for field, value in (
        config(
            model_arch="Other",
            revision="x",
            checkpoint_digest="x",
            tp_size=2,
            pp_size=2,
            dp_size=2,
            ep_size=2,
            quant_method="fp8",
            quant_config_hash="x",
            dtype="x",
            torch_version="x",
            engine="x",
            layout_id="x",
            kernel_backend="x",
        )
        .to_dict()
        .items()
    ):
        if value in (config().to_dict()[field], None):
            continue
        with pytest.raises(CacheMiss) as missed:
            attach(skeleton(), config(**{field: value}), socket=served.socket, journal=Journal(None))
        assert (missed.value.reason, missed.value.detail) == ("fingerprint", field)


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
