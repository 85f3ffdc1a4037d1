"""An engine of two ranks: it answers as one, each rank maps its own part, and none outlives the others."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.fixtures import checkpoints
from tests.readmit.faults import ENGINE, Stage
from tests.weightcache.caches import wait_for

from weightcache import messages

ASKED = {"prompt": [1, 5, 9, 200], "max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": 1}
TWO = f"{ENGINE} --dtype float32 --tp-size 2"


@contextmanager
def serving(stage: Stage, command: str) -> Iterator[tuple[int, str]]:
    """An engine's pid and address; it must end within the block, or is killed."""
    pid = stage.start(command, stage.cache.socket)
    found = wait_for(lambda: re.search(r"serving on (\S+)", stage.said()) or not Path(f"/proc/{pid}").exists())
    assert isinstance(found, re.Match), stage.said()
    try:
        yield pid, found[1]
    finally:
        if Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGKILL)
        stage.wait()


def ask(address: str) -> Any:
    """Log-probabilities of the tokens that an engine gives."""
    answer = httpx.post(f"{address}/v1/completions", json=ASKED, timeout=120)
    return answer.json()["choices"][0]["logprobs"]["token_logprobs"]


def others(leader: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{leader}/task/{leader}/children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def lookups(stage: Stage, since: int) -> dict[int | None, str]:
    return {event.rank: event.name for event in stage.cache.lookups()[since:]}


def test_two_ranks_are_one_engine(stage: Stage) -> None:
    with serving(stage, f"{ENGINE} --dtype float32".replace("=client", "=off")) as (_, address):
        alone = ask(address)
    before = len(stage.cache.lookups())
    with serving(stage, TWO) as (leader, address):
        assert lookups(stage, before) == {0: "miss", 1: "miss"}
        assert ask(address) == pytest.approx(alone, abs=1e-4)
        (other,) = others(leader)
        os.kill(leader, signal.SIGKILL)
        wait_for(lambda: not is_running(other), "the other rank to end with its leader")
    assert {each["config"]["tp_rank"] for each in stage.cache.generations()} == {0, 1}
    before = len(stage.cache.lookups())
    with serving(stage, TWO) as (leader, address):
        assert lookups(stage, before) == {0: "hit", 1: "hit"}
        assert ask(address) == pytest.approx(alone, abs=1e-4)
        os.kill(others(leader)[0], signal.SIGKILL)
        wait_for(lambda: not is_running(leader), "the engine to end with one of its ranks")
        assert "rank 1" in stage.said().splitlines()[-1]
    part = next(each["generation"] for each in stage.cache.generations() if each["config"]["tp_rank"] == 1)
    wait_for(lambda: stage.cache.leases() == 0)
    stage.cache.ask(messages.Release(generation=part))
    before = len(stage.cache.lookups())
    with serving(stage, TWO) as (leader, address):
        assert lookups(stage, before) == {0: "hit", 1: "miss"}
        assert ask(address) == pytest.approx(alone, abs=1e-4)
        (other,) = others(leader)
        os.kill(other, signal.SIGTERM)  # as one sent to all of a group: only the leader obeys it
        os.kill(leader, signal.SIGTERM)
        wait_for(lambda: not is_running(leader) and not is_running(other), "all ranks to end")


@pytest.mark.parametrize("make", [checkpoints.tied, checkpoints.fp8])
def test_tied_embeddings_and_block_fp8_are_shared_out_too(
    stage: Stage, tmp_path: Path, make: Callable[[Path], Path]
) -> None:
    stage.model = checkpoints.with_tokenizer(make(tmp_path / "t"))
    said = []
    for ranks in (1, 2):
        with serving(stage, f"{ENGINE} --tp-size {ranks}") as (_, address):
            said.append(ask(address))
    assert said[1] == pytest.approx(said[0], abs=2e-2)  # bf16 adds up in another order
    stage.model = stage.folder


@pytest.mark.parametrize(
    ("options", "word"),
    [("--tp-size 3", "4 heads"), ("--tp-size 0", "0 ranks"), ("--tp-size 2 --device cuda:0", "vLLM or SGLang")],
)
def test_what_cannot_be_is_said_and_leaves_no_rank(stage: Stage, options: str, word: str) -> None:
    done = stage.run(f"{ENGINE} {options}", stage.cache.socket)
    assert (done.status, word in done.said) == (os.EX_CONFIG, True), done.said
    assert "Traceback" not in done.said
