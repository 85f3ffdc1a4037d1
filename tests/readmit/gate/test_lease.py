"""What readiness rests on: the gate's own process, scripted engines, and a journal as a keeper writes it."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from tests.readmit.gate.harness import History, ScriptedEngine, ending, probe_file

from readmit.gate.app import create_app
from readmit.gate.gate import Gate
from readmit.gate.settings import GateSettings, SlotSettings
from readmit.probes import Expectation, Probe, ProbeSet
from weightcache.journal import Context


@pytest.fixture(scope="module")
def engine() -> Iterator[ScriptedEngine]:
    engine = ScriptedEngine()
    with ending(engine):
        yield engine


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(tmp_path / "journal.sqlite3")


@asynccontextmanager
async def app_of(
    engine: ScriptedEngine, history: History, probes: Path, cache_socket: Path | None = None
) -> AsyncIterator[FastAPI]:
    slots = (SlotSettings("a", engine.url),)
    app = create_app(
        GateSettings(
            slots,
            journal=history.path,
            probes=probes,
            cache_socket=cache_socket,
            verify_interval_s=0.1,
            drain_notice_s=0.0,
        )
    )
    async with app.router.lifespan_context(app), asyncio.timeout(90):
        yield app


@asynccontextmanager
async def gate_of(engine: ScriptedEngine, history: History, probes: Path) -> AsyncIterator[Gate]:
    async with app_of(engine, history, probes) as app:
        yield app.state.gate


async def until_state(gate: Gate, state: str, reason: str) -> None:
    while (gate.slots[0].state, gate.slots[0].reason) != (state, reason):  # noqa: ASYNC110 - another process's doing
        await asyncio.sleep(0.02)


def runs_on(history: History, episode: str, generation: str, digest: str) -> None:
    """What an engine writes that has mapped resident weights."""
    facts = {"generation": generation, "config": {"checkpoint_digest": digest}}
    history.journal.append("lookup", "hit", facts, context=Context("node", "a", episode, 1, 0))


def recorded(path: Path, name: str, digest: str | None = None) -> str:
    """Save golden answers; returns their digest."""
    probe = Probe(name, "The capital of France is", 1, Expectation(text=" Paris"))
    probe_set = ProbeSet(model="scripted", probes=(probe,), checkpoint_digest=digest)
    probe_set.save(path)
    return probe_set.digest


async def test_it_is_told_with_its_age(engine: ScriptedEngine, history: History, tmp_path: Path) -> None:
    history.spawned(engine.pid)
    async with app_of(engine, history, probe_file(tmp_path / "probes.json")) as app:
        await until_state(app.state.gate, "ready", "verified")
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gate") as client:
            told = (await client.get("/readyz?verbose")).text
    assert re.search(
        r"slot a ready, verified, for [0-9.]+ s \(verified\), last correct answer [0-9.]+ s ago$", told, re.M
    )


async def test_other_golden_answers_end_it_until_they_have_come(
    engine: ScriptedEngine, history: History, tmp_path: Path
) -> None:
    history.spawned(engine.pid)
    path = tmp_path / "probes.json"
    first = recorded(path, "first")
    async with gate_of(engine, history, path) as gate:
        await until_state(gate, "ready", "verified")
        assert gate.slots[0].lease is not None
        assert gate.slots[0].lease.probe_set == first
        second = recorded(path, "second")
        while (lease := gate.slots[0].lease) is None or lease.probe_set != second:  # noqa: ASYNC110 - a file is read
            await asyncio.sleep(0.02)
    steps = [step for step in history.states() if step[0] in ("ready", "suspect")]
    assert steps == [("ready", "verified"), ("suspect", "probes_changed"), ("ready", "verified")]


async def test_weights_are_not_blamed_for_other_golden_answers(
    engine: ScriptedEngine, history: History, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runs_on(history, history.spawned(engine.pid), "g1", "mine")
    path = probe_file(tmp_path / "probes.json")
    async with app_of(engine, history, path, cache_socket=tmp_path / "no.sock") as app:
        gate = app.state.gate
        await until_state(gate, "ready", "verified")
        probe_file(path, " London")
        while "weights are not blamed" not in caplog.text:  # noqa: ASYNC110 - the gate asks in its own time
            await asyncio.sleep(0.02)
        assert not gate.ready
        probe_file(path)
        await until_state(gate, "ready", "verified")
    assert "quarantined" not in caplog.text


async def test_weights_are_not_blamed_where_the_golden_answers_have_changed_since_another_gate_asked(
    engine: ScriptedEngine, history: History, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runs_on(history, history.spawned(engine.pid), "g1", "mine")
    path = probe_file(tmp_path / "probes.json")
    async with gate_of(engine, history, path) as gate:
        await until_state(gate, "ready", "verified")
    probe_file(path, " London")
    async with app_of(engine, history, path, cache_socket=tmp_path / "no.sock"):
        while "weights are not blamed" not in caplog.text:  # noqa: ASYNC110 - the gate asks in its own time
            await asyncio.sleep(0.02)
    assert "quarantined" not in caplog.text


async def test_golden_answers_of_other_weights_let_nobody_in(
    engine: ScriptedEngine, history: History, tmp_path: Path
) -> None:
    runs_on(history, history.spawned(engine.pid), "g1", "mine")
    path = tmp_path / "probes.json"
    recorded(path, "capital", "another")
    async with gate_of(engine, history, path) as gate:
        await until_state(gate, "verifying", "stale_probes")
        recorded(path, "capital", "mine")
        await until_state(gate, "ready", "verified")


@pytest.mark.parametrize("kept_in", ["file", "folder"])
async def test_golden_answers_replaced_by_those_of_other_weights_are_asked_on_and_that_is_said(
    engine: ScriptedEngine, history: History, tmp_path: Path, caplog: pytest.LogCaptureFixture, kept_in: str
) -> None:
    runs_on(history, history.spawned(engine.pid), "g1", "mine")
    probes = tmp_path / "probes"
    if kept_in == "folder":
        probes.mkdir()
    ours, theirs = (probes / "one.json", probes / "two.json") if kept_in == "folder" else (probes, probes)
    mine = recorded(ours, "capital", "mine")
    async with app_of(engine, history, probes) as app:
        gate = app.state.gate
        await until_state(gate, "ready", "verified")
        if kept_in == "folder":
            ours.unlink()
        recorded(theirs, "capital", "another")
        while "speaks of checkpoint mine any more" not in caplog.text:  # noqa: ASYNC110 - the gate looks in its own time
            await asyncio.sleep(0.02)
        asked = [event for event in history.events("probe") if event.name == "correct"]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gate") as client:
            assert "warning: no file in" in (await client.get("/readyz?verbose")).text
            assert "speaks of checkpoint mine any more" in (await client.get("/")).text
        while len([it for it in history.events("probe") if it.name == "correct"]) < len(asked) + 3:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert gate.slots[0].lease is not None
        assert gate.slots[0].lease.probe_set == mine
        recorded(ours, "capital", "mine")
        while gate.probes_trouble is not None:  # noqa: ASYNC110 - a file is read
            await asyncio.sleep(0.02)
    assert [step for step in history.states() if step[0] == "suspect"] == []
    assert [step for step in history.states() if step[0] == "ready"] == [("ready", "verified")]


async def test_golden_answers_that_may_be_anothers_end_it(
    engine: ScriptedEngine, history: History, tmp_path: Path
) -> None:
    history.spawned(engine.pid)
    folder = tmp_path / "probes"
    folder.mkdir()
    recorded(folder / "one.json", "one")
    async with gate_of(engine, history, folder) as gate:
        await until_state(gate, "ready", "verified")
        recorded(folder / "two.json", "two")
        await until_state(gate, "verifying", "no_probes")
        (folder / "one.json").unlink()
        await until_state(gate, "ready", "verified")


async def test_other_weights_end_it_until_they_have_answered(
    engine: ScriptedEngine, history: History, tmp_path: Path
) -> None:
    episode = history.spawned(engine.pid)
    runs_on(history, episode, "g1", "mine")
    async with gate_of(engine, history, probe_file(tmp_path / "probes.json")) as gate:
        await until_state(gate, "ready", "verified")
        runs_on(history, episode, "g2", "mine")
        while (lease := gate.slots[0].lease) is None or lease.generation != "g2":  # noqa: ASYNC110 - the journal is read
            await asyncio.sleep(0.02)
    steps = [step for step in history.states() if step[0] in ("ready", "suspect")]
    assert steps == [("ready", "verified"), ("suspect", "generation_changed"), ("ready", "verified")]


async def test_another_process_on_the_port_is_not_the_engine(history: History, tmp_path: Path) -> None:
    first = ScriptedEngine()
    with ending(first):
        history.spawned(first.pid)
        async with gate_of(first, history, probe_file(tmp_path / "probes.json")) as gate:
            await until_state(gate, "ready", "verified")
            first.tell(listening=False)  # it lives on
            second = await asyncio.to_thread(ScriptedEngine, first.port)
            with ending(second):
                await until_state(gate, "verifying", "foreign_listener")
                assert not gate.ready
                history.spawned(second.pid)
                await until_state(gate, "ready", "verified")
                assert gate.slots[0].lease is not None
                assert gate.slots[0].lease.engine is not None
                assert gate.slots[0].lease.engine.pid == second.pid
