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


def test_a_recovery_ended_by_stopping_its_slot_leaves_the_slot_stopped():
    stopped = exited(Story(episode="1" * 32).open(0).close(60, "abandoned", reason="stopped"), 62)
    availability, outages = watch(stopped)
    slot = availability.slots["a"]
    assert (slot.state, slot.unready_s(at(900)), slot.burned_s(at(900)), slot.observed_s(at(900))) == (
        "stopped",
        60,
        60,
        60,
    )
    assert (availability.service.burned_s(at(900)), availability.outage) == (60, None)
    assert outages == [Outage(at(0), at(60))]
    availability, _ = watch(stopped, Story(episode="2" * 32).open(1000, "first_start").close(1010))
    slot = availability.slots["a"]
    assert (slot.state, slot.unready_s(at(1100)), slot.observed_s(at(1100))) == ("ready", 70, 160)


@pytest.mark.parametrize(("exit_code", "observed_s"), [(0, 300), (1, 900), (None, 900)])
def test_a_node_stopped_after_its_keeper_gave_a_slot_up_is_not_observed(exit_code, observed_s):
    given_up = Story().open(0).close(60, "abandoned", reason="restarts_exhausted")
    end = Story(slot=None, episode=None).say(300, "process", "exited", process="keeper", exit_code=exit_code)
    slot = watch(given_up, end)[0].slots["a"]
    assert slot.burned_s(at(900)) == slot.observed_s(at(900)) == observed_s


def test_a_slot_stopped_on_purpose_after_it_was_given_up_is_not_observed_until_it_starts_again():
    given_up = Story().open(0).close(60, "abandoned", reason="restarts_exhausted")
    stopped = Story(episode=None).say(300, "process", "stopped", process="engine")
    slot = watch(given_up, stopped)[0].slots["a"]
    assert slot.burned_s(at(900)) == slot.observed_s(at(900)) == 300
    again = Story(episode="2" * 32).open(1000, "config_change").close(1010)
    slot = watch(given_up, stopped, again)[0].slots["a"]
    assert (slot.state, slot.burned_s(at(1100)), slot.observed_s(at(1100))) == ("ready", 300, 400)


@pytest.mark.parametrize("slot", ["a", "b", "c"])
def test_a_word_that_a_slot_is_stopped_stops_no_other_and_none_that_recovers(slot):
    given_up = Story(slot="b", episode="2" * 32).open(0).close(60, "abandoned", reason="restarts_exhausted")
    stopped = Story(slot=slot, episode=None).say(300, "process", "stopped", process="engine")
    slots = watch(Story(slot="a", episode="1" * 32).open(0), given_up, stopped)[0].slots
    assert slots["a"].state == "unready"
    assert slots["b"].state == ("stopped" if slot == "b" else "unready")


def test_a_standby_makes_the_outage_short_and_the_recovery_no_shorter():
    availability, outages = watch(
        Story(slot="a", episode="1" * 32).open(0).close(30),
        Story(slot="b", episode="2" * 32).open(0).close(31),
        Story(slot="a", episode="3" * 32).open(100).close(640),
        Story(slot="b", episode="4" * 32).open(105).close(108),
    )
    assert outages == [Outage(at(0), at(30)), Outage(at(105), at(108))]
    assert availability.slots["a"].unready_s(at(700)) == 30 + 540


def test_a_takeover_counts_once_and_makes_an_outage_as_long_as_it_took():
    starts = [Story(slot=slot, episode=slot * 32).open(0).close(30) for slot in "abc"]
    lost = Story(slot="a", episode="1" * 32).open(100).close(140)
    takeover = Story(slot="b", episode="2" * 32)
    takeover.say(100.5, "episode_open", "crash", fault_boottime_ns=100 * SECOND, instead_of={"slot": "a"})
    takeover.say(101, "episode_close", "ready", verified=True, path="standby")
    availability, outages = watch(*starts, lost, takeover)
    assert availability.takeovers == 1
    assert outages == [Outage(at(0), at(30))], "slot c was ready all the time"
    availability, outages = watch(*starts[:2], lost, takeover)
    assert (availability.takeovers, outages[-1]) == (1, Outage(at(100), at(101)))


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


class TestBudget:
    """Planned recoveries burn nothing before their deadline."""

    def test_a_fault_burns_from_its_first_second(self):
        availability, _ = watch(Story().open(0))
        assert availability.slots["a"].burned_s(at(7)) == 7

    def test_a_planned_recovery_burns_what_is_past_its_deadline(self):
        story = Story().open(0, "upgrade").lookup(1, "hit")
        availability, _ = watch(story)
        slot = availability.slots["a"]
        assert (slot.burned_s(at(60)), slot.burned_s(at(65)), slot.unready_s(at(65))) == (0, 5, 65)
        assert availability.service.burned_s(at(65)) == 5

    def test_a_deadline_that_moves_gives_nothing_back(self):
        """The slot's last recovery hit, so this one is expected to; at 100 s it turns out to be a miss."""
        before = Story(episode="1" * 32).open(0).lookup(1, "hit").close(10)
        story = Story(episode="2" * 32).open(1000, "upgrade").lookup(1100, "miss", reason="absent")
        slot = watch(before, story)[0].slots["a"]
        assert slot.burned_s(at(1100)) == 10 + 40
        assert slot.burned_s(at(1600)) == 10 + 40
        assert slot.burned_s(at(1601)) == 10 + 41

    def test_a_fault_beside_a_planned_recovery_burns_the_service(self):
        planned = Story(slot="a", episode="1" * 32).open(0, "upgrade")
        fault = Story(slot="b", episode="2" * 32).open(0, "first_start").close(5).say(0, "probe")
        fault.events.pop()
        crash = Story(slot="b", episode="3" * 32).open(20)
        availability, _ = watch(planned, fault, crash)
        assert availability.service.unready_s(at(30)) == 5 + 10
        assert availability.service.burned_s(at(30)) == 10


class TestService:
    def test_is_ready_while_any_slot_is(self):
        availability, _ = watch(
            Story(slot="a", episode="1" * 32).open(0).close(30),
            Story(slot="b", episode="2" * 32).open(0).close(40),
            Story(slot="a", episode="3" * 32).open(100).close(140),
        )
        assert availability.service.unready_s(at(200)) == 30
        assert availability.service.observed_s(at(200)) == 200
        assert availability.takeovers == 1

    def test_a_crash_beside_a_ready_slot_is_a_takeover_though_its_exit_is_told_first(self):
        crashed = Story(slot="b", episode="2" * 32).open(0).close(10)
        availability, _ = watch(
            Story(slot="a", episode="1" * 32).open(0).close(10),
            exited(crashed, 60),
            Story(slot="b", episode="3" * 32).open(60).close(70),
        )
        assert availability.takeovers == 1

    def test_the_last_slot_lost_is_no_takeover(self):
        availability, _ = watch(Story(episode="1" * 32).open(0).close(30), Story(episode="2" * 32).open(50))
        assert availability.takeovers == 0


def test_no_slot_is_ready_after_a_reboot_until_its_engine_is():
    """Its clock stops with the last sign of life, and goes on from the fault once somebody recovers it."""
    before = Story(episode="1" * 32).open(0).close(10).say(100, "probe", "correct")
    after = Story(episode=None, slot=None, boot="boot-2", boot_wall=BOOT_WALL + 500 * SECOND)
    after.say(1, "process", "started", process="keeper")
    replay, availability = Replay(), Availability()
    for id_, event in enumerate([*before.events, *after.events], 1):
        availability.feed(event, replay, replay.feed(event._replace(id=id_)))
    assert (availability.slots["a"].state, availability.slots["a"].observed_s(at(900))) == ("stopped", 100)
    again = Story(episode="2" * 32, boot="boot-2", boot_wall=BOOT_WALL + 500 * SECOND)
    again.say(2, "episode_open", "node_reboot", cause="node_reboot", fault_wall_ns=at(103)).close(20)
    for event in again.events:
        availability.feed(event, replay, replay.feed(event._replace(id=replay.position + 1)))
    slot = availability.slots["a"]
    assert (slot.unready_s(at(900)), slot.observed_s(at(900))) == (10 + 417, 100 + 900 - 103)


class TestLateNews:
    """Spools are merged late: what they tell of was over before what is known already."""

    def ready(self, *late):
        """A slot that is ready in its second boot, and then some events more, in this order."""
        first = Story(episode="1" * 32).open(0).close(10)
        second = Story(episode="2" * 32, boot="boot-2", boot_wall=BOOT_WALL + 500 * SECOND)
        second.say(1, "process", "started", process="keeper")
        second.say(2, "episode_open", "node_reboot", cause="node_reboot", fault_wall_ns=at(10)).close(20)
        replay, availability = Replay(), Availability()
        events = [*first.events, *second.events, *(event for story in late for event in story.events)]
        for id_, event in enumerate(events, 1):
            availability.feed(event, replay, replay.feed(event._replace(id=id_)))
        return replay, availability

    def test_of_an_earlier_boot_stops_nothing(self):
        replay, availability = self.ready(exited(Story(episode="1" * 32), 90).say(95, "probe", "correct"))
        assert availability.slots["a"].state == "ready"
        assert replay.boot == "boot-2"

    def test_of_a_boot_that_nobody_had_heard_of_stops_nothing(self):
        between = Story(episode=None, boot="boot-1b", boot_wall=BOOT_WALL + 200 * SECOND).say(3, "probe", "wrong")
        replay, availability = self.ready(between)
        assert availability.slots["a"].state == "ready"
        assert replay.boot == "boot-2"

    def test_of_an_engine_before_the_one_that_serves_stops_nothing(self):
        earlier = Story(episode="2" * 32, boot="boot-2", boot_wall=BOOT_WALL + 500 * SECOND)
        _, availability = self.ready(exited(earlier, 15))
        assert availability.slots["a"].state == "ready"

    def test_a_boot_whose_clock_is_behind_is_told_by_what_starts_in_it(self):
        third = Story(episode=None, boot="boot-3", boot_wall=BOOT_WALL - 10_000 * SECOND)
        replay, availability = self.ready(third.say(1, "process", "started", process="daemon"))
        assert availability.slots["a"].state == "stopped"
        assert replay.boot == "boot-3"
