"""A damaged journal is set aside; what can be read of it goes on."""

import sqlite3

import pytest

from weightcache.episodes import Replay
from weightcache.journal import Context, Journal
from weightcache.journal.database import is_damage


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal.sqlite3"


def write(path, count):
    journal = Journal(path, Context("node", "a"), checkpoints=True)
    for number in range(count):
        journal.append("probe", "correct", {"number": number})
    journal.close()  # the last connection moves the WAL into the file


def damage(path, page, count=1):
    with open(path, "r+b") as file:
        file.seek(page * 4096)
        file.write(b"\xa5" * 4096 * count)


def read_until_damage(journal):
    with pytest.raises(sqlite3.DatabaseError) as caught:
        journal.events()
    assert is_damage(caught.value)


def test_a_broken_page_costs_only_what_was_on_it(path):
    write(path, 3000)
    pages = path.stat().st_size // 4096
    damage(path, pages // 2)
    journal = Journal(path, Context("node", "a"), checkpoints=True)
    read_until_damage(journal)
    aside = journal.salvage()
    numbers = [event.attributes["number"] for event in journal.events()]
    assert 2900 < len(numbers) < 3000
    assert numbers == sorted(set(numbers))
    assert aside.exists()
    assert sqlite3.connect(path).execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_ids_go_on_so_that_no_reader_misses_or_repeats(path):
    write(path, 50)
    journal = Journal(path, Context("node", "a"), checkpoints=True)
    replay = Replay()
    replay.catch_up(journal)
    journal.close()
    damage(path, 0, count=path.stat().st_size // 4096)
    with pytest.raises(sqlite3.DatabaseError):
        journal.events()
    journal.salvage(replay.position)
    assert journal.events() == []
    journal.append("clock", "new")
    assert [event.name for event in journal.events(replay.position)] == ["new"]


def test_other_processes_notice_the_new_file(path):
    write(path, 50)
    other = Journal(path, Context("node", "b"))
    other.append("clock", "to the old file")
    daemon = Journal(path, checkpoints=True)
    daemon.salvage()
    other.append("clock", "to the new file")
    assert [event.name for event in daemon.query("WHERE kind = 'clock' ORDER BY id")] == [
        "to the old file",
        "to the new file",
    ]


def test_a_damaged_file_sends_writers_to_the_spool(path):
    path.write_bytes(b"this is no database, and long enough to be taken for one" * 100)
    journal = Journal(path, Context("node", "a"), checkpoints=True)
    journal.append("clock", "kept")
    assert (journal.spooled, journal.lost) == (1, 0)
    with pytest.raises(sqlite3.DatabaseError) as caught:
        journal.merge_spools()
    assert is_damage(caught.value)
    journal.salvage()
    assert journal.merge_spools() == 1
    assert [event.name for event in journal.events()] == ["kept"]
