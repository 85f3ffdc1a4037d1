"""Readiness of slots and outages of the node."""

import pytest
from tests.fixtures.story import BOOT_WALL, SECOND, Story

from weightcache.availability import Availability, Outage
from weightcache.episodes import Replay


def at(seconds):
    return BOOT_WALL + round(seconds * SECOND)


def watch(*stories):
    """The availability, and the outages that ended, after events in the order of their time."""
    replay, availability, outages = Replay(), Availability(), []
    events = sorted((event for story in stories for event in story.events), key=lambda event: event.boottime_ns)
    for event in (event._replace(id=id_) for id_, event in enumerate(events, 1)):
        if outage := availability.feed(event, replay, replay.feed(event)):
            outages.append(outage)
    return availability, outages


def exited(story, at_s):
    return story.say(at_s, "process", "exited", attempt=1, process="engine", pid=7, signal=9)


def test_one_slot():
    availability, outages = watch(
        Story(episode="1" * 32).open(0, "first_start").close(30),
        exited(Story(episode="1" * 32), 100),
        Story(episode="2" * 32).open(100).close(112),
    )
    slot = availability.slots["a"]
    assert (slot.unready_s(at(200)), slot.observed_s(at(200))) == (42, 200)
    assert outages == [Outage(at(0), at(30)), Outage(at(100), at(112))]
    assert availability.outage is None


def test_an_open_recovery_burns_while_it_runs():
    availability, _ = watch(Story().open(10))
    assert availability.slots["a"].unready_s(at(15)) == 5
    assert availability.slots["a"].unready_s(at(20)) == 10
    assert availability.outage == Outage(at(10), None)


def test_after_an_abandoned_recovery_nothing_is_ready():
    availability, outages = watch(Story().open(0).close(60, "abandoned"))
    assert availability.slots["a"].unready_s(at(100)) == 100
    assert (availability.outage, outages) == (Outage(at(0), None), [])


def test_a_standby_makes_the_outage_short_and_the_recovery_no_shorter():
    availability, outages = watch(
        Story(slot="a", episode="1" * 32).open(0).close(30),
        Story(slot="b", episode="2" * 32).open(0).close(31),
        Story(slot="a", episode="3" * 32).open(100).close(640),
        Story(slot="b", episode="4" * 32).open(105).close(108),
    )
    assert outages == [Outage(at(0), at(30)), Outage(at(105), at(108))]
    assert availability.slots["a"].unready_s(at(700)) == 30 + 540


def test_a_slot_stopped_on_purpose_is_not_observed_and_does_not_serve():
    availability, outages = watch(
        Story(slot="a", episode="1" * 32).open(0).close(10),
        exited(Story(slot="a", episode="1" * 32), 50),
        Story(slot="b", episode="2" * 32).open(0).close(10),
        Story(slot="b", episode="3" * 32).open(60).close(70),
        Story(slot="a", episode="4" * 32).open(90, "first_start").close(100),
    )
    slot = availability.slots["a"]
    assert slot.observed_s(at(100)) == 60
    assert slot.unready_s(at(100)) == pytest.approx(20)
    assert outages == [Outage(at(0), at(10)), Outage(at(60), at(70))]
