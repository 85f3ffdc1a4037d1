"""What pruning leaves, and what a snapshot is worth: counters stay, and whoever starts finds what it looks for."""

import json
import sqlite3
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fixtures.story import SECOND, recovery
from tests.weightcache.models import config

from weightcache.episodes import Replay
from weightcache.journal import Context, Journal, boottime_ns
from weightcache.journal.pruning import PROBES_KEPT_S
from weightcache.keeper.slot import Slot
from weightcache.keeper.spec import ChildSpec
from weightcache.recollection import recall
from weightcache.telemetry import Telemetry

RESIDENTS = SimpleNamespace(capacity=None, resident_bytes=0, leases=0, generations={}, claims=[], refused={})
DAY = 86_400 * SECOND


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal.sqlite3", Context("node"), checkpoints=True)


def telemetry(journal: Journal, **options: Any) -> Telemetry:
    made = Telemetry(journal, RESIDENTS, environ={}, **options)
    made.step()
    return made


def value(of: Telemetry, name: str, **labels: str) -> float | None:
    return of.registry.get_sample_value(name, labels)


def tell(journal: Journal, days_ago: float, number: int, **where: Any) -> None:
    """A recovery, and an hour of probes after it."""
    began = boottime_ns() - round(days_ago * DAY)
    recovery(episode=f"{number:032x}", **where).tell(journal, began)
    place = Context("node", where.get("slot", "a"), f"{number:032x}", 1)
    for minute in range(60):
        journal.append("probe", "correct", at_ns=began + (120 + 60 * minute) * SECOND, context=place)


def kinds(journal: Journal) -> dict[str, int]:
    counted: dict[str, int] = {}
    for event in journal.events():
        counted[event.kind] = counted.get(event.kind, 0) + 1
    return counted


def test_old_recoveries_go_whole_and_are_counted_still(journal: Journal) -> None:
    for number, days_ago in enumerate((200, 100, 50, 8, 1), 1):
        tell(journal, days_ago, number)
    before = telemetry(journal)
    before._prune()
    replay = Replay()
    replay.catch_up(journal)
    assert [episode.id for episode in replay.episodes] == [f"{number:032x}" for number in (3, 4, 5)]
    assert all(episode.path == "hit" and len(episode.attempts) == 1 for episode in replay.episodes)
    assert kinds(journal)["probe"] == 60, "those of the last week"
    for doubt in (False, True):
        if doubt:
            sqlite3.connect(journal.path, isolation_level=None).execute("DELETE FROM snapshots WHERE name = 'latest'")
        after = telemetry(journal)
        assert value(after, "readmit_recoveries_total", path="hit", outcome="ready") == 5
        assert value(after, "readmit_probes_total", result="correct") == 300
        assert value(after, "readmit_attempts_started_total") == 5
    before.close()


def test_what_a_start_looks_up_stays_however_old(journal: Journal) -> None:
    began = boottime_ns() - 300 * DAY
    tell(journal, 300, 1)
    tell(journal, 299, 2, slot="b")
    config_ = config().to_dict()
    for kind, name, facts in (
        ("publish", "published", {"generation": "g", "config": config_}),
        ("quarantine", "set", {"generation": "g", "reason": "wrong answers"}),
        ("lease_open", "", {"generation": "g", "lease": "lease-g-1"}),
    ):
        journal.append(kind, name, facts, at_ns=began)
    journal.append("slot_state", "ready", at_ns=began, context=Context("node", "a", "1".zfill(32), 1))
    telemetry(journal)._prune()
    past = recall(journal)
    assert (past.quarantined, list(past.leases)) == ({"g": "wrong answers"}, ["lease-g-1"])
    assert [it.generation for it in past.residences.values()] == ["g"]
    slot = Slot(ChildSpec("a", "engine", ("engine",)), journal)
    slot.resume()
    assert (slot.episode, slot.attempt, slot.is_open) == ("1".zfill(32), 1, False)
    replay = Replay()
    replay.catch_up(journal)
    assert replay.slots["a"].state == "ready"
    assert kinds(journal).get("probe", 0) == 0


def test_what_is_open_is_left_alone(journal: Journal) -> None:
    story = recovery()
    story.events = story.events[:-2]
    story.tell(journal, boottime_ns() - 100 * DAY)
    count = len(journal.events())
    pruned = telemetry(journal)
    pruned._prune()
    assert len(journal.events()) == count
    journal.append("episode_close", "ready", context=Context("node", "a", "e" * 32, 1))
    pruned.step()
    assert value(pruned, "readmit_recoveries_total", path="hit", outcome="ready") == 1


def test_more_than_fits_one_turn_goes_in_several(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightcache.telemetry.export._PRUNED_EVENTS", 50)
    for number in range(1, 6):
        tell(journal, 150 - number, number)
    pruned = telemetry(journal)
    turns = 0
    while (base := journal.snapshot("base")) is None or base.position < journal.last_id():
        pruned._prune()
        turns += 1
    assert turns > 5
    assert kinds(journal) == {kind: count for kind, count in kinds(journal).items() if kind != "probe"}
    assert value(telemetry(journal), "readmit_recoveries_total", path="hit", outcome="ready") == 5


@pytest.mark.parametrize("batches", [0, 1, 3])
def test_killed_in_the_middle_it_goes_on(journal: Journal, monkeypatch: pytest.MonkeyPatch, batches: int) -> None:
    """The base is kept before the first event goes; what is left of them goes another time."""
    monkeypatch.setattr("weightcache.journal.pruning._AT_ONCE", 20)
    for number in range(1, 4):
        tell(journal, 150 - number, number)
    dying = telemetry(journal)
    connection = dying._journal._connect()
    done = iter(range(batches))

    class Mortal:
        def __getattr__(self, name: str) -> Any:
            return getattr(connection, name)

        def executemany(self, *arguments: Any) -> Any:
            if next(done, None) is None:
                raise KeyboardInterrupt
            return connection.executemany(*arguments)

    monkeypatch.setattr(dying._journal, "_connect", Mortal)
    with pytest.raises(KeyboardInterrupt):
        dying._prune()
    monkeypatch.undo()
    left = len(journal.events())
    after = telemetry(journal)
    assert value(after, "readmit_recoveries_total", path="hit", outcome="ready") == 3
    assert value(after, "readmit_probes_total", result="correct") == 180
    after._prune()
    assert len(journal.events()) < left
    assert [event.episode for event in journal.query("WHERE kind = 'episode_open'")] == [f"{3:032x}"]


def test_a_clock_that_was_in_the_future_keeps_nothing_back(journal: Journal) -> None:
    journal.append("clock", "alive", at_ns=boottime_ns() + 1000 * DAY)
    tell(journal, 20, 1)
    pruned = telemetry(journal)
    pruned._prune()
    assert kinds(journal).get("probe", 0) == 0
    assert value(telemetry(journal), "readmit_probes_total", result="correct") == 60


class TestDoubt:
    """A snapshot that cannot be trusted is not used: what it told is replayed."""

    @pytest.mark.parametrize(
        "harm",
        [
            "UPDATE snapshots SET state = replace(state, '1.0', '7.0')",
            "UPDATE snapshots SET position = position - 5",
            "UPDATE snapshots SET digest = ''",
            "DELETE FROM snapshots",
            "DROP TABLE snapshots",
        ],
    )
    def test_of_its_content(self, journal: Journal, harm: str) -> None:
        tell(journal, 1, 1)
        telemetry(journal).close()
        assert journal.snapshot("latest") is not None
        sqlite3.connect(journal.path, isolation_level=None).execute(harm)
        assert value(telemetry(journal), "readmit_recoveries_total", path="hit", outcome="ready") == 1

    def test_of_its_meaning(self, journal: Journal, caplog: pytest.LogCaptureFixture) -> None:
        tell(journal, 1, 1)
        telemetry(journal).close()
        snapshot = journal.snapshot("latest")
        assert snapshot is not None
        journal.keep_snapshot("latest", snapshot._replace(state={"replay": {"boots": 7}}))
        assert value(telemetry(journal), "readmit_recoveries_total", path="hit", outcome="ready") == 1
        assert "does not fit" in caplog.text

    def test_one_of_a_later_event_than_there_is_belongs_to_another_journal(self, journal: Journal) -> None:
        tell(journal, 1, 1)
        telemetry(journal).close()
        snapshot = journal.snapshot("latest")
        assert snapshot is not None
        journal.keep_snapshot("latest", snapshot._replace(position=10_000))
        assert journal.snapshot("latest") is None

    def test_a_release_that_knows_less_or_more_counts_on(self, journal: Journal) -> None:
        tell(journal, 1, 1)
        telemetry(journal).close()
        position, state = journal.snapshot("latest") or pytest.fail("no snapshot")
        families = state["accounts"]["families"]
        del families["readmit_probes_total"]
        families["readmit_of_another_release_total"] = {"values": [], "exemplars": []}
        families["readmit_recoveries_total"]["values"].append([["teleport", "ready"], 3.0])
        histogram = families["readmit_time_to_semantic_readiness_seconds"]
        place = histogram["bounds"].index(10.0)
        histogram["bounds"][place] = 9.5  # that release had promised something else
        journal.keep_snapshot("latest", type(journal.snapshot("latest"))(position, state))  # type: ignore[misc]
        after = telemetry(journal)
        assert value(after, "readmit_recoveries_total", path="hit", outcome="ready") == 1
        assert value(after, "readmit_probes_total", result="correct") == 0, "counted from here on"
        name = "readmit_time_to_semantic_readiness_seconds_bucket"
        assert [value(after, name, path="hit", le=le) for le in ("5.0", "10.0", "+Inf")] == [0, 1, 1]


def test_a_snapshot_spares_the_replay(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(1, 40):
        tell(journal, 2, number)
    telemetry(journal).close()
    fed: list[int] = []
    feed = Replay.feed
    monkeypatch.setattr(Replay, "feed", lambda self, event: fed.append(event.id) or feed(self, event))
    again = telemetry(journal)
    assert fed == []
    assert value(again, "readmit_recoveries_total", path="hit", outcome="ready") == 39


def test_damage_costs_no_count_over_restarts(journal: Journal) -> None:
    """What the damaged part told is known to the daemon that finds the damage, and from then on to the snapshot."""
    for number in range(1, 4):
        tell(journal, 1, number)
    running = telemetry(journal)
    journal.close()
    running._journal.close()
    assert journal.path is not None
    journal.path.write_bytes(b"\xa5" * journal.path.stat().st_size)
    running.step()
    journal.append("probe", "wrong")
    after = telemetry(journal)
    assert value(after, "readmit_recoveries_total", path="hit", outcome="ready") == 3
    assert value(after, "readmit_probes_total", result="correct") == 180
    assert value(after, "readmit_probes_total", result="wrong") == 1


def test_spans_that_nobody_took_before_the_snapshot_are_exported(journal: Journal, tmp_path: Path) -> None:
    for number in range(1, 5):
        tell(journal, 1, number)
    telemetry(journal).close()
    place = tmp_path / "spans.jsonl.position"
    closes = [event.id for event in journal.query("WHERE kind = 'episode_close' ORDER BY id")]
    place.write_text(str(closes[1]))
    (tmp_path / "spans.jsonl").unlink()
    telemetry(journal).close()
    lines = (tmp_path / "spans.jsonl").read_text().splitlines()
    traces = [json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["traceId"] for line in lines]
    assert traces == [f"{number:032x}" for number in (3, 4)]


def test_the_journal_hears_that_the_daemon_lives(journal: Journal) -> None:
    running = telemetry(journal)
    running._alive_at = 0.0
    running.step()
    (event,) = journal.query("WHERE kind = 'clock'")
    assert event.name == "alive"
    assert abs(event.wall_ns - time.time_ns()) < PROBES_KEPT_S * SECOND
