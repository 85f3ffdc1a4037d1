"""The state machine: what leads where, and that nothing but a lease opens a slot."""

import itertools

import pytest

from readmit.gate.process import Engine
from readmit.gate.slots import TRANSITIONS, ImpossibleTransitionError, Lease, Slot, Transition
from weightcache.vocabulary import SLOT_STATES

WAY_IN = ("starting", "loading", "verifying")
LEASE = Lease(Engine(4, 2), "generation", "probes", 1)


def slot_in(state: str, observers: tuple[list[Transition], ...] = ()) -> Slot:
    slot = Slot("a", "http://127.0.0.1:1", [seen.append for seen in observers])
    if state in WAY_IN:
        for step in WAY_IN[: WAY_IN.index(state) + 1]:
            slot.enter(step, "test")
        return slot
    for step in WAY_IN:
        slot.enter(step, "test")
    if state in ("ready", "draining", "stopped"):
        slot.open(LEASE)
    if state in ("draining", "stopped"):
        slot.enter("draining", "test")
    if state in ("suspect", "stopped"):
        slot.enter(state, "test")
    return slot


@pytest.mark.parametrize(("state", "target"), [*itertools.product(SLOT_STATES, SLOT_STATES)])
def test_only_the_transitions_of_the_table_are_possible(state: str, target: str) -> None:
    slot = slot_in(state)
    if target == state:
        slot.enter(target, "again")
        assert (slot.state, slot.reason) == (state, "again")
    elif target in TRANSITIONS[state] and target != "ready":
        slot.enter(target, "why")
        assert (slot.state, slot.reason) == (target, "why")
    else:
        with pytest.raises(ImpossibleTransitionError):
            slot.enter(target, "why")
        assert slot.state == state


@pytest.mark.parametrize("state", [state for state in SLOT_STATES if state != "verifying"])
def test_a_lease_opens_nothing_but_a_slot_that_is_being_verified(state: str) -> None:
    slot = slot_in(state)
    with pytest.raises(ImpossibleTransitionError):
        slot.open(LEASE)
    assert slot.state == state


def test_no_state_but_ready_and_draining_serves() -> None:
    serving = {state for state in SLOT_STATES if slot_in(state).serves}
    assert serving == {"ready", "draining"}


def test_revoking_ends_readiness_and_the_lease_at_once() -> None:
    slot = slot_in("ready")
    assert slot.revoke("engine_exited")
    assert (slot.state, slot.reason, slot.lease, slot.serves) == ("suspect", "engine_exited", None, False)
    assert not slot.revoke("engine_exited")


def test_an_engine_that_dies_while_draining_serves_no_more() -> None:
    slot = slot_in("draining")
    assert slot.revoke("engine_exited")
    assert (slot.state, slot.serves) == ("draining", False)


def test_observers_see_every_step_with_its_reason() -> None:
    seen: list[Transition] = []
    slot = slot_in("ready", (seen,))
    slot.revoke("hang")
    steps = [(step.previous, step.state, step.reason) for step in seen]
    assert steps == [
        (None, "starting", "test"),
        ("starting", "loading", "test"),
        ("loading", "verifying", "test"),
        ("verifying", "ready", "verified"),
        ("ready", "suspect", "hang"),
    ]
    assert [step.at_ns for step in seen] == sorted(step.at_ns for step in seen)


def test_a_lease_without_golden_answers_says_so() -> None:
    slot = slot_in("verifying")
    slot.open(LEASE._replace(probe_set=None))
    assert slot.ready
    assert slot.lease is not None
    assert not slot.lease.verified
    assert slot.reason == "unverified"
