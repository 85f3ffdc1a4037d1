"""A slot's policy and its reading of the journal, without processes."""

import contextlib
import json
import os
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weightcache.episodes import Replay
from weightcache.journal import Context, Event, Journal, boottime_ns
from weightcache.journal import log as log_module
from weightcache.keeper import slot as slot_module
from weightcache.keeper.slot import OomWatch, Slot
from weightcache.keeper.spec import ChildSpec
from weightcache.keeper.state import ChildRecord
from weightcache.process import Exit

KILLED = Exit(None, signal.SIGKILL)


class Place:
    """A slot on a journal of its own."""

    def __init__(self, path: Path, **policy: Any) -> None:
        self.spec = ChildSpec("a", "engine", ("engine",), **policy)
        self.journal = Journal(path / "journal.sqlite3", Context("n"))
        self.slot = Slot(self.spec, self.journal)
        self.pid = 100

    def attempt(self) -> None:
        self.pid += 1
        self.slot.start()

    def die(self, exit_: Exit = KILLED, *, ordered: bool = False) -> None:
        self.slot.exited(self.pid, 1, exit_, boottime_ns(), ordered=ordered)

    def successor(self, record: ChildRecord | None = None) -> Slot:
        slot = Slot(self.spec, self.journal)
        slot.resume(record)
        return slot

    def replay(self) -> Replay:
        replay = Replay()
        replay.catch_up(self.journal)
        return replay


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path, backoff_s=(0.0, 1.0, 4.0), limit=5)


def test_pauses_grow_with_each_attempt_and_start_over_after_service(place: Place) -> None:
    place.slot.first_start()
    pauses = []
    for _ in range(4):
        place.attempt()
        place.die()
        pauses.append(place.slot.backoff_s())
    assert pauses == [0.0, 1.0, 4.0, 4.0]
    place.attempt()
    place.slot.ready()
    place.die()
    assert place.slot.backoff_s() == 0.0


def test_a_successor_goes_by_its_predecessors_record_where_a_full_disk_kept_the_journal_from_it(place: Place) -> None:
    place.slot.first_start()
    place.attempt()

    def record(episode: str | None) -> ChildRecord:
        return ChildRecord("a", "engine", "running", 102, 1, False, 0, episode, 2)

    assert place.successor(record(place.slot.episode)).context.attempt == 2
    assert place.successor(record("of another time")).context.attempt == 1


@pytest.mark.parametrize("served", [False, True])
def test_the_limit_counts_ends_without_service_in_between(tmp_path: Path, served: bool) -> None:
    place = Place(tmp_path, limit=3)
    place.slot.first_start()
    for _ in range(2):
        place.attempt()
        if served:
            place.slot.ready()
        place.die()
        assert not place.slot.hopeless
    place.attempt()
    place.die()
    # An engine that crashed out of service has ended once already when its first new attempt begins.
    assert place.slot.hopeless is not served


def test_ends_outside_the_window_are_forgotten(tmp_path: Path) -> None:
    place = Place(tmp_path, limit=2, window_s=0.0)
    place.slot.first_start()
    for _ in range(5):
        place.attempt()
        place.die()
        assert not place.slot.hopeless


def test_limit_0_never_gives_up(tmp_path: Path) -> None:
    place = Place(tmp_path, limit=0)
    place.slot.first_start()
    for _ in range(20):
        place.attempt()
        place.die()
    assert not place.slot.hopeless


def test_ordered_ends_are_no_faults(place: Place) -> None:
    place.slot.first_start()
    for _ in range(10):
        place.attempt()
        place.slot.order("config_change")
        place.die(ordered=True)
    assert not place.slot.hopeless
    (episode,) = place.replay().episodes
    assert [attempt.outcome for attempt in episode.attempts] == ["abandoned"] * 10


def test_ex_config_is_final(place: Place) -> None:
    place.slot.first_start()
    place.attempt()
    place.die(Exit(os.EX_CONFIG, None))
    assert place.slot.hopeless


def test_an_episode_that_the_gate_has_closed_is_over(place: Place) -> None:
    place.slot.first_start()
    place.attempt()
    gate = Journal(place.journal.path, place.slot.context)
    gate.append("attempt_end", "ready")
    gate.append("episode_close", "ready", {"verified": True})
    assert not place.slot.is_open
    place.die()
    assert [it.cause for it in place.replay().episodes] == ["first_start", "crash"]


def test_an_episode_that_the_gate_could_close_in_a_spool_only_is_over(place: Place) -> None:
    place.slot.first_start()
    place.attempt()
    gate = Journal(place.journal.path, place.slot.context)
    with contextlib.closing(sqlite3.connect(str(place.journal.path))) as busy:
        busy.execute("BEGIN IMMEDIATE")
        gate.append("attempt_end", "ready")
        gate.append("episode_close", "ready", {"verified": True})
        assert gate.spooled == 2
    place.die()
    assert [(it.cause, it.outcome) for it in place.replay().episodes] == [("first_start", "ready"), ("crash", None)]


def test_an_episode_that_the_gate_has_opened_is_gone_on_with(place: Place) -> None:
    place.slot.first_start()
    place.attempt()
    place.slot.ready()
    about = {"cause": "hang", "fault_boottime_ns": boottime_ns(), "fault_clock": "last_correct_answer"}
    gate = Journal(place.journal.path, Context("n", "a", "f" * 32))
    gate.append("episode_open", "hang", about)
    assert place.slot.is_open
    place.die()
    place.attempt()
    place.slot.ready()
    assert [(it.cause, it.outcome) for it in place.replay().episodes] == [("first_start", "ready"), ("hang", "ready")]
    assert place.slot.context.episode == "f" * 32


def test_a_successor_counts_on(place: Place) -> None:
    place.slot.first_start()
    for _ in range(3):
        place.attempt()
        place.die()
    successor = place.successor()
    assert (successor.episode, successor.attempt) == (place.slot.episode, 3)
    successor.start()
    successor.exited(200, 1, KILLED, boottime_ns(), ordered=False)
    assert successor.backoff_s() == 4.0
    assert not successor.hopeless
    successor.start()
    successor.exited(201, 1, KILLED, boottime_ns(), ordered=False)
    assert successor.hopeless


def test_a_death_that_the_predecessor_wrote_down_is_not_told_again(place: Place) -> None:
    place.slot.first_start()
    place.attempt()
    place.die()
    successor = place.successor()
    successor.exited(place.pid, 1, Exit(None, None), boottime_ns(), ordered=False)
    kinds = [(event.kind, event.name) for event in place.journal.events()]
    assert kinds.count(("process", "exited")) == 1
    assert kinds.count(("attempt_end", "crashed")) == 1
    assert successor.backoff_s() == 0.0, "it is one death"


def test_an_attempt_that_got_no_process_is_ended_by_the_next_keeper(place: Place) -> None:
    place.slot.first_start()
    place.attempt()
    successor = place.successor()
    successor.first_start()
    successor.start()
    (episode,) = place.replay().episodes
    assert [attempt.outcome for attempt in episode.attempts] == ["crashed", None]


def reboot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_module, "boot_id", lambda: "the next boot")


@pytest.mark.parametrize(("ended", "cause"), [(False, "node_reboot"), (True, "first_start")])
def test_only_an_engine_that_never_ended_was_ended_by_the_reboot(
    place: Place, monkeypatch: pytest.MonkeyPatch, ended: bool, cause: str
) -> None:
    place.slot.first_start()
    place.attempt()
    place.slot.spawned(SimpleNamespace(pid=os.getpid(), start_ticks=1))  # type: ignore[arg-type]
    place.slot.ready()
    if ended:
        place.die(ordered=True)
    reboot(monkeypatch)
    place.successor().first_start()
    assert [it.cause for it in place.replay().episodes] == ["first_start", cause]


def test_a_slot_that_was_given_up_and_stopped_was_not_ended_by_the_reboot(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.slot.first_start()
    place.attempt()
    place.slot.spawned(SimpleNamespace(pid=os.getpid(), start_ticks=1))  # type: ignore[arg-type]
    place.die(Exit(os.EX_CONFIG, None))
    place.slot.abandon("configuration")
    place.slot.stop()
    assert place.journal.events()[-1].name == "stopped"
    reboot(monkeypatch)
    place.successor().first_start()
    assert [it.cause for it in place.replay().episodes] == ["first_start", "first_start"]


def test_an_episode_does_not_span_a_reboot(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.slot.first_start()
    place.attempt()
    reboot(monkeypatch)
    place.successor().first_start()
    first, second = place.replay().episodes
    assert (first.outcome, second.previous, second.outcome) == ("abandoned", first.id, None)


class TestReboot:
    """The machine goes down after its last event, and is up again a hundred seconds later."""

    @pytest.fixture
    def reboot(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Event]:
        def reboot() -> Event:
            last = place.journal.events()[-1]
            began, wall = boottime_ns(), time.time_ns
            for module in (slot_module, log_module):
                monkeypatch.setattr(module, "boot_id", lambda: "the next boot")
                monkeypatch.setattr(module, "boottime_ns", lambda: boottime_ns() - began + 5_000_000_000)
            monkeypatch.setattr(time, "time_ns", lambda: wall() + 100_000_000_000)
            return last

        return reboot

    def test_an_engine_that_served_was_lost_with_its_boot(self, place: Place, reboot: Callable[[], Event]) -> None:
        place.slot.first_start()
        place.attempt()
        place.slot.spawned(SimpleNamespace(pid=os.getpid(), start_ticks=1))  # type: ignore[arg-type]
        place.slot.ready()
        place.journal.append("clock", "alive")
        lost = reboot()
        place.successor().first_start()
        replay = place.replay()
        first, second = replay.episodes
        assert (first.outcome, second.cause, second.domain) == ("ready", "node_reboot", "node")
        assert (second.fault_clock, second.previous) == ("last_event", first.id)
        assert second.fault_ns == pytest.approx(replay.clock.place(lost), abs=1e7)
        assert second.age_s(replay.seen_ns) == pytest.approx(100, abs=30)

    def test_a_recovery_that_was_open_ends_with_its_boot(self, place: Place, reboot: Callable[[], Event]) -> None:
        place.slot.first_start()
        place.attempt()
        place.slot.begin("spawn")
        lost = reboot()
        place.successor().first_start()
        replay = place.replay()
        first, second = replay.episodes
        (attempt,) = first.attempts
        lost_ns = replay.clock.place(lost)
        assert (first.outcome, attempt.outcome, second.cause) == ("abandoned", "crashed", "node_reboot")
        assert (first.closed_ns, attempt.ended_ns) == (
            pytest.approx(lost_ns, abs=1e7),
            pytest.approx(lost_ns, abs=1e7),
        )
        assert second.fault_ns == first.closed_ns, "no time between them, and none twice"
        assert sum(first.phases_s().values()) == pytest.approx(first.total_s)


def test_a_journal_that_cannot_be_read_stops_no_restart(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.slot.first_start()
    place.attempt()
    place.journal.close()
    assert place.journal.path is not None
    place.journal.path.write_bytes(b"not a database" * 100)
    place.die()
    place.attempt()
    assert place.slot.attempt == 2


def watch(counter: Path, before: int, after: int | None, exit_: Exit) -> tuple[str, dict[str, Any]]:
    oom = OomWatch()
    counter.write_text(f"low 0\noom 7\noom_kill {before}\n")
    oom.watch(counter)
    if after is None:
        counter.unlink()
    else:
        counter.write_text(f"low 0\noom 9\noom_kill {after}\n")
    return oom.verdict(exit_)


@pytest.mark.parametrize(
    ("before", "after", "exit_", "cause"),
    [
        (3, 4, KILLED, "oom_kill"),
        (3, 3, KILLED, "crash"),
        (3, 4, Exit(1, None), "crash"),
        (3, 4, Exit(None, signal.SIGSEGV), "crash"),
        (3, 4, Exit(None, None), "crash"),
        (3, None, KILLED, "crash"),
    ],
)
def test_out_of_memory_takes_proof(tmp_path: Path, before: int, after: int | None, exit_: Exit, cause: str) -> None:
    found, evidence = watch(tmp_path / "memory.events", before, after, exit_)
    assert found == cause
    # A kill that hit another process of the cgroup is shown, though it proves nothing.
    assert evidence.get("oom_kills_after") == (after if after == 4 else None)


def test_another_program_goes_on_exactly_where_the_slot_stands(place: Place) -> None:
    place.journal.append("process", "started", {"process": "keeper"})
    place.slot.first_start()
    place.attempt()
    place.die()
    handed = json.loads(json.dumps(place.slot.hand_over()))
    next_one = Slot(place.spec, place.journal)
    next_one.take_back(handed)
    assert next_one.hand_over() == place.slot.hand_over()
    assert handed["opened_after"] == 1, "it searches the events of its own recovery, not all before them"
