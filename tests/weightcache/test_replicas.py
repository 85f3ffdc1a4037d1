"""Replicas of one model on several GPUs of a node, by one daemon under a real keeper.

The daemon never touches a GPU: here memory files stand for its chunks, in manifests that name one. On GPUs the same is
run by ``benchmarks/gpu_replicas.py``.
"""

import os
import signal
from pathlib import Path

import pytest
from tests.weightcache.caches import KeptCache, wait_for
from tests.weightcache.models import config
from tests.weightcache.publishing import attach, packed, publish, publishing, spoil

from weightcache import messages
from weightcache.errors import CacheMiss
from weightcache.frames import close_all
from weightcache.publish import Packed

HERE, THERE = "GPU-1", "GPU-2"


def copy_on(device: str, seed: int = 0) -> Packed:
    return spoil(packed(seed=seed), arena="cuda_vmm", device=device)


def found(cache: KeptCache, device: str | None) -> str:
    """The generation that an engine on this GPU is given, or the reason of its miss."""
    try:
        connection, generation, descriptors = attach(cache, device=device)
    except CacheMiss as miss:
        return miss.reason
    close_all(descriptors)
    connection.close()
    return generation


def test_each_has_its_copy_and_keeps_it_over_the_daemons_death(kept: KeptCache) -> None:
    here = publish(kept, copy_on(HERE))
    assert found(kept, THERE) == "device"
    there = publish(kept, copy_on(THERE))
    assert here != there
    for _ in range(2):
        assert [found(kept, device) for device in (HERE, THERE, "GPU-3")] == [here, there, "device"]
        assert kept.ask(messages.Explain(config=config().to_dict(), device=THERE)).data["generation"] == there
        kept.kill_daemon()


def test_one_that_loads_is_waited_for_on_its_own_gpu_alone(kept: KeptCache) -> None:
    here = publish(kept, copy_on(HERE))
    loading = kept.connect()
    loading.ask(messages.Claim(config=config().to_dict(), device=THERE), messages.Claimed)
    assert [found(kept, device) for device in (HERE, THERE)] == [here, "daemon_loading"]
    with pytest.raises(CacheMiss) as refused:
        loading.ask(messages.Claim(config=config().to_dict(), device=HERE), messages.Claimed)
    assert refused.value.reason == "daemon_loading"
    loading.close()


def test_a_bad_copy_is_replaced_and_the_good_one_is_not(kept: KeptCache) -> None:
    here, bad = publish(kept, copy_on(HERE)), publish(kept, copy_on(THERE))
    wait_for(lambda: kept.leases() == 0)
    kept.ask(messages.Quarantine(generation=bad, reason="other bytes"))
    assert [found(kept, device) for device in (HERE, THERE)] == [here, "quarantined"]
    with publishing(kept, copy_on(THERE, seed=1), replace=True) as (_, fresh):
        assert [found(kept, device) for device in (HERE, THERE)] == [here, fresh]
        assert {each["generation"] for each in kept.generations()} == {here, fresh}


def test_what_is_lost_on_one_gpu_is_lost_there(kept: KeptCache) -> None:
    here, there = publish(kept, copy_on(HERE)), publish(kept, copy_on(THERE))
    wait_for(lambda: kept.leases() == 0)
    keeper, daemon = kept.processes[-1], kept.pid()
    keeper.kill()
    keeper.wait()
    os.kill(daemon, signal.SIGKILL)
    wait_for(lambda: not Path(f"/proc/{daemon}").exists(), "the daemon's end")
    kept.start_keeper()
    assert [found(kept, device) for device in (HERE, THERE)] == ["residency_lost"] * 2
    again = publish(kept, copy_on(HERE))
    assert again not in (here, there)
    assert [found(kept, device) for device in (HERE, THERE)] == [again, "residency_lost"]
