"""The spool: where events go when the database does not take them in time, and how they come back exactly once."""

import fcntl
import json
import os
import select
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from weightcache.journal import BUSY_LIMIT_S, Context, Journal
from weightcache.journal.spool import Spool


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal.sqlite3"


@pytest.fixture
def stopped_writer(path):
    """A process that is SIGSTOPped inside a transaction on the journal."""
    Journal(path).append("clock", "first")
    script = f"""
        import sqlite3, sys
        connection = sqlite3.connect({str(path)!r}, isolation_level=None)
        connection.execute("BEGIN IMMEDIATE")
        print("inside", flush=True)
        sys.stdin.read()
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert writer.stdout.readline() == "inside\n"
    writer.send_signal(signal.SIGSTOP)
    yield writer
    writer.kill()
    writer.communicate()


def names(journal):
    return [event.name for event in journal.events()]


class TestStoppedWriter:
    def test_delays_a_recovery_by_one_limit(self, path, stopped_writer, monkeypatch):
        """Not by one limit for each event: a database that was busy is left alone for a while."""
        journal, tries = Journal(path), []
        connect = journal._connect
        monkeypatch.setattr(journal, "_connect", lambda: tries.append(1) or connect())
        for number in range(20):
            journal.append("clock", str(number))
        assert journal.spooled == 20
        assert len(tries) == 1
        assert names(Journal(path)) == ["first"]

    def test_is_waited_for_no_longer_than_the_limit(self, path, stopped_writer):
        (limit_ms,) = Journal(path)._connect().execute("PRAGMA busy_timeout").fetchone()
        assert limit_ms == BUSY_LIMIT_S * 1000

    def test_its_victims_are_merged_exactly_once(self, path, stopped_writer):
        one, other = Journal(path, Context("node", "a")), Journal(path, Context("node", "b"))
        for number in range(10):
            one.append("clock", f"{2 * number}")
            other.append("clock", f"{2 * number + 1}")
        reader = Journal(path)
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            reader.merge_spools()
        assert reader.spool_bytes() > 0
        stopped_writer.kill()
        stopped_writer.wait()
        assert reader.merge_spools() == 20
        assert reader.merge_spools() == 0
        assert reader.spool_bytes() == 0
        assert names(reader) == ["first", *map(str, range(20))], "merged in order of time, across files"

    def test_the_end_of_an_episode_is_written_after_what_was_spooled_before_it(self, path, stopped_writer):
        engine, gate = Journal(path, Context("node", "a", "e" * 32)), Journal(path, Context("node", "a", "e" * 32))
        engine.append("lookup", "miss", {"reason": "absent"})
        assert engine.spooled == 1
        stopped_writer.kill()
        stopped_writer.wait()
        gate.append("episode_close", "ready")
        assert names(gate) == ["first", "miss", "ready"]


class TestMerge:
    def spooled(self, path, count=3):
        spool = Spool(path.with_name("journal.sqlite3.spool"))
        for number in range(count):
            spool.write(("boot", number, number, "node", None, None, None, None, "clock", str(number), "{}"))
        return spool

    def test_killed_between_commit_and_removal_merges_nothing_twice(self, path, monkeypatch):
        spool, journal = self.spooled(path), Journal(path)
        with monkeypatch.context() as patch:
            patch.setattr("pathlib.Path.unlink", lambda self: (_ for _ in ()).throw(InterruptedError("killed")))
            with pytest.raises(InterruptedError):
                journal.merge_spools()
        assert names(journal) == ["0", "1", "2"]
        spool.write(("boot", 3, 3, "node", None, None, None, None, "clock", "3", "{}"))  # its writer lives on
        assert journal.merge_spools() == 1
        assert names(journal) == ["0", "1", "2", "3"]

    def test_a_torn_last_line_was_never_said(self, path):
        spool, journal = self.spooled(path), Journal(path)
        with open(next(spool.folder.glob("*.jsonl")), "ab") as file:
            file.write(b'["boot", 1, 1, "no')
        assert journal.merge_spools() == 3
        assert journal.spool_bytes() == 0

    def test_a_damaged_line_costs_only_itself_and_is_kept(self, path):
        spool, journal = self.spooled(path), Journal(path)
        (file,) = spool.folder.glob("*.jsonl")
        first, rest = file.read_bytes().split(b"\n", 1)
        file.write_bytes(b"\n".join([first, b"\0" * 40, b'["short"]', b"[" + b"null," * 10 + b"null]", rest]))
        assert journal.merge_spools() == 3
        assert [kept.suffix for kept in spool.folder.iterdir()] == [".damaged"]
        assert journal.spool_bytes() == 0

    def test_nobody_waits_for_a_lock_whose_holder_is_stopped(self, path):
        spool, journal = self.spooled(path), Journal(path)
        (file,) = spool.folder.glob("*.jsonl")
        with open(file, "rb") as holder:
            fcntl.flock(holder, fcntl.LOCK_EX)
            assert journal.merge_spools() == 0
            spool.write(("boot", 3, 3, "node", None, None, None, None, "clock", "3", "{}"))
            assert journal.merge_spools() == 1
        assert journal.merge_spools() == 3


def test_a_forked_child_has_a_spool_file_of_its_own(path):
    spool = TestMerge().spooled(path, 1)
    child = os.fork()
    if child == 0:
        spool.write(("boot", 9, 9, "node", None, None, None, None, "clock", "child", "{}"))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(spool.folder.glob("*.jsonl"))) == 2
    journal = Journal(path)
    assert journal.merge_spools() == 2


class TestFullDisk:
    """On a file system of 256 KiB, mounted in a mount namespace of its own."""

    def run(self, tmp_path, script):
        preamble = f"""
            import errno, json, os, subprocess, sys
            from pathlib import Path
            from weightcache.journal import Journal, log
            disk = Path({str(tmp_path)!r}) / "disk"
            disk.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], check=True)
            journal = Journal(disk / "journal.sqlite3")
            def fill():
                with open(disk / "ballast", "ab", buffering=0) as ballast:
                    for size in (4096, 1):
                        try:
                            while ballast.write(bytes(size)):
                                pass
                        except OSError as error:
                            assert error.errno == errno.ENOSPC
        """
        namespace = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]
        command = [*namespace, sys.executable, "-c", textwrap.dedent(preamble) + textwrap.dedent(script)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout), result.stderr

    def test_takes_what_fits_counts_the_rest_and_goes_on_when_there_is_room(self, tmp_path):
        (said, kept, lost, names_), stderr = self.run(
            tmp_path,
            """
            log._WAITING_MOST = 100
            journal.append("clock", "before")
            fill()
            for number in range(3000):
                journal.append("probe", "correct", {"padding": "x" * 200})
            lost = journal.lost
            (disk / "ballast").unlink()
            journal.close()
            merged = journal.merge_spools()
            journal._left_alone_until_ns = 0
            journal.append("clock", "after")
            events = journal.events()
            print(json.dumps([3000, len(events) - 2, lost, [events[0].name, events[-1].name]]))
            """,
        )
        assert names_ == ["before", "after"]
        assert lost > 0
        assert kept + lost == said, "every event is either in the journal or counted as lost"
        assert stderr.count("takes no events") == 1

    def test_what_does_not_fit_waits_in_memory_and_comes_in_order(self, tmp_path):
        (names_, waiting, lost), _ = self.run(
            tmp_path,
            """
            journal.append("clock", "before")
            fill()
            said = 0
            while not journal.waiting:
                said += 1
                journal.append("probe", "spooled", {"padding": "x" * 200})
            for name in ("first", "second"):
                journal.append("slot_state", name)
            if os.fork() == 0:
                journal.append("clock", "child")
                os._exit(len(journal.waiting))
            waiting = [len(journal.waiting) - 2, os.waitstatus_to_exitcode(os.wait()[1])]
            (disk / "ballast").unlink()
            journal._left_alone_until_ns = 0
            journal.flush()
            journal.append("clock", "after")
            names = [event.name for event in journal.events() if event.name != "spooled"]
            print(json.dumps([names, waiting, journal.lost]))
            """,
        )
        assert names_ == ["before", "first", "second", "after"]
        assert waiting == [1, 1], "each process says what is its own"
        assert lost == 0

    def test_a_log_on_the_same_disk_ends_nobody(self, tmp_path):
        (names_, lost), _ = self.run(
            tmp_path,
            """
            fill()
            sys.stderr = open("/dev/full", "w", buffering=1)
            journal.append("clock", "first")
            journal.append("clock", "second")
            (disk / "ballast").unlink()
            journal._left_alone_until_ns = 0
            journal.append("clock", "after")
            print(json.dumps([[event.name for event in journal.events()], journal.lost]))
            os._exit(sys.stdout.flush() or 0)
            """,
        )
        assert (names_, lost) == (["first", "second", "after"], 0)

    def test_read_only(self, tmp_path):
        (names_, lost), stderr = self.run(
            tmp_path,
            """
            journal.append("clock", "before")
            journal.close()
            subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
            journal.append("clock", "refused")
            subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
            journal._left_alone_until_ns = 0
            journal.append("clock", "after")
            print(json.dumps([[event.name for event in journal.events()], journal.lost]))
            """,
        )
        assert (names_, lost) == (["before", "refused", "after"], 0)
        assert "takes no events" in stderr
        assert "Read-only file system" in stderr, "the reason"
        assert "Make room there" in stderr, "and what to do"


def until_held(pid):
    """Wait until strace holds a process in a call, and not only in passing."""
    held, deadline = 0, time.monotonic() + 60
    while held < 20:
        assert time.monotonic() < deadline
        held = held + 1 if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "t" else 0
        time.sleep(0.01)


class TestSlowDisk:
    """A disk that is kept busy by the weights that are read: every sync of the one process that moves the WAL hangs."""

    def test_a_checkpoint_that_hangs_holds_up_no_writer(self, path):
        journal = Journal(path, Context("node", "a"))
        journal.append("clock", "first")
        script = """
            import sys
            from pathlib import Path
            from weightcache.journal import Journal, log
            log._WAL_LIMIT_BYTES = 1
            journal = Journal(Path(sys.argv[1]), checkpoints=True)
            journal.append("clock", "second")
            print("begins", flush=True)
            journal.checkpoint()
            print("ended", flush=True)
        """
        slow = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", "trace=fsync,fdatasync"]
        slow += ["-e", "inject=fsync,fdatasync:delay_enter=20000000"]
        command = [*slow, sys.executable, "-c", textwrap.dedent(script), str(path)]
        daemon = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert daemon.stdout.readline() == "begins\n"
        until_held(int(Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children").read_text()))
        for number in range(200):
            journal.append("clock", str(number))
        assert select.select([daemon.stdout], [], [], 0)[0] == [], "the checkpoint is still in the middle of it"
        daemon.kill()
        daemon.communicate()
        assert (journal.spooled, journal.lost) == (0, 0)
        assert names(Journal(path)) == ["first", "second", *map(str, range(200))]
