"""When engines fail again and again on the same weights: what counts, what does not, and what the daemon then does."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.weightcache.caches import Cache, wait_for
from tests.weightcache.models import config
from tests.weightcache.publishing import packed, publish

from weightcache import messages
from weightcache.errors import CacheMiss
from weightcache.frames import close_all
from weightcache.journal import Context, Journal, boottime_ns
from weightcache.suspicion import PROVEN_S, failures

NEXT = Context("n", "a", "next", 1)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal.sqlite3", Context("n"))


def attempt(
    journal: Journal,
    number: int,
    *,
    code: int | None = None,
    number_of_signal: int | None = None,
    generation: str = "g",
    episode: str = "e",
    slot: str = "a",
    lived_s: float = 1.0,
) -> None:
    """An engine that leased weights and ended."""
    where = Context("n", slot, episode, number)
    now = boottime_ns()
    journal.append("lease_open", "", {"generation": generation, "pid": 7}, at_ns=now, context=where)
    facts = {"process": "engine", "pid": 7, "exit_code": code, "signal": number_of_signal}
    journal.append("process", "exited", facts, at_ns=now + int(lived_s * 1e9), context=where)


def fails(journal: Journal, number: int, **changes: object) -> None:
    attempt(journal, number, **{"code": 1, **changes})  # type: ignore[arg-type]


def test_two_in_a_row_are_told_latest_first(journal: Journal) -> None:
    fails(journal, 1)
    assert len(failures(journal, "g", NEXT)) == 1
    attempt(journal, 2, number_of_signal=signal.SIGABRT)
    assert failures(journal, "g", NEXT) == ["killed by SIGABRT", "with exit code 1"]
    assert failures(journal, "other", NEXT) == []
    assert failures(journal, "g", NEXT._replace(slot="b")) == []


def test_it_counts_over_episodes_that_nobody_verified(journal: Journal) -> None:
    for episode in ("e", "f"):
        journal.append("episode_close", "ready", {"verified": False}, context=Context("n", "a", episode, 1))
        fails(journal, 1, episode=episode)
    assert len(failures(journal, "g", NEXT)) == 2


def test_ranks_of_one_attempt_are_one_attempt(journal: Journal) -> None:
    where = Context("n", "a", "e", 1)
    for rank, generation in enumerate(("g", "h")):
        journal.append("lease_open", "", {"generation": generation}, context=where._replace(rank=rank))
    fails(journal, 1)
    fails(journal, 2)
    assert len(failures(journal, "g", NEXT)) == 2
    assert failures(journal, "h", NEXT) == []


@pytest.mark.parametrize(
    "ended",
    [
        {"number_of_signal": signal.SIGKILL},
        {"number_of_signal": signal.SIGTERM},
        {"code": 0},
        {"code": 128 + signal.SIGTERM},
        {"code": os.EX_CONFIG},
        {},  # nobody knows how
    ],
)
def test_an_end_from_outside_says_nothing_of_weights(journal: Journal, ended: dict[str, int]) -> None:
    for number in range(1, 5):
        attempt(journal, number, **ended)
    assert failures(journal, "g", NEXT) == []
    fails(journal, 5)
    attempt(journal, 6, **ended)
    fails(journal, 7)
    assert len(failures(journal, "g", NEXT)) == 2


def verified(journal: Journal) -> None:
    journal.append("episode_close", "ready", {"verified": True}, context=Context("n", "a", "e", 1))


def lived_long(journal: Journal) -> None:
    fails(journal, 2, lived_s=PROVEN_S + 1)


def other_weights(journal: Journal) -> None:
    fails(journal, 2, generation="other")


def lifted(journal: Journal) -> None:
    journal.append("quarantine", "set", {"generation": "g", "reason": "2 failed attempts"})
    journal.append("quarantine", "lifted", {"generation": "g", "reason": None})


@pytest.mark.parametrize("between", [verified, lived_long, other_weights, lifted])
def test_what_clears_weights(journal: Journal, between: Callable[[Journal], None]) -> None:
    fails(journal, 1)
    between(journal)
    fails(journal, 3)
    assert len(failures(journal, "g", NEXT)) == 1


def test_an_attempt_that_never_got_weights_is_neither(journal: Journal) -> None:
    fails(journal, 1)
    facts = {"process": "engine", "pid": 7, "exit_code": 1, "signal": None}
    journal.append("process", "exited", facts, context=Context("n", "a", "e", 2))
    fails(journal, 3)
    assert len(failures(journal, "g", NEXT)) == 2


def test_one_that_asks_again_is_not_counted_against_itself(journal: Journal) -> None:
    fails(journal, 1)
    fails(journal, 1, episode=str(NEXT.episode))
    assert len(failures(journal, "g", NEXT)) == 1


def test_the_daemon_hands_them_out_no_more_until_that_is_lifted(served: Cache) -> None:
    generation = publish(served, packed())
    journal = Journal(served.journal_path, Context("n"))

    def ask(episode: str) -> object:
        connection = served.connect(slot="a", episode=episode, attempt=1)
        try:
            reply, descriptors = connection.ask(messages.Attach(config=config().to_dict()), messages.Attached)
            close_all(descriptors)
            return reply.generation
        finally:
            connection.close()

    for number in (1, 2):
        assert ask(f"first-{number}") == generation
        fails(journal, number, generation=generation)
    with pytest.raises(CacheMiss, match="2 failed attempts in a row") as caught:
        ask("third")
    assert caught.value.reason == "quarantined"
    (event,) = served.events("WHERE kind = 'quarantine'")
    assert (event.name, event.slot, event.attributes["generation"]) == ("set", "a", generation)
    wait_for(lambda: served.metric("weightcache_quarantines_total") == 1, "the quarantine to be counted")
    served.ask(messages.Quarantine(generation=generation, reason="proven right", lift=True))
    assert ask("fourth") == generation
