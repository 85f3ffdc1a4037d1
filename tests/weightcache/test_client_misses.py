"""Every miss: its reason from the closed list, its policy, its row and its counter."""

import gc
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

import pytest
from tests.weightcache.attaching import fresh, journal, load
from tests.weightcache.caches import Cache, descriptors, wait_for
from tests.weightcache.models import config, contents, loader, skeleton
from tests.weightcache.publishing import flipped, packed, publish, publishing, spoil

from weightcache import messages
from weightcache.client import attach
from weightcache.errors import CacheMiss, CheckpointError, ImportRejected, UnsupportedQuantForIPCError
from weightcache.journal import Journal
from weightcache.policy import policy_for
from weightcache.vocabulary import MISS_REASONS

pytestmark = pytest.mark.usefixtures("own_state")


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
    cache.journal.close()
    assert descriptors() <= before[1]


def test_every_reason_of_the_closed_list_is_reached_somewhere() -> None:
    """The others come from fakes and limits: the tests of offers, limits and fake daemons."""
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


def test_an_upgrade_costs_one_cold_start(served: Cache) -> None:
    old = publish(served, packed(config(revision="old")))
    wait_for(lambda: served.leases() == 0)
    _, outcome = load(served, config(revision="new"))
    assert (outcome.reason, outcome.detail) == ("fingerprint", "revision")
    assert outcome.differences == [{"field": "revision", "expected": "new", "found": "old"}]
    assert [each["generation"] for each in served.generations()] == [outcome.generation] != [old]
    assert load(served, config(revision="new"))[1].path == "hit"


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
