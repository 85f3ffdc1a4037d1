"""Field failures of files (bug log B01 to B05, B17, B20 to B22), met by the commands that people start."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.fixtures import checkpoints
from tests.weightcache.caches import Cache, wait_for

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


def send_elsewhere(folder: Path) -> None:
    names = {name: FIRST for name in checkpoints.read_raw(folder / FIRST)[0] if name != "__metadata__"}
    checkpoints.write_index(folder, {**names, "lm_head.weight": f"../{SECOND}"})


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
    """Damage to a good checkpoint, and what the command says: kind, reason, and a word of the message."""

    damage: Callable[[Path], None]
    reason: str
    word: str


CASES = {
    "B01 truncated": Case(cut, "truncated", SECOND),
    "B01 header of a terabyte": Case(promise_a_terabyte, "not_safetensors", SECOND),
    "B01 overlap": Case(put_on_one_range, "geometry", "lm_head.weight"),
    "B01 pointer": Case(leave_a_pointer, "not_safetensors", "Git LFS"),
    "B02 missing": Case(remove, "shard_missing", SECOND),
    "B02 outside": Case(send_elsewhere, "path_escape", f"../{SECOND}"),
    "B03 twice": Case(add_a_copy, "duplicate_tensor", "more.safetensors"),
    "B04 dtype": Case(misspell, "dtype", "BF61"),
    "B05 dangling": Case(dangle, "link_dangling", "../blobs/gone"),
    "B20 tie": Case(tie_what_differs, "tie_conflict", "lm_head.weight"),
    "B21 nothing in FP8": Case(announce_fp8, "quant_conflict", "BF16"),
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> "dict[str, subprocess.CompletedProcess[str]]":
    """What ``readmit cache preflight --json`` says in each case, two of them run at a time."""
    root = tmp_path_factory.mktemp("cases")

    def run(case: str) -> "subprocess.CompletedProcess[str]":
        folder = checkpoints.plain(root / case.replace(" ", "-"))
        CASES[case].damage(folder)
        command = [sys.executable, "-m", "readmit.cli", "cache", "preflight", str(folder), "--json"]
        return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(CASES, pool.map(run, CASES), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_a_bad_checkpoint_exits_2_and_says_what_is_wrong(
    told: "dict[str, subprocess.CompletedProcess[str]]", case: str
) -> None:
    done = told[case]
    assert (done.returncode, done.stdout) == (2, "")
    facts = json.loads(done.stderr)
    assert (facts["kind"], facts["reason"]) == ("checkpoint", CASES[case].reason)
    assert CASES[case].word in facts["message"] or CASES[case].word in str(facts["found"])


@pytest.fixture
def cache() -> Iterator[Cache]:
    cache = Cache()
    cache.start()
    yield cache
    cache.close()


@pytest.mark.parametrize(
    ("settings", "damage", "misses"),
    [
        ({}, cut, []),  # bad files are an error, not a miss: the same disk would not do better
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, None, [("quant_not_allowed", "gptq")]),
    ],
    ids=["B01 a damaged shard", "B17 a quantisation that does not travel"],
)
def test_an_engine_ends_for_good_and_nothing_is_published(
    cache: Cache,
    tmp_path: Path,
    settings: dict[str, Any],
    damage: Callable[[Path], None] | None,
    misses: list[tuple[str, str]],
) -> None:
    folder = checkpoints.plain(tmp_path / "t", **settings)
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    if damage is not None:
        damage(folder)
    command = [sys.executable, "-m", "readmit.cli", "engine", str(folder), "--port", "0", "--weight-cache", "client"]
    engine = cache.run(command)
    output = engine.communicate(timeout=240)[0]
    assert engine.returncode == 78, output
    assert "Traceback" not in output
    assert [(it.name, it.attributes["reason"], it.attributes["detail"]) for it in cache.lookups()] == [
        ("miss", *miss) for miss in misses
    ]
    assert cache.generations() == []
    assert cache.events("WHERE kind = 'publish' AND name = 'published'") == []
    wait_for(lambda: cache.metric("weightcache_misses_total") == len(misses), "the misses to be counted")
    for reason, detail in misses:
        assert cache.metric("weightcache_misses_total", reason=reason, detail=detail) == 1
    assert cache.metric("weightcache_lookups_total", result="miss") == len(misses)
    assert cache.metric("weightcache_lookups_total", result="hit") == 0


TOKENIZER = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"<unk>": 0, "The": 1}, "unk_token": "<unk>"},
}
