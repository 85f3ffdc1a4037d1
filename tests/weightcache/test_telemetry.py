"""The exporter as a whole: fed from a real journal, scraped over HTTP."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import urllib.request
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from tests.fixtures.story import Story, recovery

from weightcache.errors import ConfigError
from weightcache.journal import Journal, boottime_ns
from weightcache.telemetry import Telemetry

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def residents(**facts):
    empty = {"capacity": None, "resident_bytes": 0, "leases": 0, "generations": {}, "claims": [], "refused": {}}
    return SimpleNamespace(**{**empty, **facts})


@pytest.fixture
def journal(tmp_path):
    journal = Journal(tmp_path / "journal.sqlite3", checkpoints=True)
    yield journal
    journal.close()


@pytest.fixture
def telemetry(journal):
    telemetry = Telemetry(journal, residents(), "127.0.0.1:0", environ={})
    telemetry.start()
    yield telemetry
    telemetry.close()


def scrape(telemetry, accept="text/plain"):
    request = urllib.request.Request(f"http://127.0.0.1:{telemetry.port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request) as response:
        return response.read().decode()


def value(telemetry, name, **labels):
    return telemetry.registry.get_sample_value(name, labels)


def test_a_recovery_is_on_the_next_scrape(journal, telemetry):
    telemetry.step()
    assert value(telemetry, "readmit_recoveries_total", path="hit", outcome="ready") == 0
    recovery().tell(journal)
    telemetry.step()
    assert 'readmit_recoveries_total{outcome="ready",path="hit"} 1.0' in scrape(telemetry)


def test_an_exemplar_leads_from_the_bucket_to_the_trace(journal, telemetry):
    recovery(episode="ab" * 16).tell(journal)
    telemetry.step()
    families = {family.name: family for family in parse_openmetrics(scrape(telemetry, OPENMETRICS))}
    readiness = families["readmit_time_to_semantic_readiness_seconds"]
    exemplars = [sample.exemplar for sample in readiness.samples if sample.exemplar]
    assert [(exemplar.labels, exemplar.value) for exemplar in exemplars] == [({"trace_id": "ab" * 16}, 10)]


def test_a_scrape_waits_for_the_past(journal, telemetry, monkeypatch):
    """Half of the past, once exported, would make the other half look like something new."""
    monkeypatch.setattr("weightcache.telemetry.metrics._PATIENCE_S", 0.01)
    with pytest.raises(TimeoutError, match="replayed"):
        telemetry.registry.get_sample_value("readmit_recoveries_open")
    telemetry.step()
    assert value(telemetry, "readmit_recoveries_open") == 0


def test_promtool_finds_nothing_to_complain_about(journal, telemetry):
    recovery().tell(journal)
    telemetry.step()
    command = ["promtool", "check", "metrics"]
    result = subprocess.run(command, input=scrape(telemetry), capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout + result.stderr) == (0, "")


def test_two_steps_at_once_count_once(journal, telemetry):
    """A step that is still running when the daemon ends meets the last one."""
    for number in range(1, 200):
        recovery(episode=f"{number:032x}", slot=f"{number % 2}").tell(journal)
    threads = [threading.Thread(target=telemetry.step) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert value(telemetry, "readmit_recoveries_total", path="hit", outcome="ready") == 199


class TestRestart:
    def test_counters_go_on_where_they_were(self, journal, telemetry):
        for number in range(1, 4):
            recovery(episode=f"{number:032x}").tell(journal)
        Story(episode="f" * 32).open(0).tell(journal)
        for result in ("correct", "correct", "wrong"):
            journal.append("probe", result)
        telemetry.step()
        again = Telemetry(journal, residents(), environ={})
        again.step()
        mine, theirs = counters(telemetry), counters(again)
        assert mine == theirs
        assert mine["readmit_probes_total", (("result", "correct"),)] == 2
        again.close()

    def test_what_came_while_nobody_exported_is_caught_up(self, journal):
        first = Telemetry(journal, residents(), environ={})
        recovery(episode="1" * 32).tell(journal)
        first.step()
        first.close()
        recovery(episode="2" * 32).tell(journal)
        second = Telemetry(journal, residents(), environ={})
        second.step()
        assert value(second, "readmit_recoveries_total", path="hit", outcome="ready") == 2
        assert value(second, "readmit_spans_exported_total", sink="file") == 9, "spans of the second one only"
        second.close()

    def test_no_scrape_shows_less_than_one_before(self, journal, telemetry):
        """A scrape counts running time up to its own moment; the end that becomes known later may lie before that."""
        began = boottime_ns()
        Story(episode="f" * 32).open(0).tell(journal, began - 10_000_000_000)
        telemetry.step()
        recovery(episode="1" * 32, slot="b").tell(journal)
        telemetry.step()
        names = (
            "readmit_unready_seconds_total",
            "readmit_observed_seconds_total",
            "readmit_budget_burned_seconds_total",
        )
        shown = [value(telemetry, name, slot="a") for name in names]
        exported = value(telemetry, "readmit_spans_exported_total", sink="file")
        assert min(shown) >= 10
        assert exported > 0
        closing = Story(episode="f" * 32).say(0, "process", "exited", attempt=1, process="engine").close(0)
        closing.tell(journal, began - 5_000_000_000)
        again = Telemetry(journal, residents(), environ={})
        again.step()
        assert all(value(again, name, slot="a") >= before for name, before in zip(names, shown, strict=True))
        assert value(again, "readmit_spans_exported_total", sink="file") > exported
        again.close()

    def test_what_another_journal_s_daemon_showed_is_not_carried_on(self, journal, telemetry, tmp_path):
        Story().open(0).tell(journal, boottime_ns() - 1000_000_000_000)
        telemetry.step()
        assert value(telemetry, "readmit_unready_seconds_total", slot="a") >= 1000
        for file in tmp_path.glob("journal.sqlite3*"):
            if not file.name.endswith(".shown"):
                file.unlink()
        journal.close()
        fresh = Telemetry(journal, residents(), environ={})
        fresh.step()
        Story().open(0).tell(journal)
        fresh.step()
        assert value(fresh, "readmit_unready_seconds_total", slot="a") < 1000
        fresh.close()

    @pytest.mark.parametrize("harm", [b"", b"7", b"\xa5" * 100, b"0123456789abcdef {}"])
    def test_a_file_of_what_was_shown_that_is_damaged_is_not_used(self, journal, telemetry, harm):
        telemetry.step()
        journal.path.with_name("journal.sqlite3.shown").write_bytes(harm)
        again = Telemetry(journal, residents(), environ={})
        again.step()
        assert value(again, "readmit_recoveries_open") == 0
        again.close()


def counters(telemetry):
    return {
        (sample.name, tuple(sample.labels.items())): sample.value
        for family in telemetry.registry.collect()
        for sample in family.samples
        if sample.name.endswith(("_total", "_count", "_sum", "_bucket"))
        and not sample.name.startswith(("process_", "readmit_spans_", "readmit_observed_", "readmit_unready_"))
    }


class TestTrouble:
    def test_a_killed_engine_is_counted_and_has_spans(self, journal, telemetry, tmp_path):
        """A real process is SIGKILLed while it loads weights; a keeper notices and gives up."""
        episode, began = "d" * 32, boottime_ns()
        script = """
            import os, signal
            from weightcache.journal import Journal
            journal = Journal.from_environment()
            with journal.phase("load_weights"), journal.phase("load_weights.read"):
                os.kill(os.getpid(), signal.SIGKILL)
        """
        story = Story(episode=episode).open(0).say(0, "attempt_start", attempt=1)
        story.tell(journal, began)
        environment = {"READMIT_JOURNAL": str(journal.path), "READMIT_SLOT": "a", "READMIT_EPISODE": episode}
        engine = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script)],
            env={**os.environ, **environment, "READMIT_NODE": "node", "READMIT_ATTEMPT": "1"},
        )
        assert engine.wait() == -signal.SIGKILL
        telemetry.step()
        assert value(telemetry, "readmit_recovery_phase", slot="a", phase="load_weights") == 1
        assert value(telemetry, "readmit_recovery_started_timestamp_seconds", slot="a") > 0
        after = Story(episode=episode).say(60, "process", "exited", attempt=1, process="engine", signal=9)
        after.say(60, "attempt_end", "crashed", attempt=1, signal=9).close(61, "abandoned")
        after.tell(journal, began)
        telemetry.step()
        assert value(telemetry, "readmit_attempts_total", outcome="crashed") == 1
        assert value(telemetry, "readmit_recoveries_total", path="unknown", outcome="abandoned") == 1
        assert value(telemetry, "readmit_recoveries_late_total", path="unknown") == 1
        (line,) = (tmp_path / "spans.jsonl").read_text().splitlines()
        spans = {span["name"]: span for span in json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"]}
        lost = spans["load_weights"]
        assert lost["status"] == {"code": 2, "message": "process_lost"}
        assert lost["endTimeUnixNano"] == spans["attempt"]["endTimeUnixNano"]
        assert spans["load_weights.read"]["parentSpanId"] == lost["spanId"]

    def test_a_journal_that_is_held_up_shows(self, journal, telemetry):
        journal.append("clock")
        telemetry.step()
        holder = sqlite3.connect(journal.path, isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        journal.append("probe", "correct")
        telemetry.step()
        assert value(telemetry, "readmit_journal_degraded") == 1
        assert value(telemetry, "readmit_journal_spool_bytes") > 0
        assert value(telemetry, "readmit_probes_total", result="correct") == 0
        holder.execute("ROLLBACK")
        holder.close()
        telemetry.step()
        assert value(telemetry, "readmit_journal_degraded") == 0
        assert value(telemetry, "readmit_probes_total", result="correct") == 1

    def test_a_damaged_journal_is_set_aside_and_counters_stay(self, journal, telemetry, tmp_path):
        recovery().tell(journal)
        telemetry.step()
        journal.close()
        telemetry._journal.close()
        journal.path.write_bytes(b"\xa5" * journal.path.stat().st_size)
        telemetry.step()
        assert list(tmp_path.glob("journal.sqlite3.damaged-*"))
        assert value(telemetry, "readmit_journal_salvages_total") == 1
        assert value(telemetry, "readmit_recoveries_total", path="hit", outcome="ready") == 1
        recovery(episode="2" * 32).tell(journal)
        telemetry.step()
        assert value(telemetry, "readmit_recoveries_total", path="hit", outcome="ready") == 2

    def test_a_journal_of_a_newer_release_stops_nothing_else(self, journal, telemetry):
        journal.append("clock")
        with sqlite3.connect(journal.path) as connection:
            connection.execute("PRAGMA user_version=99")
        telemetry.step()
        assert value(telemetry, "readmit_journal_degraded") == 1
        assert value(telemetry, "weightcache_resident_bytes") == 0

    def test_a_journal_that_cannot_be_read_leaves_what_is_known_without_it(self, tmp_path, caplog):
        (tmp_path / "journal.sqlite3").mkdir()
        telemetry = Telemetry(Journal(tmp_path / "journal.sqlite3"), residents(resident_bytes=7), environ={})
        telemetry.step()
        assert value(telemetry, "readmit_journal_degraded") == 1
        assert value(telemetry, "weightcache_resident_bytes") == 7
        assert value(telemetry, "readmit_slo_threshold_seconds", path="hit") == 60
        assert value(telemetry, "readmit_recoveries_started_total", cause="crash") is None, "0 would be a lie"
        assert "READMIT_JOURNAL" in caplog.text
        (tmp_path / "journal.sqlite3").rmdir()
        telemetry.step()
        assert value(telemetry, "readmit_recoveries_started_total", cause="crash") == 0
        assert value(telemetry, "readmit_journal_degraded") == 0
        telemetry.close()

    def test_an_address_that_is_taken_is_said(self, journal, telemetry):
        with pytest.raises(ConfigError, match="cannot be served") as caught:
            Telemetry(journal, residents(), f"127.0.0.1:{telemetry.port}").start()
        assert "--metrics" in caught.value.remedy


def test_registers_nothing_globally(journal, telemetry):
    telemetry.step()
    before = {family.name for family in REGISTRY.collect()}
    other = Telemetry(journal, residents(), "127.0.0.1:0", environ={})
    other.start()
    other.step()
    assert scrape(other).count("weightcache_resident_bytes") == scrape(telemetry).count("weightcache_resident_bytes")
    assert {family.name for family in REGISTRY.collect()} == before
    other.close()


def test_resident_memory_stays_small(journal):
    """The daemon has 45 MiB; asyncio, msgspec and telemetry with a history must leave it room."""
    for number in range(1, 50):
        recovery(episode=f"{number:032x}").tell(journal)
    script = """
        import asyncio, sys, types
        import msgspec
        from pathlib import Path
        from weightcache.journal import Journal
        from weightcache.telemetry import Telemetry
        empty = {"generations": {}, "claims": [], "refused": {}}
        residents = types.SimpleNamespace(capacity=None, resident_bytes=0, leases=0, **empty)
        telemetry = Telemetry(Journal(Path(sys.argv[1]), checkpoints=True), residents, "127.0.0.1:0", environ={})
        telemetry.start()
        telemetry.step()
        telemetry.registry.get_sample_value("readmit_recoveries_open")
        print(Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0])
        telemetry.close()
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(journal.path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(result.stdout) < 40 * 1024
