"""Replicas of one model on several GPUs of a node, by one daemon under a real keeper.

The daemon never touches a GPU: here memory files stand for its chunks, in manifests that name one. On GPUs the same is
run by ``benchmarks/gpu_replicas.py``.
"""

import os
import signal
from pathlib import Path

import pytest
from tests.weightcache.caches import KeptCache, wait_for
from tests.weightcache.clients import client, hold_a_claim
from tests.weightcache.models import config
from tests.weightcache.publishing import attach, packed, publish, publishing, spoil

from weightcache import messages
from weightcache.errors import CacheMiss
from weightcache.fingerprint import CacheConfig
from weightcache.frames import close_all
from weightcache.publish import Packed, offer

HERE, THERE = "GPU-1", "GPU-2"


def copy_on(device: str, seed: int = 0, identity: CacheConfig | None = None) -> Packed:
    return spoil(packed(identity, seed), arena="cuda_vmm", device=device)


def found(cache: KeptCache, device: str | None, identity: CacheConfig | None = None) -> str:
    """The generation that an engine on this GPU is given, or the reason of its miss."""
    try:
        connection, generation, descriptors = attach(cache, identity, device=device)
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
    wait_for(lambda: kept.leases() == 0)
    held = [attach(kept, device=device) for device in (HERE, THERE)]
    for _ in range(2):
        assert [found(kept, device) for device in (HERE, THERE, "GPU-3")] == [here, there, "device"]
        assert kept.ask(messages.Explain(config=config().to_dict(), device=THERE)).data["generation"] == there
        kept.kill_daemon()
        wait_for(lambda: kept.leases() == 2, "each to have its one lease again")
        assert {each["generation"]: len(each["leases"]) for each in kept.generations()} == {here: 1, there: 1}
    for connection, _, descriptors in held:
        close_all(descriptors)
        connection.close()


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


def test_a_claim_is_for_the_gpu_that_it_names(kept: KeptCache) -> None:
    """Or its GPU would never have a copy, and the other one more with every start."""
    connection, copy = kept.connect(), copy_on(THERE)
    connection.ask(messages.Claim(config=config().to_dict(), device=HERE), messages.Claimed)
    with pytest.raises(CacheMiss) as refused:
        offer(connection, copy)
    assert (refused.value.reason, refused.value.expected, refused.value.found) == ("import_mismatch", HERE, THERE)
    assert kept.generations() == []
    copy.close()
    connection.close()


def test_a_new_version_takes_the_place_of_the_old_one_on_each_gpu(kept: KeptCache) -> None:
    old, new = config(revision="old"), config(revision="new")
    for device in (HERE, THERE):
        publish(kept, copy_on(device, identity=old))
    wait_for(lambda: kept.leases() == 0)
    for device in (HERE, THERE):
        assert found(kept, device, new) == "fingerprint", "the policy for which is to replace"
        publish(kept, copy_on(device, identity=new), replace=True)
    assert {(each["device"], each["config"]["revision"]) for each in kept.generations()} == {
        (HERE, "new"),
        (THERE, "new"),
    }


def test_two_that_start_from_nothing_each_load_and_the_death_of_one_is_its_own(kept: KeptCache) -> None:
    """Two engines on two GPUs; one is killed with a claim, after which its GPU is free for the next."""
    with client(hold_a_claim, kept.socket, THERE) as dying, publishing(kept, copy_on(HERE)) as (_, here):
        assert dying.hear() == "claimed"
        assert [found(kept, device) for device in (HERE, THERE)] == [here, "daemon_loading"]
        assert [(each["pid"], each["device"]) for each in kept.status()["claims"]] == [(dying.process.pid, THERE)]
        dying.kill()
    wait_for(lambda: found(kept, THERE) == "device", "the claim to end with its process")
    there = publish(kept, copy_on(THERE))
    assert [found(kept, device) for device in (HERE, THERE)] == [here, there]


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
    kept.kill_daemon()
    assert [found(kept, device) for device in (HERE, THERE)] == [again, "residency_lost"], "one GPU never came back"
    assert kept.status()["losses"] == [{"generation": there, "device": THERE, "detail": "keeper_lost"}]
