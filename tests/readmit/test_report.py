"""The report: figures by path, reasons with remedies, and what it refuses to say."""

import json

import pytest
from rich.console import Console
from tests.fixtures.story import SECOND, Story
from tests.readmit.forked import forks

from readmit.commands.report import show
from readmit.quantiles import needed, tell
from readmit.remedies import REMEDIES
from readmit.report import build
from weightcache.journal import Journal, boottime_ns
from weightcache.vocabulary import MISS_REASONS

WARM = {"page_cache": "warm", "compile_cache": "warm", "kernel_cache": "warm", "resident": False}


@pytest.fixture
def journal(tmp_path):
    journal = Journal(tmp_path / "journal.sqlite3")
    yield journal
    journal.close()


def ago(seconds):
    return boottime_ns() - round(seconds * SECOND)


def hit(journal, number, state=WARM, at=9000.0):
    story = Story(episode=f"{number:032x}").open(0).say(0, "attempt_start", attempt=1, starting_state=state)
    story.phase("import", 0, 6).phase("load_weights", 6, 8).phase("load_weights.map", 6, 7).lookup(6, "hit")
    story.phase("semantic_verify", 9, 10).say(10, "attempt_end", "ready", attempt=1).close(10, verified=True)
    story.tell(journal, ago(at - 20 * number))


def miss(journal, number, state=WARM, at=5000.0, **facts):
    story = Story(slot="b", episode=f"{number:032x}").open(0).say(0, "attempt_start", attempt=1, starting_state=state)
    story.phase("import", 0, 6).phase("load_weights", 6, 98).lookup(6, "miss", **{"reason": "absent", **facts})
    story.phase("semantic_verify", 99, 100).say(100, "attempt_end", "ready", attempt=1).close(100, verified=True)
    story.tell(journal, ago(at - 120 * (number % 100)))


def text_of(report):
    console = Console(width=140, record=True, force_terminal=False)
    with console.capture() as captured:
        show(report, console)
    return captured.get()


class TestFigures:
    def test_hits_and_misses_stay_apart(self, journal):
        for number in range(1, 4):
            hit(journal, number)
        miss(journal, 101)
        report = build(journal)
        by_path = {path.path: path for path in report.paths}
        assert [path.path for path in report.paths] == ["hit", "miss"]
        assert (by_path["hit"].closed, by_path["hit"].worst_s) == (3, 10)
        assert (by_path["miss"].closed, by_path["miss"].worst_s) == (1, 100)
        assert (report.mapped, report.tried, report.hits, report.misses) == (3, 4, 3, 1)

    def test_phases_of_a_group_add_up_to_its_total(self, journal):
        for number in range(1, 4):
            hit(journal, number)
        (group,) = build(journal).groups
        assert (group.n, group.total_s) == (3, 10)
        assert sum(group.phases.values()) == pytest.approx(10)
        assert group.parts == {"load_weights.map": 1}

    def test_a_few_recoveries_have_a_worst_but_no_quantile(self, journal):
        for number in range(1, 8):
            hit(journal, number)
        (path,) = build(journal).paths
        assert path.quantiles["p95"] == "insufficient data (n=7, need 59)"
        assert path.quantiles["p50"] == 10
        assert path.worst_s == 10

    def test_an_open_recovery_counts_with_its_age(self, journal):
        Story().open(0).lookup(3, "miss", reason="absent").tell(journal, ago(700))
        report = build(journal)
        (path,), (open_,) = report.paths, report.open
        assert (path.path, path.open, path.closed, path.late) == ("miss", 1, 0, 1)
        assert path.worst_s >= 700
        assert open_.late

    def test_unverified_recoveries_are_in_no_quantile(self, journal):
        for number in range(1, 8):
            Story(episode=f"{number:032x}").open(0).close(5, verified=False).tell(journal, ago(100 - number * 6))
        (path,) = build(journal).paths
        assert path.unverified == 7
        assert path.quantiles["p50"] == "insufficient data (n=0, need 5)"

    def test_since_and_slot_select(self, journal):
        hit(journal, 1, at=9000)
        miss(journal, 101, at=400)
        import time

        assert [path.path for path in build(journal, since_ns=time.time_ns() - 1000 * SECOND).paths] == ["miss"]
        assert [path.path for path in build(journal, slot="a").paths] == ["hit"]

    def test_two_clocks(self, journal):
        """A standby makes the outage short and the recovery no shorter."""
        Story(slot="a", episode="1" * 32).open(0).close(10).tell(journal, ago(1000))
        Story(slot="b", episode="2" * 32).open(0).close(10).tell(journal, ago(1000))
        Story(slot="a", episode="3" * 32).open(0).close(500).tell(journal, ago(900))
        report = build(journal)
        assert (report.outages, report.outage_s) == (1, pytest.approx(10, abs=0.1))
        assert {slot.slot: round(slot.unready_s) for slot in report.slots} == {"a": 510, "b": 10}


class TestReasons:
    def test_each_has_a_remedy_from_the_journal_or_from_the_list(self, journal):
        miss(journal, 101, reason="fingerprint", detail="dtype", remedy="Do this", message="differs in dtype")
        miss(journal, 102, reason="no_daemon")
        first, second = build(journal).reasons
        assert (first.reason, first.detail, first.remedy, first.message) == (
            "fingerprint",
            "dtype",
            "Do this",
            "differs in dtype",
        )
        assert (second.reason, second.remedy, second.recoveries) == ("no_daemon", REMEDIES["no_daemon"], 1)

    def test_the_list_is_complete(self):
        assert tuple(REMEDIES) == MISS_REASONS


class TestAmdahl:
    def test_from_equal_starting_states(self, journal):
        hit(journal, 1)
        miss(journal, 101)
        report = build(journal)
        assert report.refused == []
        assert report.amdahl.fraction == pytest.approx(0.92)
        assert report.amdahl.factor == pytest.approx(46)
        assert report.amdahl.measured == pytest.approx(10)
        assert report.amdahl.next_phase == "import"

    def test_refused_across_different_ones_which_are_named(self, journal):
        hit(journal, 1)
        miss(journal, 101, {**WARM, "page_cache": "cold"})
        report = build(journal)
        assert report.amdahl is None
        assert report.refused == ["page_cache: cold / warm"]
        assert "No speed-up is given: page_cache: cold / warm." in text_of(report)

    def test_refused_where_nothing_was_recorded(self, journal):
        hit(journal, 1, None)
        miss(journal, 101, None)
        assert build(journal).amdahl is None

    def test_a_comparable_pair_is_preferred_to_a_larger_one(self, journal):
        hit(journal, 1)
        for number in range(101, 104):
            miss(journal, number, {**WARM, "page_cache": "cold"})
        miss(journal, 104)
        report = build(journal)
        assert report.amdahl is not None
        assert len(report.groups) == 3

    def test_refused_while_one_side_is_missing(self, journal):
        miss(journal, 101)
        assert build(journal).refused == ["no recovery by hit has been measured yet"]


def test_last_words_of_dead_engines_are_found(journal, tmp_path):
    output = tmp_path / "output"
    output.mkdir()
    story = Story(episode="ab" * 16).open(0).say(0, "attempt_start", attempt=1)
    story.say(3, "process", "exited", attempt=1, process="engine", pid=7, signal=9)
    story.say(3, "attempt_end", "crashed", attempt=1, signal=9).say(4, "attempt_start", attempt=2)
    story.tell(journal, ago(60))
    tail = output / "a-abababab-1.log.tail"
    tail.write_text("out of memory\n")
    (dead,) = build(journal, output=output).dead
    assert (dead.attempt, dead.signal, dead.output) == (1, 9, str(tail))
    shown = text_of(build(journal, output=output)).replace("\n", "")
    assert f"last words in {output}" in shown
    assert tail.name in shown


def test_what_to_do_about_a_miss_is_said_once(journal):
    miss(journal, 101, message="no weights are resident: expected some. Load it.", remedy="Load it")
    assert text_of(build(journal)).count("Load it") == 1


class TestQuantiles:
    @pytest.mark.parametrize(("quantile", "least"), [(0.9, 29), (0.95, 59), (0.99, 299)])
    def test_needed(self, quantile, least):
        assert needed(quantile) == least

    def test_nearest_rank(self):
        assert tell(range(1, 101), 0.95) == 95
        assert tell([3.0, 1.0, 2.0, 5.0, 4.0], 0.5) == 3.0


class TestCommand:
    def run(self, journal, *arguments):
        if not journal.path.exists():
            journal.path.parent.mkdir(exist_ok=True)
        env = {"READMIT_JOURNAL": str(journal.path), "PATH": "/usr/bin", "COLUMNS": "140", "HOME": "/nonexistent"}
        return forks().readmit("report", *arguments, env=env, cwd=journal.path.parent)

    def test_table_and_json_tell_the_same(self, journal):
        for number in range(1, 4):
            hit(journal, number)
        miss(journal, 101, reason="fingerprint", detail="dtype")
        Story(slot="c", episode="c" * 32).open(0).phase("import", 1).tell(journal, ago(30))
        table, facts = self.run(journal), self.run(journal, "--json", "--since", "1d")
        assert table.returncode == facts.returncode == 0, table.stderr + facts.stderr
        for said in ("fingerprint / dtype", "3 of 4 recoveries", "10.00 measured", "Open now", "needs 59"):
            assert said in table.stdout
        told = json.loads(facts.stdout)
        assert told["started"] == 5
        assert told["amdahl"]["measured"] == pytest.approx(10)

    def test_without_a_journal_it_says_what_to_do(self, journal):
        result = self.run(journal)
        assert result.returncode == 2
        assert "READMIT_JOURNAL" in result.stderr

    def test_a_damaged_journal_is_no_traceback(self, journal):
        journal.path.write_bytes(b"no database, but long enough to be looked at as one" * 50)
        result = self.run(journal)
        assert result.returncode == 2
        assert "cannot be read" in result.stderr
        assert "Traceback" not in result.stderr
