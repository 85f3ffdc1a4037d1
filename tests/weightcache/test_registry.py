"""The registry's answers: what matches, what explains a miss, who loads, who goes when room is short."""

from typing import Any

import pytest
from tests.weightcache.models import config

from weightcache.errors import CacheMiss, ResourceError
from weightcache.fingerprint import FIELDS, CacheConfig
from weightcache.registry import Claim, Generation, Lease, Loss, Registry, holders, parse_config


def resident(registry: Registry, identity: CacheConfig, name: str = "g", size: int = 100, **facts: Any) -> Generation:
    """A generation that is resident."""
    fields = {"bytes": size, "tensors": 1, "arena": "memfd", "device": None, "publisher": {}, "descriptors": []}
    generation = Generation(name, identity, **{**fields, **facts})
    registry.add(generation)
    return generation


def miss(registry: Registry, identity: CacheConfig, **changes: Any) -> CacheMiss:
    """Why nothing is found."""
    with pytest.raises(CacheMiss) as missed:
        registry.find({**identity.to_dict(), **changes})
    return missed.value


def lease(generation: Generation, pid: int = 7, slot: str | None = "a") -> None:
    generation.leases[f"lease-{pid}"] = Lease(f"lease-{pid}", pid, slot, 0)


def test_an_equal_identity_is_found() -> None:
    registry = Registry()
    generation = resident(registry, config())
    assert registry.find(config().to_dict()) is generation


def test_nothing_of_the_model_is_absent_and_says_what_there_is() -> None:
    registry = Registry()
    assert miss(registry, config()).reason == "absent"
    resident(registry, config("other"))
    absent = miss(registry, config())
    assert (absent.reason, absent.found) == ("absent", ["/models/other"])


OTHER: dict[str, Any] = {
    "model_arch": "Other",
    "revision": "main",
    "checkpoint_digest": "other",
    "tp_size": 2,
    "pp_size": 2,
    "dp_size": 2,
    "ep_size": 2,
    "quant_method": "fp8",
    "quant_config_hash": "other",
    "dtype": "float16",
    "device_capability": "sm_90",
    "torch_version": "2.5.0",
    "engine": "other",
    "layout_id": "other",
    "kernel_backend": "other",
}


@pytest.mark.parametrize("field", OTHER)
def test_one_field_that_differs_is_the_detail_with_both_values(field: str) -> None:
    registry = Registry()
    resident(registry, config())
    missed = miss(registry, config(), **{field: OTHER[field]})
    assert (missed.reason, missed.detail) == ("fingerprint", field)
    assert (missed.expected, missed.found) == (OTHER[field], getattr(config(), field))
    assert [each["field"] for each in missed.data["differences"]] == [field]


def test_a_near_match_names_every_difference_in_the_order_of_the_fingerprint() -> None:
    registry = Registry()
    resident(registry, config(engine="old", layout_id="old", revision="old"), name="far")
    resident(registry, config(torch_version="old", dtype="float16"), name="near", size=1)
    resident(registry, config(torch_version="old", dtype="float16", engine="old"), name="farther")
    missed = miss(registry, config())
    assert missed.detail == "dtype"
    assert [each["field"] for each in missed.data["differences"]] == ["dtype", "torch_version"]
    assert missed.data["generation"] == "near"
    assert "1 more differ" in str(missed)


@pytest.mark.parametrize("rank", ["tp_rank", "pp_rank", "ep_rank"])
def test_another_ranks_weights_are_no_near_match(rank: str) -> None:
    registry = Registry()
    resident(registry, config())
    assert miss(registry, config(), **{rank: 1}).reason == "absent"


def test_two_ranks_do_not_collide() -> None:
    registry = Registry()
    first = resident(registry, config(tp_size=2, tp_rank=0), name="first")
    second = resident(registry, config(tp_size=2, tp_rank=1), name="second")
    assert registry.find(config(tp_size=2, tp_rank=0).to_dict()) is first
    assert registry.find(config(tp_size=2, tp_rank=1).to_dict()) is second


def test_a_moved_copy_matches_by_content_and_unproven_content_never() -> None:
    registry = Registry()
    generation = resident(registry, config())
    assert registry.find(config(model_path="/elsewhere/tiny").to_dict()) is generation
    missed = miss(registry, config(), checkpoint_digest=None)
    assert (missed.reason, missed.detail) == ("fingerprint", "checkpoint_digest")
    assert "--hash" in str(missed)
    unproven = Registry()
    resident(unproven, config(checkpoint_digest=None))
    assert miss(unproven, config(checkpoint_digest=None)).detail == "checkpoint_digest"


def test_a_field_that_one_side_does_not_know_is_a_difference() -> None:
    registry = Registry()
    resident(registry, config())
    missed = miss(registry, config(), moe_dense_tp_size=2)
    assert (missed.reason, missed.detail) == ("fingerprint", "unknown_field")
    assert "moe_dense_tp_size" in str(missed)
    for field in FIELDS:
        fields = config().to_dict()
        del fields[field]
        with pytest.raises(CacheMiss) as lacking:
            registry.find(fields)
        assert (lacking.value.reason, lacking.value.detail) == ("fingerprint", field)


@pytest.mark.parametrize("wrong", [{"tp_size": "two"}, {"dtype": None}, {"model_path": 5}, {"tp_rank": 1.5}])
def test_a_field_of_the_wrong_type_is_no_identity(wrong: dict[str, Any]) -> None:
    with pytest.raises(CacheMiss, match="do not make an identity") as missed:
        parse_config({**config().to_dict(), **wrong})
    assert missed.value.reason == "fingerprint"


def test_what_somebody_loads_is_loading_for_all_others() -> None:
    registry = Registry()
    claim = registry.claim(config().to_dict(), 42)
    claim.done, claim.total = 3, 9
    loading = miss(registry, config())
    assert loading.reason == "daemon_loading"
    assert {key: loading.data[key] for key in ("pid", "done", "total")} == {"pid": 42, "done": 3, "total": 9}
    with pytest.raises(CacheMiss) as refused:
        registry.claim(config().to_dict(), 43)
    assert refused.value.reason == "daemon_loading"
    registry.claims.remove(claim)
    assert miss(registry, config()).reason == "absent"
    assert registry.claim(config().to_dict(), 43).pid == 43


def test_two_loads_of_unproven_content_are_one() -> None:
    registry = Registry()
    registry.claim(config(checkpoint_digest=None).to_dict(), 42)
    with pytest.raises(CacheMiss, match="pid 42"):
        registry.claim(config(checkpoint_digest=None, model_path="/models//tiny/").to_dict(), 43)


def test_nobody_loads_what_became_resident_meanwhile() -> None:
    registry = Registry()
    generation = resident(registry, config())
    with pytest.raises(CacheMiss) as refused:
        registry.claim(config().to_dict(), 43)
    assert refused.value.reason == "daemon_loading"
    generation.quarantined = "wrong answers"
    assert registry.claim(config().to_dict(), 43)


def test_a_quarantined_generation_is_handed_to_nobody_until_a_good_one_is_there() -> None:
    registry = Registry()
    resident(registry, config(), name="bad", quarantined="wrong answers")
    quarantined = miss(registry, config())
    assert quarantined.reason == "quarantined"
    assert "wrong answers" in str(quarantined)
    registry.claim(config().to_dict(), 42)
    assert miss(registry, config()).reason == "daemon_loading"
    good = resident(registry, config(), name="good")
    assert registry.find(config().to_dict()) is good


def test_a_loss_is_told_before_a_near_match_and_until_the_weights_are_back() -> None:
    registry = Registry()
    resident(registry, config(dtype="float16"), name="near")
    registry.lose(Loss("gone", config(), "node_reboot"))
    lost = miss(registry, config())
    assert (lost.reason, lost.detail) == ("residency_lost", "node_reboot")
    registry.lose(Loss("gone", config(), "gpu_lost"))
    assert [loss.detail for loss in registry.losses] == ["gpu_lost"]
    resident(registry, config(), name="back")
    assert registry.losses == []
    registry.lose(Loss("older", config(), "node_reboot"))
    assert registry.losses == []


def test_stale_is_what_an_identity_replaces() -> None:
    registry = Registry()
    old = resident(registry, config(revision="old"), name="old")
    resident(registry, config(revision="old", tp_rank=1), name="another rank")
    resident(registry, config("other"), name="another model")
    resident(registry, config(), name="the very same")
    spoilt = resident(registry, config(), name="spoilt", quarantined="wrong answers")
    lease(resident(registry, config(revision="older"), name="in use"))
    assert registry.stale(Claim(config(), 7)) == [old, spoilt]


class TestReplicas:
    """One identity on several GPUs of a node."""

    HERE, THERE = "GPU-1", "GPU-2"

    @staticmethod
    def reason(registry: Registry, device: str | None) -> str | None:
        try:
            registry.find(config().to_dict(), device)
        except CacheMiss as miss:
            return miss.reason
        return None

    def test_each_finds_the_copy_on_its_own_gpu(self) -> None:
        registry = Registry()
        here = resident(registry, config(), name="here", device=self.HERE)
        assert registry.find(config().to_dict(), self.HERE) is here
        assert registry.find(config().to_dict()) is here, "who names no GPU means any"
        with pytest.raises(CacheMiss) as missed:
            registry.find(config().to_dict(), self.THERE)
        assert (missed.value.reason, missed.value.expected, missed.value.found) == ("device", self.THERE, self.HERE)
        there = resident(registry, config(), name="there", device=self.THERE)
        assert registry.find(config().to_dict(), self.THERE) is there
        assert registry.find(config().to_dict(), self.HERE) is here

    def test_each_loads_for_itself(self) -> None:
        registry = Registry()
        resident(registry, config(), name="here", device=self.HERE)
        claim = registry.claim(config().to_dict(), 42, self.THERE)
        assert self.reason(registry, self.THERE) == "daemon_loading"
        assert self.reason(registry, self.HERE) is None
        with pytest.raises(CacheMiss):
            registry.claim(config().to_dict(), 43, self.THERE)
        with pytest.raises(CacheMiss):
            registry.claim(config().to_dict(), 43, self.HERE)
        registry.claims.remove(claim)
        assert self.reason(registry, self.THERE) == "device"

    def test_what_is_wrong_or_lost_on_one_gpu_is_so_on_that_one_alone(self) -> None:
        registry = Registry()
        resident(registry, config(), name="here", device=self.HERE, quarantined="wrong answers")
        assert (self.reason(registry, self.HERE), self.reason(registry, self.THERE)) == ("quarantined", "device")
        resident(registry, config(), name="there", device=self.THERE)
        registry.remove("here")
        registry.lose(Loss("here", config(), "gpu_lost", self.HERE))
        assert (self.reason(registry, self.HERE), self.reason(registry, self.THERE)) == ("residency_lost", None)
        resident(registry, config(), name="again", device=self.HERE)
        assert registry.losses == []

    def test_a_new_revision_on_one_gpu_replaces_nothing_on_another(self) -> None:
        registry = Registry()
        here = resident(registry, config(revision="old"), name="here", device=self.HERE)
        there = resident(registry, config(revision="old"), name="there", device=self.THERE)
        assert registry.stale(Claim(config(), 7, self.HERE)) == [here]
        assert registry.stale(Claim(config(), 7)) == [here, there]

    def test_an_old_revision_on_the_same_gpu_is_what_the_engine_is_told_of(self) -> None:
        """It takes the place that the new one needs: after a miss ``device`` nobody would replace it."""
        registry = Registry()
        resident(registry, config(), name="there", device=self.THERE)
        resident(registry, config(revision="old"), name="here", device=self.HERE)
        assert (self.reason(registry, self.HERE), self.reason(registry, "GPU-3")) == ("fingerprint", "device")

    def test_a_near_match_on_the_same_gpu_explains_more(self) -> None:
        registry = Registry()
        resident(registry, config(dtype="float16"), name="there", device=self.THERE)
        resident(registry, config(dtype="float16", revision="old"), name="here", device=self.HERE)
        with pytest.raises(CacheMiss) as missed:
            registry.find(config().to_dict(), self.HERE)
        assert missed.value.data["generation"] == "here"


def test_room_is_made_by_what_nobody_uses_quarantined_first_then_longest_unused() -> None:
    registry = Registry(capacity=500)
    young = resident(registry, config("young"), name="young", last_used_ns=30)
    old = resident(registry, config("old"), name="old", last_used_ns=10)
    lease(resident(registry, config("used"), name="used", last_used_ns=1))
    bad = resident(registry, config("bad"), name="bad", last_used_ns=40, quarantined="wrong")
    assert registry.make_room(100) == []
    assert registry.make_room(101) == [bad]
    assert registry.make_room(300) == [bad, old]
    assert registry.make_room(400) == [bad, old, young]
    with pytest.raises(ResourceError) as full:
        registry.make_room(401)
    assert (full.value.detail, full.value.data["needed"], full.value.data["available"]) == ("capacity", 401, 100)
    assert len(registry.generations) == 4
    assert Registry().make_room(1 << 60) == []


def test_holders_are_named() -> None:
    registry = Registry()
    generation = resident(registry, config())
    lease(generation, 7, "a")
    lease(generation, 8, None)
    assert list(holders(generation)) == ["pid 7 (slot a)", "pid 8"]
    assert registry.leases == 2
