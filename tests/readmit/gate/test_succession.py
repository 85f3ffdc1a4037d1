"""Who has the place, and for what fault it was passed on."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.readmit.gate.dying import LINGERS, go_on, running
from tests.readmit.gate.harness import History, until

from readmit.gate.chronicle import Chronicle
from readmit.gate.process import Engine
from readmit.gate.records import Records
from readmit.gate.slots import Lease, Slot
from readmit.gate.succession import Succession
from weightcache.episodes import Replay
from weightcache.journal import Context, boottime_ns, new_episode_id


async def proved(slot: Slot) -> bool:
    return True


async def test_a_death_that_takes_long_is_what_the_place_was_lost_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("readmit.gate.chronicle.NOTICED_APART_NS", 0)
    history = History(tmp_path / "journal.sqlite3")
    chronicle = Chronicle(history.path, "node", ["a", "b"], Records(None))
    assert chronicle.rewind()
    slots = [Slot(name, "http://127.0.0.1:9") for name in "ab"]
    succession = Succession(slots, chronicle, proved)
    take_over, written = chronicle.take_over, asyncio.Event()

    def noted(*facts: Any) -> None:
        take_over(*facts)
        written.set()

    monkeypatch.setattr(chronicle, "take_over", noted)
    with running(LINGERS) as dying:
        for slot in slots:
            slot._observers = [succession.follow]
            for state in ("starting", "loading", "verifying"):
                slot.enter(state, "test")
            slot.engine = Engine.of(dying.pid)
            slot.open(Lease(slot.engine, "generation", "probes", boottime_ns()))
        accounts = asyncio.create_task(succession.keep_account())
        go_on(dying)
        until(lambda: Engine.of(dying.pid) is None, "its main thread to go")
        slots[0].revoke("engine_exited")
        assert succession.active is slots[1]
        taken_ns = slots[0].since_ns
        await asyncio.sleep(0.1)
        assert not history.events("episode_open", "b"), "what the fault was is not known before it is over"
        where, fault_ns = Context("node", "a", new_episode_id()), boottime_ns()
        dying.kill()
        dying.wait()
        facts = {"cause": "crash", "fault_boottime_ns": fault_ns, "fault_clock": "exit"}
        history.journal.append("episode_open", "crash", facts, context=where)
        await asyncio.wait_for(written.wait(), 60)
    accounts.cancel()
    chronicle.close()
    replay = Replay()
    replay.catch_up(history.journal)
    (standby,) = (episode for episode in replay.episodes if episode.slot == "b")
    assert standby.cause == "crash"
    assert standby.phases_s().get("detect", 0) == 0, "the gate knew at once"
    assert history.events("episode_open", "b")[0].attributes["fault_boottime_ns"] == taken_ns < fault_ns
