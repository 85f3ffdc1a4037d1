"""The journal as the gate sees it, also while the database is busy."""

import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.readmit.gate.harness import History

from readmit.gate.chronicle import Chronicle
from readmit.gate.process import Engine
from readmit.gate.records import Records
from readmit.gate.slots import Lease
from weightcache.episodes import Replay
from weightcache.journal import Context, boot_id, boottime_ns, new_episode_id
from weightcache.keeper.state import STATE_FILE, ChildRecord

SECOND = 1_000_000_000


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(tmp_path / "journal.sqlite3")


@contextmanager
def chronicle_of(history: History, *slots: str, records: Records | None = None) -> Iterator[Chronicle]:
    chronicle = Chronicle(history.path, "node", slots, records or Records(None))
    assert chronicle.rewind()
    try:
        yield chronicle
    finally:
        chronicle.close()


@contextmanager
def busy(history: History) -> Iterator[None]:
    """Another writer holds the database."""
    writer = sqlite3.connect(history.path, isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        writer.execute("ROLLBACK")
        writer.close()


def crash(history: History, slot: str = "a", fault_ns: int | None = None) -> str:
    where = Context("node", slot, new_episode_id())
    facts = {"cause": "crash", "fault_boottime_ns": fault_ns or boottime_ns(), "fault_clock": "exit"}
    history.journal.append("episode_open", "crash", facts, context=where)
    history.journal.append("attempt_start", "", {}, context=where._replace(attempt=1))
    assert where.episode is not None
    return where.episode


def replay(history: History) -> Replay:
    replay = Replay()
    replay.catch_up(history.journal)
    return replay


async def test_an_episode_is_closed_once_also_while_the_journal_does_not_say_so_yet(history: History) -> None:
    crash(history)
    with chronicle_of(history, "a") as chronicle:
        with busy(history):
            for _ in range(3):  # once when the engine answers, then at every look at its lease
                chronicle.close_episode("a", verified=True, at_ns=boottime_ns())
            await chronicle.flushed()
            assert chronicle.poll() is False
            assert chronicle.context("a").episode is None
        history.journal.merge_spools()
        assert history.names("episode_close") == ["ready"]
        assert history.names("attempt_end") == ["ready"]


async def test_the_next_episode_of_the_slot_is_closed_as_well(history: History) -> None:
    with chronicle_of(history, "a") as chronicle:
        for number in (1, 2):
            crash(history)
            chronicle.close_episode("a", verified=True, at_ns=boottime_ns())
            await chronicle.flushed()
            assert history.names("episode_close") == ["ready"] * number


async def test_a_takeover_is_a_recovery_of_its_own_by_path_standby(history: History) -> None:
    lost_ns = boottime_ns()
    fault = crash(history, "a", lost_ns - 3 * SECOND)
    with chronicle_of(history, "a", "b") as chronicle:
        episode = chronicle.fault("a", lost_ns)
        assert episode is not None
        assert episode.id == fault
        lease = Lease(None, "generation", "probes", 1)
        chronicle.take_over("b", lease, episode, lost_ns, proved_ns=lost_ns + SECOND // 2)
        await chronicle.flushed()
    state = replay(history)
    recovery, standby = state.episodes
    assert (recovery.slot, recovery.is_open) == ("a", True)
    assert (standby.slot, standby.path, standby.outcome, standby.verified) == ("b", "standby", "ready", True)
    assert standby.cause == "crash"
    assert standby.total_s == pytest.approx(3.5, abs=0.01)
    phases = {"detect": pytest.approx(3, abs=0.01), "semantic_verify": pytest.approx(0.5, abs=0.01)}
    assert standby.phases_s() == phases
    assert state.slots["b"].last is None, "slot b's engine was lost to nobody"
    (opened,) = history.events("episode_open", "b")
    assert opened.attributes["instead_of"] == {"slot": "a", "episode": fault}


def test_a_fault_of_later_is_not_what_a_slot_was_lost_for(history: History) -> None:
    lost_ns = boottime_ns() - 10 * SECOND
    crash(history, "a")
    with chronicle_of(history, "a") as chronicle:
        assert chronicle.fault("a", lost_ns) is None
        assert chronicle.fault("a", boottime_ns()) is not None


def test_what_an_engine_runs_on_is_what_it_asked_for_or_published(history: History) -> None:
    episode = crash(history)
    where = Context("node", "a", episode, 1, 0)
    with chronicle_of(history, "a") as chronicle:
        asked = {"model_path": "/m", "checkpoint_digest": None}
        history.journal.append("lookup", "miss", {"reason": "absent", "config": asked}, context=where)
        published = {"model_path": "/m", "checkpoint_digest": "abc"}
        history.journal.append("publish", "published", {"generation": "g", "config": published}, context=where)
        chronicle.poll()
        assert chronicle.weights("a") == published
        assert chronicle.asked["a"] == {0: published}
        history.journal.append("attempt_start", "", {}, context=where._replace(attempt=2, rank=None))
        chronicle.poll()
        assert chronicle.weights("a") == {}, "another process, which has not said yet"
        assert chronicle.asked["a"] == {0: published}


def test_an_engine_is_known_by_its_keepers_word_where_the_journal_lost_how_it_began(
    history: History, tmp_path: Path
) -> None:
    """A disk was full, and whoever would have told died: neither its episode nor, perhaps, its attempt was written."""
    engine = Engine.of(os.getpid())
    assert engine is not None
    for episode, attempt in ((new_episode_id(), 1), (new_episode_id(), None)):
        record = ChildRecord("a", "engine", "running", *engine, False, 0, episode, attempt)
        data = {"pid": 1, "boot_id": boot_id(), "node": "node", "children": [record._asdict()]}
        (tmp_path / STATE_FILE).write_text(json.dumps(data))
        where = Context("node", "a", episode, attempt)
        with chronicle_of(history, "a", records=Records(tmp_path)) as chronicle:
            assert chronicle.engine("a") == engine
            assert chronicle.generation("a") is None
            history.journal.append("attempt_start", "", {}, context=where)
            facts = {"generation": "g", "config": {"checkpoint_digest": "abc"}}
            history.journal.append("lookup", "hit", facts, context=where._replace(rank=0))
            chronicle.poll()
            assert (chronicle.generation("a"), chronicle.mapped("a")) == ("g", {"g"})
            assert chronicle.weights("a") == {"checkpoint_digest": "abc"}


def test_what_a_recovery_takes_is_expected_by_the_path_that_is_foreseen(history: History) -> None:
    for result, seconds, ago in (("miss", 40, 100), ("hit", 5, 50)):
        where = Context("node", "a", new_episode_id(), 1)
        began = boottime_ns() - ago * SECOND
        history.journal.append(
            "episode_open", "crash", {"fault_boottime_ns": began, "fault_clock": "exit"}, context=where, at_ns=began
        )
        history.journal.append("attempt_start", "", {}, context=where, at_ns=began)
        history.journal.append("lookup", result, {"generation": "g"}, context=where._replace(rank=0), at_ns=began)
        end = began + seconds * SECOND
        history.journal.append("episode_close", "ready", {"verified": True}, context=where, at_ns=end)
    crash(history)
    with chronicle_of(history, "a") as chronicle:
        assert chronicle.expected_s("a", "hit") == pytest.approx(5, abs=0.1)
        assert chronicle.expected_s("a", "miss") == pytest.approx(40, abs=0.1)
        assert chronicle.expected_s("a", chronicle.last_path("a")) == pytest.approx(5, abs=0.1)
        assert chronicle.expected_s("a", None) is None


def test_how_long_others_took_to_be_noticed_says_nothing_of_this_recovery(history: History) -> None:
    where = Context("node", "a", new_episode_id(), 1)
    fault_ns = boottime_ns() - 100 * SECOND
    facts = {"cause": "hang", "fault_boottime_ns": fault_ns, "fault_clock": "last_correct_answer"}
    history.journal.append("episode_open", "hang", facts, context=where, at_ns=fault_ns + 45 * SECOND)
    history.journal.append("attempt_start", "", {}, context=where, at_ns=fault_ns + 45 * SECOND)
    history.journal.append("phase_begin", "semantic_verify", context=where, at_ns=fault_ns + 48 * SECOND)
    history.journal.append("lookup", "hit", {}, context=where._replace(rank=0), at_ns=fault_ns + 46 * SECOND)
    history.journal.append("episode_close", "ready", {}, context=where, at_ns=fault_ns + 50 * SECOND)
    crash(history, fault_ns=boottime_ns() - 2 * SECOND)
    with chronicle_of(history, "a") as chronicle:
        assert chronicle.expected_s("a", "hit") == pytest.approx(7, abs=0.2), "2 s until it was started, then 5"
        assert chronicle.verification_s("a") == pytest.approx(2, abs=0.01)
