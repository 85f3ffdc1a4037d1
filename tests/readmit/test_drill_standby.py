"""``readmit drill --path standby``: another slot takes over, and each fault hits the one that serves."""

import pytest
from tests.readmit.nodes import wait_for
from tests.readmit.test_drill import drill, refusal
from tests.readmit.test_upgrade import Pair, pair

__all__ = ["pair"]

pytestmark = pytest.mark.timeout(900)


def test_slots_take_over_from_each_other_and_both_clocks_are_told(pair: Pair) -> None:
    pair.start("up")
    wait_for(pair.ready, "the gate lets traffic in")
    wait_for(lambda: len(pair.replay().episodes) == 2 and not pair.replay().open_episodes, "both starts are closed")
    assert "after the first fault another slot serves" in refusal(
        pair, "--path", "standby", "--slot", "a", "--kills", "2"
    )
    facts = drill(pair, "--path", "standby", "--kills", "2")
    assert (facts["passed"], facts["astray"], facts["stopped"]) == (True, 0, "")
    assert [it["path"] for it in facts["recoveries"]] == ["hit", "standby"] * 2
    assert {it["path"]: it["recovery"]["n"] for it in facts["paths"]} == {"standby": 2, "hit": 2}
    told = {it["episode"]: it for it in facts["recoveries"]}
    by_id = {it.id: it for it in pair.replay().episodes}
    engines = [by_id[episode] for episode, it in told.items() if it["path"] == "hit"]
    standbys = [by_id[episode] for episode, it in told.items() if it["path"] == "standby"]
    assert [it.slot for it in standbys] == [engines[1].slot, engines[0].slot], "back and forth"
    assert {it.cause for it in by_id.values() if it.id in told} == {"drill"}
    for standby, engine in zip(standbys, engines, strict=True):
        assert standby.total_s < engine.total_s
        assert told[standby.id]["total_s"] == pytest.approx(standby.total_s)
