"""Replay: what a journal's events add up to."""

import itertools

import pytest
from tests.fixtures.story import BOOT_WALL, SECOND, Story, recovery

from weightcache.episodes import Episode, Replay
from weightcache.vocabulary import UNATTRIBUTED


def replay(*stories, order=None) -> Replay:
    events = [event for story in stories for event in story.events]
    events = [event._replace(id=id_) for id_, event in enumerate(events, 1)]
    state = Replay()
    for event in order(events) if order else events:
        state.feed(event)
        assert state.started == state.closed + len([it for it in state.episodes if it.is_open])
    return state


def only(state: Replay) -> Episode:
    (episode,) = state.episodes
    return episode


class TestOneRecovery:
    def test_is_accounted_for(self):
        episode = only(replay(recovery()))
        assert (episode.outcome, episode.path, episode.verified, episode.generation) == ("ready", "hit", True, "g1")
        assert episode.total_s == 10
        assert episode.phases_s() == pytest.approx(
            {
                "detect": 0.5,
                "backoff": 1,
                "spawn": 0.1,
                "import": 3.4,
                UNATTRIBUTED: 2,
                "load_weights": 2,
                "semantic_verify": 1,
            }
        )
        assert episode.parts_s() == {"load_weights.map": 0.8}
        (attempt,) = episode.attempts
        assert (attempt.pid, attempt.start_ticks, attempt.outcome) == (77, 10160, "ready")

    def test_slot_is_free_again(self):
        slot = replay(recovery()).slots["a"]
        assert slot.episode is None
        assert slot.last is not None
        assert slot.attempt is slot.last.attempts[-1]

    def test_does_not_depend_on_the_order_of_its_middle(self):
        """A spool is merged late: everything between opening and closing may come in any order."""
        expected = only(replay(recovery()))
        for shift in range(1, 12):
            state = replay(
                recovery(), order=lambda events, n=shift: [*events[1:-1][n:], events[0], *events[1:-1][:n], events[-1]]
            )
            assert only(state).phases_s() == expected.phases_s()
            assert only(state).path == "hit"


def test_every_prefix_adds_up():
    """Killed between any two writes, an episode is open, and its phases still add up to its age."""
    events = recovery().events
    for length in range(1, len(events)):
        state = Replay()
        for event in events[:length]:
            state.feed(event)
        episode = only(state)
        assert episode.is_open
        assert (state.started, state.closed) == (1, 0)
        now = BOOT_WALL + 115 * SECOND
        assert sum(episode.phases_s(now).values()) == pytest.approx(episode.age_s(now)) == 15


class TestKilled:
    def test_open_phases_end_with_their_attempt(self):
        story = Story().open(0).say(0, "attempt_start", attempt=1).phase("load_weights", 1)
        story.say(5, "process", "exited", attempt=1, process="engine", signal=9)
        story.say(5.1, "attempt_end", "crashed", attempt=1, signal=9)
        story.phase("backoff", 6, 7, attempt=None).say(7, "attempt_start", attempt=2).phase("spawn", 7, 8, attempt=2)
        episode = only(replay(story))
        assert episode.phases_s() == {UNATTRIBUTED: 2, "load_weights": 4, "backoff": 1, "spawn": 1}
        assert [attempt.outcome for attempt in episode.attempts] == ["crashed", None]

    def test_a_keeper_that_died_too_leaves_the_end_to_the_next_attempt(self):
        story = Story().open(0).say(0, "attempt_start", attempt=1).phase("load_weights", 1)
        story.say(9, "attempt_start", attempt=2).say(12, "attempt_end", "ready", attempt=2).close(12)
        episode = only(replay(story))
        assert episode.phases_s() == {UNATTRIBUTED: 4, "load_weights": 8}
        assert [attempt.outcome for attempt in episode.attempts] == ["crashed", "ready"]

    def test_an_episode_that_nobody_closed_is_abandoned_when_its_slot_opens_another(self):
        first, second = Story(episode="1" * 32).open(0), Story(episode="2" * 32).open(50)
        state = replay(first, second)
        assert [episode.outcome for episode in state.episodes] == ["abandoned", None]
        assert state.episodes[0].total_s == 50

    def test_reboot_between(self):
        """Boottime starts again; across the reboot the wall clock counts, within each boot boottime does."""
        before = Story().open(1000, cause="gpu_fault").say(1000, "attempt_start", attempt=1).phase("import", 1001)
        after = Story(boot="boot-2", boot_wall=BOOT_WALL + 1100 * SECOND)
        after.say(20, "attempt_start", attempt=2).phase("import", 20, 30, attempt=2).close(40)
        episode = only(replay(before, after))
        assert episode.total_s == 140
        assert sum(episode.phases_s().values()) == pytest.approx(140)
        assert episode.domain == "node"


class TestPhases:
    def test_a_phase_nobody_ended_is_over_when_a_later_one_begins(self):
        story = Story().open(0).phase("spawn", 0).phase("import", 2, 5)
        assert only(replay(story)).phases_s() == {"spawn": 2, "import": 3}

    def test_a_phase_begun_a_little_before_the_one_that_precedes_it_is_not_lost(self):
        """A process's start time has a resolution of 10 ms: import seems to begin before spawn does."""
        story = Story().open(0).phase("import", 0.990).phase("spawn", 0.993, 0.995)
        story.say(4.995, "attempt_end", "crashed", attempt=1)
        phases = only(replay(story)).phases_s()
        assert phases["import"] == pytest.approx(4.003)
        assert phases["spawn"] == pytest.approx(0.002)

    def test_overlap_goes_to_the_one_that_began_later(self):
        story = Story().open(0).phase("kv_profile", 0, 10).phase("compile", 3, 6)
        assert only(replay(story)).phases_s() == {"kv_profile": 7, "compile": 3}

    def test_slowest_rank_counts(self):
        story = Story().open(0).phase("import", 0, 1)
        story.phase("load_weights", 1, 3, rank=0).phase("load_weights", 1, 9, rank=1).phase("server_ready", 9, 10)
        assert only(replay(story)).phases_s() == {"import": 1, "load_weights": 8, "server_ready": 1}

    def test_rank_that_never_finished_is_the_slowest(self):
        story = Story().open(0).phase("load_weights", 0, 3, rank=0).phase("load_weights", 1, rank=1)
        story.say(8, "attempt_end", "crashed", attempt=1)
        assert only(replay(story)).phases_s() == {UNATTRIBUTED: 1, "load_weights": 7}

    def test_rank_that_outlives_its_attempt_is_not_the_slowest(self):
        """The main process is killed; another rank goes on until it notices."""
        story = Story().open(0).phase("import", 0, 5, rank=0).phase("load_weights", 5, rank=0)
        story.phase("load_weights", 5, 6.5, rank=1).phase("load_weights.bind", 6.1, 6.4, rank=1)
        story.say(6, "attempt_end", "crashed", attempt=1).close(6, "crashed")
        assert only(replay(story)).phases_s() == {"import": 5, "load_weights": 1}

    def test_current_phase(self):
        story = Story().open(0).phase("detect", 0, 1, attempt=None).phase("backoff", 1, attempt=None)
        phase = only(replay(story)).phase
        assert phase is not None
        assert phase.name == "backoff"


class TestPath:
    @pytest.mark.parametrize(
        ("results", "path"),
        [
            ([], "unknown"),
            ([(0, "hit"), (1, "hit")], "hit"),
            ([(0, "hit"), (1, "miss")], "partial"),
            ([(0, "miss"), (1, "miss")], "miss"),
            ([(0, "off"), (1, "off")], "off"),
            ([(0, "off"), (1, "miss")], "miss"),
            ([(0, "miss"), (0, "hit")], "miss"),
        ],
    )
    def test_ranks(self, results, path):
        story = Story().open(0)
        for rank, result in results:
            story.lookup(1, result, rank=rank)
        assert only(replay(story.close(5))).path == path

    def test_a_rank_that_has_not_looked_up_yet_may_still_miss(self):
        story = Story().open(0).phase("load_weights", 0, 1, rank=0).phase("load_weights", 0, rank=1).lookup(1, "hit")
        assert only(replay(story)).path == "unknown"
        assert only(replay(story.lookup(2, "hit", rank=1))).path == "hit"

    def test_a_miss_in_an_earlier_attempt_is_not_forgotten(self):
        story = Story().open(0).lookup(1, "miss", reason="no_daemon").lookup(9, "hit", attempt=2).close(10)
        episode = only(replay(story))
        assert (episode.path, episode.reason) == ("partial", "no_daemon")

    def test_reason_is_the_lowest_failing_rank_s(self):
        story = Story().open(0).lookup(1, "hit", rank=0)
        story.lookup(2, "miss", rank=2, reason="absent").lookup(3, "miss", rank=1, reason="fingerprint", detail="dtype")
        episode = only(replay(story.close(4)))
        assert (episode.reason, episode.detail) == ("fingerprint", "dtype")


def test_remembers_no_more_than_it_was_told():
    state = Replay(keep=3)
    for number, id_ in enumerate(itertools.count(1)):
        if number == 20:
            break
        story = Story(episode=f"{id_:032x}", slot="ab"[id_ % 2]).open(id_ * 10).close(id_ * 10 + 5)
        for event in story.events:
            state.feed(event)
    assert len(state.episodes) == 3
    assert (state.started, state.closed) == (20, 20)
