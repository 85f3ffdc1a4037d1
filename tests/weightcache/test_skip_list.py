"""Skip lists: the same layers under whatever names a config lists them, held against the stored dtypes."""

from pathlib import Path
from typing import Any

import pytest
from tests.fixtures import checkpoints

from weightcache import quantization
from weightcache.checkpoint import Checkpoint
from weightcache.errors import CheckpointError
from weightcache.skip_list import SkipList, normalize, role


def conflict(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        quantization.of(Checkpoint.open(folder))
    assert caught.value.reason == "quant_conflict"
    return caught.value


Q, K, V, O = (f"model.layers.0.self_attn.{name}_proj" for name in "qkvo")  # noqa: E741

SPELLINGS: dict[str, dict[str, list[str]]] = {
    "full names": {"modules_to_not_convert": [Q, K, V, O]},
    "full names of weights": {"modules_to_not_convert": [f"{name}.weight" for name in (Q, K, V, O)]},
    "a fused name": {"modules_to_not_convert": ["model.layers.0.self_attn.qkv_proj", O]},
    "a part of the name": {"modules_to_not_convert": ["layers.0.self_attn"]},
    "the module": {"modules_to_not_convert": ["model.layers.0.self_attn"]},
    "a multimodal prefix": {"modules_to_not_convert": ["model.language_model.layers.0.self_attn"]},
    "another multimodal prefix": {"modules_to_not_convert": ["language_model.model.layers.0.self_attn"]},
    "ignored_layers": {"ignored_layers": [Q, K, V, O]},
    "both keys": {"ignored_layers": [Q, K], "modules_to_not_convert": [V, O]},
    "with layers that are plain anyway": {"modules_to_not_convert": [Q, K, V, O, "lm_head", "model.norm"]},
}


@pytest.mark.parametrize("lists", SPELLINGS.values(), ids=SPELLINGS.keys())
def test_a_skip_list_is_understood_in_every_spelling(tmp_path: Path, lists: dict[str, list[str]]) -> None:
    folder = checkpoints.fp8(tmp_path / "t", ("layers.0.self_attn",), checkpoints.fp8_config(**lists))
    found = quantization.of(Checkpoint.open(folder))
    found.check_allowed()
    assert found.notes == ()
    assert all(found.skipped.covering(layer) for layer in (Q, K, V, O))
    assert not found.skipped.covering("model.layers.1.self_attn.q_proj")


def test_a_short_pattern_covers_every_layer(tmp_path: Path) -> None:
    config = checkpoints.fp8_config(modules_to_not_convert=["self_attn"])
    quantization.of(Checkpoint.open(checkpoints.fp8(tmp_path / "t", ("self_attn",), config))).check_allowed()
    error = conflict(checkpoints.fp8(tmp_path / "u", ("layers.0.self_attn",), config))
    assert "layers.1.self_attn" in error.data["tensor"]
    assert error.data["entry"] == "*.self_attn"


def test_a_layer_stored_plain_and_not_listed_is_refused(tmp_path: Path) -> None:
    error = conflict(checkpoints.fp8(tmp_path / "t", ("layers.0.self_attn",)))
    assert "layers.0.self_attn" in error.data["tensor"]
    assert "BF16" in str(error)
    assert error.data["entry"] is None


def test_one_part_of_a_fused_layer_stored_plain_everywhere_is_refused(tmp_path: Path) -> None:
    assert "k_proj" in conflict(checkpoints.fp8(tmp_path / "t", ("k_proj",))).data["tensor"]


def test_a_layer_stored_in_fp8_and_listed_is_refused(tmp_path: Path) -> None:
    config = checkpoints.fp8_config(modules_to_not_convert=["model.layers.1.mlp.down_proj"])
    error = conflict(checkpoints.fp8(tmp_path / "t", (), config))
    assert error.data["tensor"] == "model.layers.1.mlp.down_proj.weight"
    assert "layers.1.mlp.down_proj" in str(error)


def test_a_listed_name_that_matches_nothing_is_noted_once_and_covers_nothing(tmp_path: Path) -> None:
    config = checkpoints.fp8_config(modules_to_not_convert=["model.layers.0.attention"])
    conflict(checkpoints.fp8(tmp_path / "t", ("layers.0.self_attn",), config))
    found = quantization.of(Checkpoint.open(checkpoints.fp8(tmp_path / "u", (), config)))
    found.check_allowed()
    assert [note.count("layers.0.attention") for note in found.notes] == [1]


def test_a_router_that_is_plain_in_every_layer_needs_no_entry(tmp_path: Path) -> None:
    shards = checkpoints.decoder(quantized=True)
    for number, shard in enumerate(checkpoints.SHARDS):
        shards[shard] |= checkpoints.linear(f"model.layers.{number}.mlp.gate", 8, 256)
    config = checkpoints.config(quantization_config=checkpoints.fp8_config())
    quantization.of(Checkpoint.open(checkpoints.write(tmp_path / "t", shards, config))).check_allowed()


def test_names_match_by_whole_parts() -> None:
    skipped = SkipList(["model.layers.1", "gate"])
    assert skipped.covering("model.layers.1.mlp.up_proj")
    assert not skipped.covering("model.layers.10.mlp.up_proj")
    assert skipped.covering("model.layers.0.mlp.gate")
    assert not skipped.covering("model.layers.0.mlp.gate_proj")
    assert not SkipList(["model.layers.0.mlp"]).covering("mtp.layers.0.mlp.up_proj")


def test_a_fused_layer_is_covered_only_as_a_whole() -> None:
    fused = "model.layers.0.self_attn.qkv_proj"
    assert SkipList([Q, K, V]).covering(fused)
    assert not SkipList([Q, K]).covering(fused)
    assert SkipList([fused]).entries == SkipList([V, Q, K, K]).entries


def test_names_are_normalised() -> None:
    assert normalize("model.language_model.layers.0.mlp.gate_up_proj") == [
        "layers.0.mlp.gate_proj",
        "layers.0.mlp.up_proj",
    ]
    assert normalize("self_attn") == ["*.self_attn"]
    assert normalize("model") == normalize("model.language_model") == ["model"]
    assert role("model.layers.3.self_attn.k_proj") == role("model.layers.12.self_attn.qkv_proj")


def test_the_models_own_name_covers_all_that_is_below_it(tmp_path: Path) -> None:
    assert SkipList(["model"]).covering("model.layers.0.self_attn.qkv_proj") == ("model",) * 3
    assert SkipList(["model"]).covering("lm_head") == ()
    folder = checkpoints.fp8(tmp_path / "t", quantization=checkpoints.fp8_config(ignored_layers=["model"]))
    with pytest.raises(CheckpointError, match="skip list entry model says") as caught:
        quantization.of(Checkpoint.open(folder))
    assert caught.value.reason == "quant_conflict"


@pytest.mark.parametrize("listed", ["lm_head", {"a": 1}, [1], [None], [""], ["..."]])
def test_a_skip_list_that_is_none_is_refused(listed: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        SkipList.of({"ignored_layers": listed}, "quantization_config")
    assert caught.value.reason == "config_invalid"
