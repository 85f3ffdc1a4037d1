"""Tied embeddings: one rule for every spelling of the flag (bug log B20)."""

from pathlib import Path
from typing import Any

import pytest
from tests.fixtures import checkpoints

from weightcache.checkpoint import Checkpoint, Tie
from weightcache.errors import CheckpointError

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TRUE, FALSE = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}


def settings(top: bool | None, nested: bool | None) -> dict[str, Any]:
    config = checkpoints.config()
    del config["tie_word_embeddings"]
    if top is not None:
        config["tie_word_embeddings"] = top
    if nested is not None:
        config["text_config"] = {"tie_word_embeddings": nested}
    return config


def folder_with(tmp_path: Path, head: str, config: dict[str, Any]) -> Path:
    shards = checkpoints.decoder(head=False)
    if head != "none":
        embedding = shards[checkpoints.SHARDS[0]][EMBEDDING]
        other = checkpoints.tensor("head", "BF16", 512, 256)
        shards[checkpoints.SHARDS[1]][HEAD] = embedding if head == "equal" else other
    return checkpoints.write(tmp_path / "t", shards, config)


@pytest.mark.parametrize(
    ("head", "top", "nested", "tie"),
    [
        ("none", True, None, Tie(EMBEDDING, None)),
        ("none", None, True, Tie(EMBEDDING, None)),
        ("none", True, True, Tie(EMBEDDING, None)),
        ("none", True, False, Tie(EMBEDDING, None)),
        ("none", False, True, Tie(EMBEDDING, None)),
        ("none", None, None, None),
        ("equal", True, None, Tie(EMBEDDING, HEAD)),
        ("equal", None, True, Tie(EMBEDDING, HEAD)),
        ("equal", True, False, None),
        ("equal", False, None, None),
        ("other", True, False, None),
        ("other", False, True, None),
        ("other", False, None, None),
        ("other", None, None, None),
    ],
)
def test_the_rule(tmp_path: Path, head: str, top: bool | None, nested: bool | None, tie: Tie | None) -> None:
    assert Checkpoint.open(folder_with(tmp_path, head, settings(top, nested))).tie == tie


@pytest.mark.parametrize(
    ("head", "top", "nested"),
    [("other", True, None), ("other", None, True), ("other", True, True), ("none", False, None), ("none", None, False)],
)
def test_contradictions_are_refused(tmp_path: Path, head: str, top: bool | None, nested: bool | None) -> None:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder_with(tmp_path, head, settings(top, nested)))
    assert caught.value.reason == "tie_conflict"
    assert "tie_word_embeddings" in str(caught.value)


@pytest.mark.parametrize(
    "where",
    [
        {"llm_config": TRUE},
        {"language_config": TRUE},
        {"thinker_config": {"text_config": TRUE}},
        {"text_config": {"tie_word_embeddings": 1}},
    ],
)
def test_the_flag_is_found_wherever_the_language_model_is(tmp_path: Path, where: dict[str, Any]) -> None:
    config = {**settings(False, None), **where}
    assert Checkpoint.open(folder_with(tmp_path, "none", config)).tie == Tie(EMBEDDING, None)


@pytest.mark.parametrize("flag", ["true", "", 2, [True], {}])
def test_a_flag_that_is_neither_true_nor_false_is_refused(tmp_path: Path, flag: Any) -> None:
    with pytest.raises(CheckpointError, match="neither true nor false") as caught:
        Checkpoint.open(
            folder_with(tmp_path, "none", {**settings(None, None), "text_config": {"tie_word_embeddings": flag}})
        )
    assert (caught.value.reason, caught.value.data["key"]) == ("config_invalid", "text_config.tie_word_embeddings")


def test_a_head_of_another_shape_is_refused(tmp_path: Path) -> None:
    shards = checkpoints.decoder()
    shards[checkpoints.SHARDS[1]][HEAD] = checkpoints.tensor(HEAD, "BF16", 500, 256)
    folder = checkpoints.write(tmp_path / "t", shards, checkpoints.config(**TRUE))
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    assert caught.value.reason == "tie_conflict"
    assert "500" in str(caught.value)


def test_a_head_of_another_dtype_is_refused_even_if_its_bytes_are_equal(tmp_path: Path) -> None:
    shards = checkpoints.decoder(head=False)
    shards[checkpoints.SHARDS[1]][HEAD] = shards[checkpoints.SHARDS[0]][EMBEDDING]._replace(dtype="F16")
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(checkpoints.write(tmp_path / "t", shards, checkpoints.config(**TRUE)))
    assert caught.value.reason == "tie_conflict"


def test_a_model_that_does_not_generate_needs_no_head(tmp_path: Path) -> None:
    config = checkpoints.config(architectures=["LlamaModel"], **FALSE)
    folder = checkpoints.write(tmp_path / "t", checkpoints.decoder(head=False), config)
    assert Checkpoint.open(folder).tie is None


def test_a_head_under_another_name_is_left_to_the_architecture(tmp_path: Path) -> None:
    shards = checkpoints.decoder(head=False)
    shards[checkpoints.SHARDS[1]]["output.weight"] = checkpoints.tensor("output", "BF16", 512, 256)
    assert Checkpoint.open(checkpoints.write(tmp_path / "t", shards, checkpoints.config(**FALSE))).tie is None


def test_the_head_of_a_draft_layer_is_not_the_models(tmp_path: Path) -> None:
    shards = checkpoints.decoder(head=False)
    deeper = "model.layers.2.shared_head.lm_head.weight"
    shards[checkpoints.SHARDS[1]] |= {HEAD: shards[checkpoints.SHARDS[0]][EMBEDDING]}
    shards[checkpoints.SHARDS[1]] |= {deeper: checkpoints.tensor(deeper, "BF16", 512, 256)}
    folder = checkpoints.write(tmp_path / "t", shards, checkpoints.config(**TRUE))
    assert Checkpoint.open(folder).tie == Tie(EMBEDDING, HEAD)
