"""What a daemon learns from the journal when it starts, and that no journal can keep it from starting."""

from pathlib import Path
from typing import Any

import pytest
from tests.weightcache.models import config

from weightcache.fingerprint import CacheConfig
from weightcache.journal import Context, Journal
from weightcache.recollection import Recollection, recall


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal.sqlite3", Context("n"))


def publish(journal: Journal, generation: str, identity: CacheConfig) -> None:
    journal.append("publish", "published", {"generation": generation, "config": identity.to_dict()})


def release(journal: Journal, generation: str, how: str = "released", **facts: Any) -> None:
    journal.append("release", how, {"generation": generation, **facts})


def residences(journal: Journal) -> dict[str, str | None]:
    return {each.generation: each.lost for each in recall(journal).residences.values()}


def test_what_was_published_and_not_given_up_is_missed(journal: Journal) -> None:
    publish(journal, "kept", config("kept"))
    publish(journal, "released", config("released"))
    release(journal, "released")
    publish(journal, "evicted", config("evicted"))
    release(journal, "evicted", "evicted")
    journal.append("publish", "failed", {"reason": "resource"})
    assert residences(journal) == {"kept": None}


def test_a_loss_that_was_seen_keeps_its_reason(journal: Journal) -> None:
    publish(journal, "a", config())
    release(journal, "a", "lost", detail="gpu_lost")
    assert residences(journal) == {"a": "gpu_lost"}


def test_only_the_latest_copy_of_the_same_weights_counts(journal: Journal) -> None:
    publish(journal, "first", config())
    publish(journal, "second", config())
    release(journal, "first")
    assert residences(journal) == {"second": None}
    release(journal, "second")
    assert residences(journal) == {}


def test_the_copy_on_each_gpu_is_missed_by_itself(journal: Journal) -> None:
    for gpu in ("GPU-1", "GPU-2"):
        facts = {"generation": f"on {gpu}", "config": config().to_dict(), "device": gpu}
        journal.append("publish", "published", facts)
    release(journal, "on GPU-1", "lost", detail="gpu_lost")
    assert residences(journal) == {"on GPU-1": "gpu_lost", "on GPU-2": None}
    kept = Recollection()
    kept.restore(recall(journal).state())
    assert kept.residences == recall(journal).residences


def test_what_an_earlier_release_published_is_not_missed_once_a_gpu_is_named(journal: Journal) -> None:
    publish(journal, "on some GPU", config())
    facts = {"generation": "on GPU-1", "config": config().to_dict(), "device": "GPU-1"}
    journal.append("publish", "published", facts)
    assert residences(journal) == {"on GPU-1": None}
    release(journal, "on GPU-1")
    assert residences(journal) == {}


def test_a_snapshot_that_knows_no_gpus_is_understood() -> None:
    kept = Recollection()
    old = [["g", config().to_dict(), "boot", None]]
    kept.restore({"quarantined": {}, "leases": {}, "identities": {}, "residences": old})
    assert [each.device for each in kept.residences.values()] == [None]


def test_quarantine_and_its_end(journal: Journal) -> None:
    journal.append("quarantine", "set", {"generation": "a", "reason": "wrong answers"})
    journal.append("quarantine", "set", {"generation": "b", "reason": "integrity"})
    journal.append("quarantine", "lifted", {"generation": "b", "reason": None})
    assert recall(journal).quarantined == {"a": "wrong answers"}


def test_leases_know_their_clients(journal: Journal) -> None:
    where = Context("n", "a", "e" * 32, 2, 1)
    journal.append("lease_open", "", {"generation": "g", "lease": "lease-g-1"}, context=where)
    journal.append("lease_open", "", {"generation": "g", "lease": "lease-g-2"}, context=where)
    journal.append("lease_close", "", {"generation": "g", "lease": "lease-g-2"}, context=where)
    assert recall(journal).leases == {"lease-g-1": where}


def test_what_waits_in_a_spool_is_heard(journal: Journal, tmp_path: Path) -> None:
    publish(journal, "a", config())
    journal._spool.write(  # type: ignore[union-attr]
        ("boot", 1, 1, "n", None, None, None, None, "quarantine", "set", '{"generation": "a", "reason": "late"}')
    )
    assert recall(journal).quarantined == {"a": "late"}


def test_an_identity_of_another_release_is_passed_over(journal: Journal) -> None:
    journal.append("publish", "published", {"generation": "a", "config": {"model": "old"}})
    journal.append("publish", "published", {"generation": "b"})
    release(journal, "a")
    assert residences(journal) == {}


@pytest.mark.parametrize("content", [b"this is no database" * 100, b"SQLite format 3\x00" + bytes(5000)])
def test_a_damaged_journal_tells_nothing_and_stops_nobody(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "journal.sqlite3"
    path.write_bytes(content)
    found = recall(Journal(path, Context("n")))
    assert (found.quarantined, found.leases, found.residences) == ({}, {}, {})
    assert "cannot be read" in caplog.text


def test_no_journal_is_no_past(tmp_path: Path) -> None:
    assert recall(Journal(None, Context("n"))).residences == {}
    assert recall(Journal(tmp_path / "none.sqlite3", Context("n"))).residences == {}
