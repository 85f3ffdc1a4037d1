"""The application: several in one process, its metrics, its health routes, its page."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from tests.readmit.gate.harness import ScriptedEngine, ending, free_port, probe_file

from readmit.gate.app import create_app
from readmit.gate.metrics import REQUEST_OUTCOMES
from readmit.gate.settings import GateSettings, SlotSettings
from readmit.gate.slots import REVOCATIONS
from readmit.probes import RESULTS
from weightcache.errors import ConfigError
from weightcache.vocabulary import SLOT_STATES


def settings(url: str, probes: Path | None = None) -> GateSettings:
    return GateSettings(slots=(SlotSettings("a", url, supervised=False),), probes=probes, drain_notice_s=0)


@pytest.fixture
def nowhere() -> FastAPI:
    return create_app(settings(f"http://127.0.0.1:{free_port()}"))


@pytest.fixture
async def client(nowhere: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with nowhere.router.lifespan_context(nowhere), client_of(nowhere) as client:
        yield client


def client_of(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gate")


async def until_readyz(client: httpx.AsyncClient, status: int) -> None:
    async with asyncio.timeout(60):
        while (await client.get("/readyz")).status_code != status:  # noqa: ASYNC110 - it is asked as a balancer asks
            await asyncio.sleep(0.02)


def value(text: str, sample: str, **labels: str) -> float:
    (found,) = [
        it.value
        for family in text_string_to_metric_families(text)
        for it in family.samples
        if it.name == sample and labels.items() <= it.labels.items()
    ]
    return found


async def test_three_apps_live_in_one_process_and_count_apart(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    probes = probe_file(tmp_path / "probes.json")
    with ending(engine):
        apps = [create_app(settings(engine.url, probes)) for _ in range(3)]
        for requests, app in enumerate(apps, 1):
            async with app.router.lifespan_context(app), client_of(app) as client:
                await until_readyz(client, 200)
                for _ in range(requests):
                    assert (await client.get("/v1/echo")).status_code == 201
                text = (await client.get("/metrics")).text
                assert value(text, "readmit_gate_requests_total", outcome="answered") == requests
    assert not [name for name in REGISTRY._names_to_collectors if name.startswith("readmit")]


async def test_metrics_are_there_under_both_paths_in_every_state(client: httpx.AsyncClient) -> None:
    plain, slash = await client.get("/metrics"), await client.get("/metrics/")
    assert plain.status_code == slash.status_code == 200
    assert plain.headers["content-type"].startswith("text/plain; version=")
    assert plain.text == slash.text
    asked = await client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert asked.headers["content-type"].startswith("application/openmetrics-text")
    assert asked.text.endswith("# EOF\n")


async def test_every_label_is_there_from_the_start_and_only_gate_metrics_are(client: httpx.AsyncClient) -> None:
    text = (await client.get("/metrics")).text
    families = list(text_string_to_metric_families(text))
    assert {family.name.startswith("readmit_gate_") for family in families} == {True}
    assert not [line for line in text.splitlines() if "_created" in line]
    for outcome in REQUEST_OUTCOMES:
        assert value(text, "readmit_gate_requests_total", outcome=outcome) == 0
    for reason in REVOCATIONS:
        assert value(text, "readmit_gate_revocations_total", slot="a", reason=reason) == 0
    for result in RESULTS:
        assert value(text, "readmit_gate_probes_total", slot="a", result=result) == 0
    states = [value(text, "readmit_gate_slot_state", slot="a", state=state) for state in SLOT_STATES]
    assert sorted(states) == [0, 0, 0, 0, 0, 0, 1]


async def test_readyz_explains_and_leaves_checks_out(client: httpx.AsyncClient) -> None:
    assert (await client.get("/readyz")).status_code == 503
    verbose = await client.get("/readyz?verbose")
    assert verbose.status_code == 503
    assert verbose.text.splitlines()[:2] == ["[+]drain ok", "[-]slots failed"]
    assert verbose.text.endswith("readyz check failed\n")
    assert (await client.get("/readyz?exclude=slots")).status_code == 200
    without = await client.get("/readyz?verbose&exclude=slots&exclude=nonsense")
    assert without.status_code == 200
    assert "[+]slots excluded: ok" in without.text
    assert "no such checks to exclude: nonsense" in without.text


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/startupz", "/"])
async def test_health_routes_answer_head_and_are_never_cached(client: httpx.AsyncClient, path: str) -> None:
    answers = await client.get(path), await client.head(path)
    assert answers[0].status_code == answers[1].status_code
    assert {answer.headers["cache-control"] for answer in answers} == {"no-store"}
    assert not answers[0].is_redirect


async def test_the_page_runs_its_own_script_only_and_escapes_what_it_shows(
    client: httpx.AsyncClient, nowhere: FastAPI
) -> None:
    nowhere.state.gate.slots[0].reason = "<script>alert(1)</script>"
    page = await client.get("/")
    assert page.text.count("<script") == 1
    assert "&lt;script&gt;alert(1)" in page.text
    assert "Not ready: no engine answers correctly" in page.text
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy


async def test_an_error_of_the_gates_own_shuts_it(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    with ending(engine):
        app = create_app(settings(engine.url, probe_file(tmp_path / "probes.json")))
        async with app.router.lifespan_context(app), client_of(app) as client:
            await until_readyz(client, 200)

            def broken() -> bool:
                raise RuntimeError("an error of the gate's own")

            app.state.gate.chronicle.poll = broken
            await until_readyz(client, 503)
            assert (await client.get("/v1/echo")).status_code == 503
            assert app.state.gate.failure is not None


async def test_a_registry_takes_one_gate_only() -> None:
    registry = CollectorRegistry()
    create_app(settings("http://127.0.0.1:1"), registry)
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        create_app(settings("http://127.0.0.1:1"), registry)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"slots": ()}, "slots"),
        ({"slots": (SlotSettings("a", "http://h:1"), SlotSettings("a", "http://h:2"))}, "slots"),
        ({"eject_wrong": 4}, "eject"),
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        GateSettings(**{"slots": (SlotSettings("a", "http://h:1"),), **wrong})  # type: ignore[arg-type]
    assert caught.value.reason == reason


@pytest.mark.parametrize("url", ["https://h:1", "h:1", "http://h:1/v1", "http://"])
def test_an_engines_url_is_its_base_url(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SlotSettings("a", url)
    assert caught.value.reason == "slot_url"
