"""Field failures of files (bug log B01 to B05, B17, B20 to B22), met by the commands that people start."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.fixtures import checkpoints
from tests.readmit.faults import ENGINE, WORKER, Stage
from tests.readmit.forked import forks

FIRST, SECOND = checkpoints.SHARDS
Q = "model.layers.0.self_attn.q_proj"


def cut(folder: Path) -> None:
    shard = folder / SECOND
    shard.write_bytes(shard.read_bytes()[:-1])


def promise_a_terabyte(folder: Path) -> None:
    shard = folder / SECOND
    shard.write_bytes((1 << 40).to_bytes(8, "little") + shard.read_bytes()[8:])


def put_on_one_range(folder: Path) -> None:
    header, data = checkpoints.read_raw(folder / SECOND)
    header["lm_head.weight"]["data_offsets"] = header["model.norm.weight"]["data_offsets"]
    checkpoints.write_raw(folder / SECOND, header, data)


def leave_a_pointer(folder: Path) -> None:
    (folder / SECOND).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


def remove(folder: Path) -> None:
    (folder / SECOND).unlink()


def sending_to(name: str) -> Callable[[Path], None]:
    def send(folder: Path) -> None:
        names = {tensor: FIRST for tensor in checkpoints.read_raw(folder / FIRST)[0] if tensor != "__metadata__"}
        checkpoints.write_index(folder, {**names, "lm_head.weight": name})

    return send


def leave_an_answer(folder: Path) -> None:
    (folder / SECOND).write_text('{"error": "Access to model is restricted"}')


def name_twice(folder: Path) -> None:
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("{", '{"hidden_size": 8, ', 1))


def add_a_copy(folder: Path) -> None:
    (folder / checkpoints.INDEX).unlink()
    checkpoints.write_file(folder / "more.safetensors", checkpoints.linear("lm_head", 512, 256))


def misspell(folder: Path) -> None:
    header, data = checkpoints.read_raw(folder / SECOND)
    header["lm_head.weight"]["dtype"] = "BF61"
    checkpoints.write_raw(folder / SECOND, header, data)


def dangle(folder: Path) -> None:
    (folder / SECOND).unlink()
    (folder / SECOND).symlink_to("../blobs/gone")


def tie_what_differs(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(checkpoints.config(tie_word_embeddings=True)))


def announce_fp8(folder: Path) -> None:
    settings = checkpoints.config(quantization_config=checkpoints.fp8_config())
    (folder / "config.json").write_text(json.dumps(settings))


class Case(NamedTuple):
    """Damage to a good checkpoint, and what commands say of it: the reason, and a word of the message.

    ``asks``: an engine finds it only once it reads the files, for want of what may be resident.
    """

    damage: Callable[[Path], None]
    reason: str
    word: str
    asks: bool = False


CASES = {
    "B01 truncated": Case(cut, "truncated", SECOND),
    "B01 header of a terabyte": Case(promise_a_terabyte, "not_safetensors", SECOND),
    "B01 overlap": Case(put_on_one_range, "geometry", "lm_head.weight"),
    "B01 pointer": Case(leave_a_pointer, "not_safetensors", "Git LFS"),
    "B01 a server's answer": Case(leave_an_answer, "not_safetensors", "a download that failed"),
    "B02 missing": Case(remove, "shard_missing", SECOND, asks=True),
    "B02 outside": Case(sending_to(f"../{SECOND}"), "path_escape", f"../{SECOND}"),
    "B02 outside, elsewhere": Case(sending_to(f"..\\{SECOND}"), "path_escape", SECOND),
    "B03 twice": Case(add_a_copy, "duplicate_tensor", "more.safetensors"),
    "B04 dtype": Case(misspell, "dtype", "BF61"),
    "B05 dangling": Case(dangle, "link_dangling", "../blobs/gone", asks=True),
    "B18 a config of two minds": Case(name_twice, "config_invalid", "hidden_size"),
    "B20 tie": Case(tie_what_differs, "tie_conflict", "lm_head.weight"),
    "B21 nothing in FP8": Case(announce_fp8, "quant_conflict", "BF16", asks=True),
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> "dict[str, subprocess.CompletedProcess[str]]":
    """What ``readmit cache preflight --json`` says in each case."""
    root = tmp_path_factory.mktemp("cases")

    def run(case: str) -> "subprocess.CompletedProcess[str]":
        folder = checkpoints.plain(root / case.replace(" ", "-"))
        CASES[case].damage(folder)
        return forks().readmit("cache", "preflight", str(folder), "--json")

    return {case: run(case) for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_a_bad_checkpoint_exits_2_and_says_what_is_wrong(
    told: "dict[str, subprocess.CompletedProcess[str]]", case: str
) -> None:
    done = told[case]
    assert (done.returncode, done.stdout) == (2, "")
    facts = json.loads(done.stderr)
    assert (facts["kind"], facts["reason"]) == ("checkpoint", CASES[case].reason)
    assert facts["file"]
    assert CASES[case].word in facts["message"] or CASES[case].word in str(facts["found"])


@pytest.mark.parametrize("case", CASES)
def test_an_engine_that_meets_it_ends_for_good_and_publishes_nothing(stage: Stage, tmp_path: Path, case: str) -> None:
    """Bad files are an error, not a miss: the same disk would not do better. Nothing of them is published."""
    stage.model = checkpoints.with_tokenizer(checkpoints.plain(tmp_path / "t"))
    CASES[case].damage(stage.model)
    stage.reset(resident=False)
    absent = ({"lookups miss": 1, "misses absent": 1}, [("lookup", "miss", "absent", None)])
    with stage.books(*absent if CASES[case].asks else ({}, [])):
        done = stage.run(ENGINE, stage.cache.socket)
    assert done.status == os.EX_CONFIG, done.said
    assert "Traceback" not in done.said
    assert CASES[case].word in done.said
    assert stage.cache.generations() == []


def test_a_quantisation_that_does_not_travel_is_one_miss_and_stays_private(stage: Stage, tmp_path: Path) -> None:
    """B17. That transformers cannot load it here either is what ends the engine."""
    gptq = {"quant_method": "gptq", "bits": 4}
    stage.model = checkpoints.with_tokenizer(checkpoints.plain(tmp_path / "t", quantization_config=gptq))
    stage.reset(resident=False)
    row = ("lookup", "miss", "quant_not_allowed", "gptq")
    with stage.books({"lookups miss": 1, "misses quant_not_allowed gptq": 1}, [row]):
        done = stage.run(ENGINE, stage.cache.socket)
    assert done.status == os.EX_CONFIG, done.said
    assert "Traceback" not in done.said
    assert stage.cache.generations() == []


def test_a_rank_that_would_cut_a_block_is_no_miss(stage: Stage, tmp_path: Path) -> None:
    """B22."""
    stage.model = checkpoints.fp8(tmp_path / "t")
    with stage.books({}, []):
        done = stage.run(f"{WORKER} --tp-size 4 --tp-rank 1", stage.cache.socket)
    assert (done.status, "inside a block" in done.said) == (1, True), done.said
