"""The journal: what is written stays, whoever dies; what cannot be written delays nobody."""

import os
import random
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from weightcache.episodes import Replay
from weightcache.errors import ConfigError
from weightcache.journal import SCHEMA_VERSION, Context, Journal, new_episode_id, span_id

JOURNALS = Path(__file__).with_name("journals")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal.sqlite3"


def python(script, *arguments, **options) -> subprocess.Popen:
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)


class TestAppend:
    def test_what_is_written_is_read(self, path):
        journal = Journal(path, Context("node", "a", "e" * 32, 2, 1))
        journal.append("lookup", "miss", {"reason": "fingerprint", "detail": "dtype"})
        (event,) = journal.events()
        assert event[4:] == (
            "node",
            "a",
            "e" * 32,
            2,
            1,
            "lookup",
            "miss",
            {"reason": "fingerprint", "detail": "dtype"},
        )
        assert journal.last_id() == event.id

    def test_a_phase_that_fails_says_so(self, path):
        journal = Journal(path)
        with pytest.raises(KeyError), journal.phase("load_weights"):
            raise KeyError("x")
        assert [(event.kind, event.attributes) for event in journal.events()] == [
            ("phase_begin", {}),
            ("phase_end", {"error": "KeyError"}),
        ]

    def test_an_earlier_time_moves_both_clocks(self, path):
        journal = Journal(path)
        journal.append("process", "exited")
        (now,) = journal.events()
        journal.append("process", "exited", at_ns=now.boottime_ns - 5_000_000_000)
        earlier = journal.events()[1]
        assert now.boottime_ns - earlier.boottime_ns == 5_000_000_000
        assert abs(now.wall_ns - earlier.wall_ns - 5_000_000_000) < 5_000_000_000

    def test_a_kind_off_the_list_is_refused(self, path):
        with pytest.raises(ValueError, match="not one of"):
            Journal(path).append("recovery")

    def test_without_a_path_only_times(self):
        journal = Journal(None)
        with journal.phase("import") as timing:
            pass
        assert timing.seconds >= 0
        assert (journal.events(), journal.last_id(), journal.merge_spools(), journal.spool_bytes()) == ([], 0, 0, 0)


def test_context_travels_by_environment():
    context = Context("node", "a", new_episode_id(), 3, 1)
    environment = context.to_environment()
    assert Context.from_environment(environment) == context
    assert environment["TRACEPARENT"] == f"00-{context.episode}-{span_id(context.episode, 'attempt', 3)}-01"


@pytest.mark.parametrize("name", ["READMIT_ATTEMPT", "READMIT_RANK"])
@pytest.mark.parametrize("text", ["x", "-1", "1.0", " "])
def test_a_context_that_is_none(name, text):
    with pytest.raises(ConfigError, match=f"{name} is no number: expected 0, 1, 2, ..., found {text}. Unset {name}"):
        Context.from_environment({name: text})


class TestKilledWriters:
    def test_every_write_that_returned_is_there(self, path):
        """Writers are SIGKILLed at random moments; each prints a number after its append returned."""
        script = """
            import sys
            from pathlib import Path
            from weightcache.journal import Context, Journal
            journal = Journal(Path(sys.argv[1]), Context("node", slot=sys.argv[2]))
            for number in range(1, 1_000_000):
                journal.append("probe", "correct", {"number": number})
                print(number, flush=True)
        """
        said = {}
        for round_ in range(6):
            writers = {f"{round_}-{name}": python(script, path, f"{round_}-{name}") for name in "ab"}
            for writer in writers.values():
                assert writer.stdout.readline()
            time.sleep(random.uniform(0.01, 0.1))
            for slot, writer in writers.items():
                writer.kill()
                said[slot] = int(["1", *writer.communicate()[0].split()][-1])
        journal = Journal(path, checkpoints=True)
        journal.merge_spools()
        written = {}
        for event in journal.events():
            written.setdefault(event.slot, []).append(event.attributes["number"])
        for slot, last in said.items():
            assert sorted(written[slot])[:last] == list(range(1, last + 1))
            assert len(written[slot]) - last in (0, 1)  # one may have been written and not said
        assert sqlite3.connect(path).execute("PRAGMA integrity_check").fetchone() == ("ok",)

    def test_killed_between_any_two_writes_the_books_balance(self, path):
        """One recovery after the other is killed after its n-th write; the next start sees it open and goes on."""
        script = """
            import os, signal, sys
            from pathlib import Path
            from weightcache.journal import Context, Journal
            journal = Journal(Path(sys.argv[1]), Context("node", "a", sys.argv[3], 1))
            events = [("episode_open", "crash", {}), ("attempt_start", "", {}),
                      ("phase_begin", "load_weights", {}), ("lookup", "miss", {"reason": "absent"}),
                      ("phase_end", "load_weights", {}),
                      ("attempt_end", "ready", {}), ("episode_close", "ready", {})]
            for event in events[:int(sys.argv[2])]:
                journal.append(*event)
            os.kill(os.getpid(), signal.SIGKILL)
        """
        journal, replay = Journal(path), Replay()
        for writes in range(1, 8):
            episode_id = new_episode_id()
            writer = python(script, path, writes, episode_id)
            assert writer.wait() == -signal.SIGKILL
            replay.catch_up(journal)
            assert replay.started == writes
            assert replay.started == replay.closed + len(replay.open_episodes)
            episode = replay.episode(episode_id)
            assert episode.is_open == (writes < 7)
            assert sum(episode.phases_s().values()) == pytest.approx(episode.total_s)
            assert episode.path == ("miss" if writes >= 4 else "unknown")
        again = Replay()
        again.catch_up(journal)
        assert list(map(facts, again.episodes)) == list(map(facts, replay.episodes))


def _without_space(rows):
    return ["".join(text.split()) for (text,) in rows]


def facts(episode):
    return episode.id, episode.outcome, episode.path, episode.reason, episode.total_s, episode.fault_ns


class TestFork:
    def test_both_sides_write(self, path):
        journal = Journal(path)
        journal.append("clock", "before")
        child = os.fork()
        if child == 0:
            for _ in range(100):
                journal.append("clock", "child")
            os._exit(0)
        for _ in range(100):
            journal.append("clock", "parent")
        assert os.waitpid(child, 0)[1] == 0
        journal.append("clock", "after")
        journal.merge_spools()
        names = [event.name for event in journal.events()]
        assert [names.count(name) for name in ("before", "child", "parent", "after")] == [1, 100, 100, 1]
        assert sqlite3.connect(path).execute("PRAGMA integrity_check").fetchone() == ("ok",)

    def test_a_lock_held_by_another_thread_stays_behind(self, path):
        journal = Journal(path)
        journal.append("clock", "before")
        held, release = threading.Event(), threading.Event()

        def hold():
            with journal._guard():
                held.set()
                release.wait()

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            journal.append("clock", "child")
            os._exit(0 if journal.spooled == 0 else 1)
        assert os.waitpid(child, 0)[1] == 0
        release.set()
        thread.join()
        assert [event.name for event in journal.events()] == ["before", "child"]


class TestFile:
    def test_a_newer_schema_is_neither_read_nor_written(self, path):
        Journal(path).append("clock", "old")
        connection = sqlite3.connect(path)
        connection.execute(f"PRAGMA user_version={SCHEMA_VERSION + 1}")
        connection.close()
        journal = Journal(path)
        with pytest.raises(ConfigError, match="newer version") as caught:
            journal.events()
        assert caught.value.remedy
        journal.append("clock", "kept")
        assert (journal.spooled, journal.lost) == (1, 0)

    def test_an_older_schema_is_brought_up_to_date(self, path):
        journal = Journal(path)
        journal.append("clock", "old")
        journal.close()
        connection = sqlite3.connect(path)
        connection.execute("DROP TABLE merged")
        connection.execute("PRAGMA user_version=1")
        connection.close()
        journal.append("clock", "new")
        assert [event.name for event in journal.events()] == ["old", "new"]
        assert sqlite3.connect(path).execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)

    @pytest.mark.parametrize("version", range(1, SCHEMA_VERSION + 1))
    def test_a_journal_of_every_schema_is_read_written_and_migrated(self, path, version):
        """One file of each is kept as that release would have written it; a new schema needs a new file."""
        connection = sqlite3.connect(path)
        connection.executescript(JOURNALS.joinpath(f"schema-{version}.sql").read_text())
        connection.close()
        replay = Replay()
        replay.catch_up(Journal(path))
        assert [(it.outcome, it.path, it.total_s) for it in replay.episodes] == [("ready", "hit", 10)]
        Journal(path).append("clock", "new")
        assert [event.name for event in Journal(path).events()][-1] == "new"
        migrated = sqlite3.connect(path)
        assert migrated.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
        tables = "SELECT sql FROM sqlite_master WHERE name IN ('events', 'merged', 'events_by_slot') ORDER BY name"
        fresh = path.with_name("fresh.sqlite3")
        Journal(fresh).append("clock")
        assert _without_space(migrated.execute(tables)) == _without_space(sqlite3.connect(fresh).execute(tables))

    def test_many_start_at_once_on_a_new_file(self, path):
        script = """
            import sys
            from pathlib import Path
            from weightcache.journal import Journal
            sys.stdin.read()
            Journal(Path(sys.argv[1])).append("clock", sys.argv[2])
        """
        starters = [python(script, path, name, stdin=subprocess.PIPE) for name in range(6)]
        for starter in starters:
            starter.stdin.close()
        assert [starter.wait() for starter in starters] == [0] * 6
        journal = Journal(path)
        journal.merge_spools()
        assert {event.name for event in journal.events()} == {str(name) for name in range(6)}

    def test_a_wal_that_was_moved_into_the_database_does_not_stay_large(self, path):
        journal = Journal(path, checkpoints=True)
        wal = path.with_name("journal.sqlite3-wal")
        while not wal.exists() or wal.stat().st_size < 5 << 20:
            journal.append("clock", attributes={"padding": "x" * 100_000})
        journal.checkpoint()
        journal.append("clock")
        assert wal.stat().st_size <= 1 << 20

    def test_a_file_taken_away_is_noticed(self, path):
        journal = Journal(path)
        journal.append("clock", "lost")
        for file in path.parent.glob("journal.sqlite3*"):
            file.unlink()
        journal.append("clock", "found")
        assert [event.name for event in Journal(path).events()] == ["found"]
