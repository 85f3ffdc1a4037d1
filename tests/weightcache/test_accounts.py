"""The accounts, by what a scrape shows of them: figures, budgets, GPU time, rent, what is open, what was worst."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fixtures.story import BOOT_WALL, SECOND, Story, recovery
from tests.weightcache.bookkeeping import Books, cold, config, miss, warm

from weightcache.slo import BUDGET_WINDOW_S, THRESHOLDS_S
from weightcache.telemetry.budget import CLASSES, Budget
from weightcache.telemetry.worst import WINDOWS_S, Worst
from weightcache.vocabulary import PHASES


class TestFigures:
    def test_hit_rate_counts_ranks_that_tried(self):
        story = Story().open(0).lookup(1, "hit", rank=0).lookup(1, "miss", rank=1, reason="device")
        books = Books().tell(story.lookup(1, "off", rank=2))
        assert books("weightcache_lookups_total", result="hit") == 1
        assert books("weightcache_lookups_total", result="miss") == 1
        assert books("weightcache_misses_total", reason="device", detail="") == 1

    def test_time_to_semantic_readiness_wants_a_checked_answer(self):
        books = Books().tell(recovery(), Story(episode="2" * 32).open(200).close(210, verified=False))
        assert books("readmit_time_to_semantic_readiness_seconds_sum", path="hit") == 10
        assert books("readmit_time_to_semantic_readiness_seconds_count", path="unknown") == 0
        assert books("readmit_recoveries_unverified_total") == 1

    def test_a_cold_start_counts_once_however_many_ranks_missed(self):
        story = Story().open(0)
        for rank in range(4):
            story.lookup(1, "miss", rank=rank, reason="residency_lost", detail="gpu_lost")
        books = Books().tell(story.close(500, verified=True))
        assert books("readmit_cold_starts_total", reason="residency_lost", detail="gpu_lost") == 1
        assert books("weightcache_misses_total", reason="residency_lost", detail="gpu_lost") == 4

    def test_an_end_that_two_processes_tell_of_counts_once(self):
        story = Story(episode=None, slot=None)
        for pid in (7, 7, 8):
            story.say(pid, "process", "exited", process="daemon", pid=pid)
        assert Books().tell(story)("readmit_process_exits_total", process="daemon") == 2

    def test_failure_tail_holds_the_worst_miss_whatever_its_outcome(self):
        later = miss(700, "3" * 32, outcome="abandoned", at=200)
        books = Books().tell(recovery(), miss(30, "2" * 32, at=150), later, now=1000)
        assert books("readmit_failure_tail_seconds", window="24h") == 700
        assert books("readmit_worst_recovery_seconds", path="hit", window="24h") == 10

    def test_failure_tail_holds_open_recoveries_at_their_age(self):
        story = Story().open(0).lookup(1, "miss", reason="absent")
        assert Books().tell(story, now=333)("readmit_failure_tail_seconds", window="24h") == 333

    def test_an_open_recovery_that_says_nothing_counts_once_it_is_late_for_a_hit(self):
        assert Books().tell(Story().open(0), now=59)("readmit_failure_tail_seconds", window="24h") == 0
        assert Books().tell(Story().open(0), now=61)("readmit_failure_tail_seconds", window="24h") == 61

    def test_the_tail_forgets_what_left_its_window(self):
        books = Books().tell(miss(700), now=2 * 86_400)
        assert books("readmit_failure_tail_seconds", window="24h") == 0
        assert books("readmit_failure_tail_seconds", window="7d") == 700


class TestColdStarts:
    @pytest.mark.parametrize("cause", ["first_start", "scale_out"])
    def test_where_nothing_could_be_resident_a_miss_is_expected(self, cause):
        story = Story().open(0, cause).lookup(1, "miss", reason="absent").close(9, verified=True)
        books = Books().tell(story)
        assert books("readmit_cold_starts_total", reason="absent", detail="") == 1
        assert books("readmit_unexpected_cold_starts_total", reason="absent") == 0

    def test_any_other_one_is_not(self):
        books = Books().tell(miss(30, reason="fingerprint", detail="torch_version"))
        assert books("readmit_unexpected_cold_starts_total", reason="fingerprint") == 1


class TestWholeEvents:
    def kept(self, books, path="miss"):
        return {class_: books("readmit_slo_events", path=path, **{"class": class_}) for class_ in CLASSES}

    def test_good_late_and_failed(self):
        stories = [miss(seconds, f"{number:032x}", at=1000 * number) for number, seconds in enumerate((30, 700, 30))]
        books = Books().tell(*stories, miss(30, "f" * 32, outcome="abandoned", at=3000), now=3100)
        assert self.kept(books) == {"good": 2, "late": 1, "failed": 1}
        assert books("readmit_recoveries_failed_total") == 1

    def test_an_open_recovery_is_late_as_soon_as_it_is(self):
        story = Story().open(0).lookup(1, "miss", reason="absent")
        assert self.kept(Books().tell(story, now=600))["late"] == 0
        assert self.kept(Books().tell(story, now=601))["late"] == 1

    def test_planned_recoveries_count_only_when_late(self):
        def planned(seconds, episode):
            story = Story(episode=episode).open(0, "upgrade").lookup(1, "miss", reason="absent")
            return story.close(seconds, verified=True)

        assert self.kept(Books().tell(planned(599, "1" * 32), now=700)) == dict.fromkeys(CLASSES, 0)
        assert self.kept(Books().tell(planned(601, "2" * 32), now=700)) == {"good": 0, "late": 1, "failed": 0}

    def test_a_recovery_ended_by_stopping_its_slot_has_not_failed_and_counts_only_when_late(self):
        def stopped(seconds):
            story = Story().open(0).lookup(1, "miss", reason="absent")
            return Books().tell(story.close(seconds, "abandoned", reason="stopped"), now=1000)

        assert self.kept(stopped(599)) == dict.fromkeys(CLASSES, 0)
        assert self.kept(stopped(601)) == {"good": 0, "late": 1, "failed": 0}
        assert stopped(599)("readmit_recoveries_late_total", path="miss") == 0
        assert stopped(599)("readmit_recoveries_failed_total") == 0
        assert stopped(599)("readmit_recoveries_total", path="miss", outcome="abandoned") == 1

    def test_a_slot_stopped_in_the_middle_of_its_recovery_is_not_waited_for(self):
        """What `ReadmitNobodyRecovers` reads, after a stop on purpose and after the keeper gave up."""
        for reason, wanted in (("stopped", 0), ("restarts_exhausted", 1)):
            books = Books().tell(Story().open(0).close(30, "abandoned", reason=reason), now=100)
            assert books("readmit_slot_wanted", slot="a") == wanted
            assert books("readmit_slot_ready", slot="a") == 0
            assert books("readmit_recovery_started_timestamp_seconds", slot="a") == 0
            assert books("readmit_budget_burned_seconds_total", slot="a") == (100 if wanted else 30)
        books.tell(Story(episode=None).say(200, "process", "stopped", process="engine"), now=300)
        assert books("readmit_slot_wanted", slot="a") == 0, "given up, and then stopped on purpose"
        assert books("readmit_budget_burned_seconds_total", slot="a") == 200

    def test_they_leave_after_90_days(self):
        books = Books().tell(miss(700), now=90 * 86_400)
        assert self.kept(books)["late"] == 1
        books.now += 2 * 3600
        assert self.kept(books)["late"] == 0

    @given(st.lists(st.tuples(st.integers(0, 20 * 86_400), st.sampled_from(CLASSES)), max_size=60))
    def test_agrees_with_counting_all_of_them(self, steps):
        budget, closed, now = Budget(), [], 100 * 86_400
        for pause, class_ in steps:
            now += pause
            budget.add(now * SECOND, class_)
            closed.append((now // 3600, class_))
            oldest = (now - BUDGET_WINDOW_S) // 3600
            expected = {one: sum(it == one and hour >= oldest for hour, it in closed) for one in CLASSES}
            assert budget.counts(now * SECOND) == expected


class TestGpuTime:
    """The published account: a start of 527 s on 8 GPUs, 32 s with resident weights."""

    def test_a_cold_start_costs_1_17_gpu_hours_an_instance_and_117_for_a_hundred(self):
        books = Books().tell(cold(527))
        assert books("readmit_gpu_seconds_lost_total", path="miss") / 3600 == pytest.approx(1.17, abs=0.005)
        books.tell(*(cold(527, episode=f"{number:032x}", at=600 * number) for number in range(1, 100)))
        assert books("readmit_gpu_seconds_lost_total", path="miss") / 3600 == pytest.approx(117, abs=0.5)

    def test_a_hit_saves_what_the_cold_start_of_its_model_would_have_taken_longer(self):
        books = Books().tell(cold(520), cold(534, episode="2" * 32, at=600), warm(32, episode="3" * 32, at=1200))
        assert books("readmit_gpu_seconds_saved_total") == pytest.approx((527 - 32) * 8)
        assert books("readmit_gpu_seconds_lost_total", path="hit") == 32 * 8

    @pytest.mark.parametrize(
        "first",
        [
            {"state": {"page_cache": "cold", "compile_cache": "warm", "kernel_cache": "warm"}},
            {"state": None},
            {"checkpoint_digest": "another"},
            {"tp_size": 4},
        ],
    )
    def test_only_the_same_model_from_the_same_starting_state_compares(self, first):
        books = Books().tell(cold(527, **first), warm(32, episode="2" * 32, at=600))
        assert books("readmit_gpu_seconds_saved_total") == 0
        assert books("readmit_hits_without_cold_start_total") == 1

    def test_an_attempt_that_died_before_it_asked_has_its_slots_gpus(self):
        dead = Story(episode="2" * 32).open(600).say(600, "attempt_start", attempt=1).close(700, "abandoned")
        assert Books().tell(cold(527), dead)("readmit_gpu_seconds_lost_total", path="unknown") == 800

    def test_on_a_cpu_there_are_none(self):
        assert Books().tell(cold(527, device_capability=None))("readmit_gpu_seconds_lost_total", path="miss") == 0


class TestRent:
    def weights(self, **facts):
        story = Story(episode=None, slot=None)
        return story.say(0, "publish", "published", generation="g1", bytes=1000, config=config(), **facts)

    def books(self, story, now):
        books = Books().tell(story, now=now)
        use = {use: books("weightcache_resident_byte_seconds_total", use=use) for use in ("leased", "idle")}
        return use, books("readmit_standby_gpu_seconds_not_held_total")

    def test_runs_from_publishing_to_release_leased_or_idle(self):
        story = self.weights().say(10, "lease_open", generation="g1", lease="l1")
        story.say(12, "lease_open", generation="g1", lease="l2").say(30, "lease_close", generation="g1", lease="l1")
        assert self.books(story, 40) == ({"leased": 30_000, "idle": 10_000}, 30)
        story.say(50, "lease_close", generation="g1", lease="l2").say(60, "release", "released", generation="g1")
        assert self.books(story, 1000) == ({"leased": 40_000, "idle": 20_000}, 40)

    def test_ends_with_what_a_restarted_daemon_no_longer_has(self):
        story = self.weights().say(10, "lease_open", generation="g1", lease="l1")
        kept = {"process": "daemon", "generations": ["g1"], "lease_names": ["l1"]}
        story.say(20, "process", "readopted", **kept)
        assert self.books(story, 30)[0] == {"leased": 20_000, "idle": 10_000}
        story.say(40, "process", "readopted", **{**kept, "lease_names": []})
        assert self.books(story, 50)[0] == {"leased": 30_000, "idle": 20_000}
        story.say(60, "process", "started", process="daemon", generations=[])
        assert self.books(story, 1000)[0] == {"leased": 30_000, "idle": 30_000}

    def test_ends_with_its_boot(self):
        story = self.weights().say(20, "probe", "correct")
        after = Story(episode=None, slot=None, boot="boot-2", boot_wall=BOOT_WALL + 500 * SECOND)
        books = Books().tell(story, after.say(1, "process", "started", process="daemon"), now=1000)
        assert books("weightcache_resident_byte_seconds_total", use="idle") == 20_000

    def test_late_news_of_an_earlier_boot_neither_ends_it_nor_begins_it(self):
        after = Story(episode=None, slot=None, boot="boot-2", boot_wall=BOOT_WALL + 500 * SECOND)
        after.say(1, "process", "started", process="daemon")
        after.say(2, "publish", "published", generation="g2", bytes=1000, config=config())
        late = Story(episode=None, slot=None).say(30, "publish", "published", generation="g3", bytes=7, config=config())
        books = Books().tell(self.weights(), after, late, now=602)
        assert books("weightcache_resident_byte_seconds_total", use="idle") == 100_000


class TestOpenRecovery:
    def test_deadline_moves_when_a_hit_turns_into_a_miss(self):
        books = Books().tell(recovery(), Story(episode="2" * 32).open(200), now=201)

        def left():
            fault = books("readmit_recovery_started_timestamp_seconds", slot="a")
            return books("readmit_recovery_deadline_timestamp_seconds", slot="a") - fault

        assert left() == THRESHOLDS_S["hit"]
        books.tell(Story(episode="2" * 32).lookup(202, "miss", reason="absent"), now=203)
        assert left() == THRESHOLDS_S["miss"]
        books.tell(Story(episode="2" * 32).close(300), now=301)
        assert left() == 0
        assert books("readmit_recovery_started_timestamp_seconds", slot="a") == 0

    def test_phase_and_when_it_began(self):
        books = Books().tell(Story().open(0).say(1, "attempt_start", attempt=1).phase("import", 2), now=5)
        phases = {phase: books("readmit_recovery_phase", slot="a", phase=phase) for phase in PHASES}
        assert [phase for phase, value in phases.items() if value] == ["import"]
        assert books("readmit_recovery_phase_started_timestamp_seconds", slot="a") == BOOT_WALL / 1e9 + 2
        assert books("readmit_recovery_attempts", slot="a") == 1

    def test_unready_seconds_do_not_fall_when_the_end_is_dated_back(self):
        books = Books().tell(Story().open(0), now=10)
        assert books("readmit_unready_seconds_total", slot="a") == 10
        books.tell(Story().close(9.5), now=11)
        assert books("readmit_unready_seconds_total", slot="a") == 10


class TestWorst:
    @given(st.lists(st.tuples(st.integers(0, 200_000), st.integers(1, 50)), max_size=60))
    def test_agrees_with_looking_at_everything(self, steps):
        worst, closed, now = Worst(), [], 0
        for pause, seconds in steps:
            now += pause
            worst.add(now * SECOND, seconds)
            closed.append((now, seconds))
            for window_s in WINDOWS_S.values():
                expected = max((one for at, one in closed if at >= now - window_s), default=0)
                assert worst.within(window_s, now * SECOND) == expected
