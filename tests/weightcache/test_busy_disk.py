"""Recoveries on a disk that weights are read from: none is failed by telemetry, and all is told of them."""

import pytest
from tests.fixtures.busy_disk import busy_disk
from tests.weightcache.attaching import load
from tests.weightcache.caches import Cache, wait_for

from weightcache.episodes import Replay
from weightcache.journal import Context, Journal, boottime_ns, new_episode_id

RECOVERIES = 8


@pytest.mark.usefixtures("own_state")
def test_every_recovery_is_told_whole(served: Cache) -> None:
    node = Journal(served.journal_path, Context("n"))
    held = []
    with busy_disk(served.folder):
        for number in range(RECOVERIES):
            engine = node.bound(slot="a", episode=new_episode_id(), attempt=1)
            about = {"cause": "crash", "fault_boottime_ns": boottime_ns(), "fault_clock": "exit"}
            engine.append("episode_open", "crash", about)
            engine.append("attempt_start")
            with engine.phase("load_weights"):
                held.append(load(served, journal=engine))
            engine.append("attempt_end", "ready")
            engine.append("episode_close", "ready", {"verified": True})
            assert held[-1][1].path == ("hit" if number else "miss")
            assert engine.lost == 0
            engine.close()
    wait_for(lambda: served.metric("readmit_recoveries_total", outcome="ready") == RECOVERIES, "all to be counted")
    wait_for(lambda: served.metric("readmit_journal_degraded") == 0, "what waited in a spool to be merged")
    assert served.metric("readmit_journal_lost_events_total") == 0
    replay = Replay()
    replay.catch_up(node)
    assert [episode.path for episode in replay.episodes] == ["miss", *["hit"] * (RECOVERIES - 1)]
    for episode in replay.episodes:
        assert sum(episode.phases_s().values()) == pytest.approx(episode.total_s, abs=1e-6)
        assert all(interval.end_ns is not None for interval in episode.intervals())
        assert {f"load_weights.{part}" for part in ("connect", "match")} <= set(episode.parts_s())
