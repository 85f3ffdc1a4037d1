"""Faults put in below NVIDIA's ``pynvml``: what the watcher makes of each, and what a daemon's next client is told."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.weightcache.caches import Cache, wait_for
from tests.weightcache.models import config
from tests.weightcache.publishing import packed, publish, spoil

from weightcache import messages
from weightcache.errors import CacheMiss
from weightcache.gpu_watch import Finding, GpuWatch

FAKE = Path(__file__).parent / "nvml"
EVERY, ONE = {"GPU-1", "GPU-2"}, {"GPU-1"}
HEALTH_IS_DUE_S = 11.0

State = Callable[..., None]


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[State]:
    """Says what the GPUs are like from now on, in this process and in those started from it."""
    file = tmp_path / "nvml.json"

    def say(**facts: Any) -> None:
        unfinished = file.with_suffix(".new")
        unfinished.write_text(json.dumps(facts))
        unfinished.replace(file)

    say()
    monkeypatch.setenv("FAKE_NVML", str(file))
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    monkeypatch.syspath_prepend(str(FAKE))
    sys.modules.pop("pynvml", None)
    yield say
    sys.modules.pop("pynvml", None)


UNSUPPORTED, NO_PERMISSION, NOT_LOADED, LOST, RESET, MISMATCH, UNKNOWN = 3, 4, 9, 15, 16, 18, 999


@pytest.mark.parametrize(
    ("facts", "lost", "detail"),
    [
        ({"wait": ["GPU-1", 48]}, ONE, "driver_fault"),
        ({"wait": ["GPU-1", 79]}, ONE, "gpu_lost"),
        ({"wait": ["GPU-1", 95]}, ONE, "driver_fault"),
        ({"wait": ["GPU-1", 31]}, set(), None),
        ({"wait": NOT_LOADED}, EVERY, "driver_fault"),
        ({"wait": MISMATCH}, EVERY, "driver_fault"),
        ({"wait": UNKNOWN}, EVERY, "driver_fault"),
        ({"wait": LOST, "health": {"GPU-1": LOST}}, ONE, "gpu_lost"),
        ({"wait": LOST}, EVERY, "driver_fault"),
        ({"health": {"GPU-1": LOST}}, ONE, "gpu_lost"),
        ({"health": {"GPU-1": RESET}}, ONE, "gpu_lost"),
        ({"health": {"GPU-1": [1, False]}}, ONE, "driver_fault"),
        ({"health": {"GPU-1": [0, True]}}, ONE, "driver_fault"),
        ({"health": {"GPU-1": UNSUPPORTED}}, set(), None),
        ({"health": {"GPU-1": NO_PERMISSION}}, set(), None),
        ({"health": {"GPU-1": NOT_LOADED}}, EVERY, "driver_fault"),
        ({"version": "590.2"}, EVERY, "driver_fault"),
        ({"version": MISMATCH}, EVERY, "driver_fault"),
    ],
)
def test_what_a_fault_loses(state: State, facts: dict[str, Any], lost: set[str], detail: str | None) -> None:
    found: list[Finding] = []
    now = 0.0
    watch = GpuWatch(found.append, clock=lambda: now)
    assert set(watch.start()) == EVERY
    state(**facts)
    now += HEALTH_IS_DUE_S
    for _ in range(3):
        watch.step(0.01)
        now += HEALTH_IS_DUE_S
    assert {finding.uuid for finding in found} == lost
    assert len(found) == len(lost), "each loss is told once"
    assert {finding.detail for finding in found} == ({detail} if detail else set())


def test_a_machine_without_xid_events_is_watched_by_its_counters(state: State) -> None:
    state(events=UNSUPPORTED)
    found: list[Finding] = []
    now = 0.0
    watch = GpuWatch(found.append, clock=lambda: now)
    watch.start()
    state(events=UNSUPPORTED, health={"GPU-2": [3, False]})
    now += HEALTH_IS_DUE_S
    assert watch.step(0.01)
    assert [(finding.uuid, finding.detail) for finding in found] == [("GPU-2", "driver_fault")]


@pytest.mark.parametrize(
    ("facts", "kept", "detail"),
    [
        ({"wait": ["GPU-1", 48]}, 1, "driver_fault"),
        ({"wait": ["GPU-1", 79]}, 1, "gpu_lost"),
        ({"wait": MISMATCH}, 0, "driver_fault"),
    ],
)
def test_after_a_fault_the_next_client_of_a_daemon_is_told_and_other_gpus_keep_theirs(
    state: State, cache: Cache, facts: dict[str, Any], kept: int, detail: str
) -> None:
    cache.start()
    here, there = config("here"), config("there")
    for identity, device in ((here, "GPU-1"), (there, "GPU-2")):
        publish(cache, spoil(packed(identity), device=device))
    state(**facts)
    wait_for(lambda: len(cache.status()["generations"]) == kept, "the loss is known")
    with pytest.raises(CacheMiss) as missed:
        cache.connect().ask(messages.Attach(config=here.to_dict()), messages.Attached)
    assert (missed.value.reason, missed.value.detail) == ("residency_lost", detail)
    losses = [event.attributes for event in cache.events("WHERE kind = 'release' AND name = 'lost' ORDER BY id")]
    assert [loss["detail"] for loss in losses] == [detail] * (2 - kept)
