"""Which weights match which: a table of what must be equal and what must differ (bug log B18, iv)."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.fixtures import checkpoints

from weightcache import identity
from weightcache.checkpoint import Checkpoint, Folder
from weightcache.errors import CheckpointError
from weightcache.fingerprint import FIELDS, CacheConfig, normalize_path, stable_hash

FULL: dict[str, Any] = {
    "model_path": "/models/ling",
    "model_arch": "BailingMoeV2ForCausalLM",
    "revision": "a" * 40,
    "checkpoint_digest": "d" * 64,
    "tp_size": 8,
    "tp_rank": 3,
    "pp_size": 2,
    "pp_rank": 1,
    "dp_size": 4,
    "ep_size": 8,
    "ep_rank": 5,
    "quant_method": "fp8",
    "quant_config_hash": "c" * 64,
    "dtype": "bfloat16",
    "device_capability": "9.0",
    "torch_version": "2.13.0",
    "engine": "vllm",
    "layout_id": "vllm-0.32.0",
    "kernel_backend": "deep_gemm",
}
OTHER: dict[str, Any] = {
    field: value + 1 if isinstance(value, int) else f"{value}x" if field != "model_path" else "/models/other"
    for field, value in FULL.items()
}


def fields(one: CacheConfig, other: CacheConfig) -> list[str]:
    return [difference.field for difference in one.differences(other)]


def test_the_fields_are_those_of_the_design_in_the_order_of_reporting() -> None:
    assert tuple(FULL) == FIELDS


def test_equal_configs_match() -> None:
    assert CacheConfig(**FULL).differences(CacheConfig(**FULL)) == []
    assert CacheConfig(**FULL).key() == CacheConfig(**FULL).key()


@pytest.mark.parametrize("field", [field for field in FIELDS if field != "model_path"])
def test_each_field_alone_is_a_mismatch_with_both_values(field: str) -> None:
    wanted, resident = CacheConfig(**FULL), CacheConfig(**{**FULL, field: OTHER[field]})
    (difference,) = wanted.differences(resident)
    assert difference == msgspec.structs.replace(difference, field=field, expected=FULL[field], found=OTHER[field])
    assert repr(FULL[field]) in str(difference)
    assert repr(OTHER[field]) in str(difference)
    assert wanted.key() != resident.key()


OPTIONAL = ["revision", "checkpoint_digest", "quant_config_hash", "device_capability", "kernel_backend"]


@pytest.mark.parametrize("field", OPTIONAL)
@pytest.mark.parametrize("lacking", ["wanted", "resident"])
def test_a_field_that_one_side_lacks_is_a_mismatch(field: str, lacking: str) -> None:
    whole, without = CacheConfig(**FULL), CacheConfig(**{**FULL, field: None})
    one, other = (without, whole) if lacking == "wanted" else (whole, without)
    assert field in fields(one, other)
    assert one.key() != other.key()


def test_a_moved_copy_matches_once_its_contents_are_proven() -> None:
    here, moved = CacheConfig(**FULL), CacheConfig(**{**FULL, "model_path": "/elsewhere"})
    assert fields(here, moved) == []
    assert here.key() == moved.key()


@pytest.mark.parametrize("digests", [(None, None), ("d" * 64, None), (None, "d" * 64), ("d" * 64, "e" * 64)])
def test_a_moved_copy_differs_while_its_contents_are_not(digests: tuple[str | None, str | None]) -> None:
    here = CacheConfig(**{**FULL, "checkpoint_digest": digests[0]})
    moved = CacheConfig(**{**FULL, "checkpoint_digest": digests[1], "model_path": "/elsewhere"})
    assert fields(here, moved) == ["model_path", "checkpoint_digest"]
    assert here.key() != moved.key()


def test_two_unproven_ones_at_one_path_do_not_match() -> None:
    unproven = CacheConfig(**{**FULL, "checkpoint_digest": None})
    assert fields(unproven, unproven) == ["checkpoint_digest"]


@pytest.mark.parametrize("path", ["/models/ling/", "//models//ling", "/models/./ling", "/models/ling/."])
def test_a_path_spelt_otherwise_is_the_same(path: str) -> None:
    assert normalize_path(path) == "/models/ling"
    spelt = CacheConfig(**{**FULL, "checkpoint_digest": None, "model_path": path})
    usual = CacheConfig(**{**FULL, "checkpoint_digest": None})
    assert fields(spelt, usual) == ["checkpoint_digest"]
    assert spelt.key() == usual.key()


@pytest.mark.parametrize("path", ["models/ling", "/models/ling/..", "/models/ling2", "/Models/ling"])
def test_a_path_that_means_another_is_not(path: str) -> None:
    assert normalize_path(path) != "/models/ling"


def test_differences_come_in_the_order_of_reporting() -> None:
    assert fields(CacheConfig(**FULL), CacheConfig(**OTHER)) == list(FIELDS)


def test_unknown_and_missing_fields_are_refused() -> None:
    for broken in ({**FULL, "moe_dense_tp_size": 2}, {key: FULL[key] for key in FULL if key != "dtype"}):
        with pytest.raises(msgspec.ValidationError):
            CacheConfig.from_dict(broken)
    with pytest.raises(msgspec.ValidationError):
        CacheConfig.from_dict({**FULL, "tp_size": "8"})


def test_plain_data_and_back() -> None:
    config = CacheConfig(**FULL)
    assert CacheConfig.from_dict(config.to_dict()) == config
    assert list(config.to_dict()) == list(FIELDS)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=CacheConfig) == config


def test_equal_meaning_gives_an_equal_hash() -> None:
    assert stable_hash({"a": [1, 2], "b": {"c": None}}) == stable_hash({"b": {"c": None}, "a": (1, 2)})
    assert stable_hash({"a": {1, 2, 10}}) == stable_hash({"a": [1, 2, 10]})
    different = [{}, {"a": None}, {"a": 1}, {"a": 1.5}, {"a": "1"}, {"a": True}, {"a": [1]}, {"b": 1}, [1], "a"]
    assert len({stable_hash(value) for value in different}) == len(different)


def test_hashing_changes_nothing_and_refuses_what_has_no_canonical_form() -> None:
    value = {"b": [1, {"a": (2, 3)}], "a": {1}}
    before = repr(value)
    stable_hash(value)
    assert repr(value) == before
    with pytest.raises(TypeError):
        stable_hash({"a": object()})


def test_the_key_is_the_same_in_every_process() -> None:
    program = (
        "import sys, msgspec; from weightcache.fingerprint import CacheConfig, stable_hash;"
        "print(msgspec.json.decode(sys.argv[1], type=CacheConfig).key(), stable_hash({'a', 'b', 'c'}))"
    )
    argument = msgspec.json.encode(CacheConfig(**FULL))
    seen = {
        subprocess.run(
            [sys.executable, "-c", program, argument],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "4711")
    }
    assert seen == {f"{CacheConfig(**FULL).key()} {stable_hash({'a', 'b', 'c'})}\n".encode()}


def fingerprint(source: Checkpoint | Folder) -> CacheConfig:
    own = {"engine": "e", "layout_id": "e-1", "dtype": "bfloat16", "torch_version": "2.13.0"}
    return CacheConfig.from_dict({**identity.fields_of(source, "d"), **own})


def test_the_fingerprint_of_a_checkpoint(tmp_path: Path) -> None:
    folder = checkpoints.fp8(tmp_path / "t")
    config = fingerprint(Checkpoint.open(folder))
    assert config.model_path == str(folder)
    assert config.model_arch == "LlamaForCausalLM"
    assert (config.quant_method, config.checkpoint_digest) == ("fp8", "d")
    assert fingerprint(Folder.open(folder)) == config


@pytest.mark.parametrize("changes", [{"weight_block_size": [64, 64]}, {"ignored_layers": ["lm_head"]}])
def test_block_size_and_skip_list_are_in_it(tmp_path: Path, changes: dict[str, Any]) -> None:
    one = checkpoints.fp8(tmp_path / "one")
    other = checkpoints.fp8(tmp_path / "other", (), checkpoints.fp8_config(**changes))
    assert fields(fingerprint(Folder.open(one)), fingerprint(Folder.open(other))) == ["quant_config_hash"]


@pytest.mark.parametrize("architectures", [None, [], "LlamaForCausalLM", [1], {}])
def test_a_checkpoint_without_architecture_has_none(tmp_path: Path, architectures: Any) -> None:
    folder = checkpoints.plain(tmp_path / "t", architectures=architectures)
    with pytest.raises(CheckpointError) as caught:
        fingerprint(Folder.open(folder))
    assert caught.value.reason == "config_invalid"
