"""The whitelist, in all spellings (bug log B17); skip lists (B21); blocks and scales (B22)."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.fixtures import checkpoints

from weightcache import quantization
from weightcache.checkpoint import Checkpoint, Folder
from weightcache.errors import CheckpointError, ConfigError, UnsupportedQuantForIPCError
from weightcache.quantization import Quantization
from weightcache.vocabulary import QUANT_FAMILIES

FP8 = checkpoints.fp8_config()
PER_TENSOR = {"quant_method": "fp8", "activation_scheme": "static"}
GROUPS = {"config_groups": {"group_0": {"weights": {"num_bits": 8}}}}


def announced(tmp_path: Path, **settings: Any) -> Quantization:
    """What a config announces, judged without a file of weights."""
    (tmp_path / "config.json").write_text(json.dumps(checkpoints.config(**settings)))
    return quantization.of(Folder.open(tmp_path))


def refused(found: Quantization, family: str, key: str) -> UnsupportedQuantForIPCError:
    with pytest.raises(UnsupportedQuantForIPCError) as caught:
        found.check_allowed()
    error = caught.value
    assert error.reason == "quant_not_allowed"
    assert error.detail == family
    assert family in QUANT_FAMILIES
    assert key in str(error)
    assert error.data["key"] == key
    assert "off" in str(error)
    return error


def test_no_quantisation_travels(tmp_path: Path) -> None:
    for settings in ({}, {"quantization_config": None}, {"text_config": {"dtype": "bfloat16"}}):
        found = announced(tmp_path, **settings)
        found.check_allowed()
        assert (found.method, found.config_hash, found.block_size) == ("none", None, None)


def test_block_wise_fp8_travels(tmp_path: Path) -> None:
    found = announced(tmp_path, quantization_config=FP8)
    found.check_allowed()
    assert (found.method, found.block_size) == ("fp8", (128, 128))
    assert found.config_hash is not None


def test_an_engine_that_quantises_otherwise_shares_nothing(tmp_path: Path) -> None:
    fp8 = announced(tmp_path, quantization_config=FP8)
    fp8.check_asked("fp8", "vLLM")
    announced(tmp_path).check_asked(None, "vLLM")
    for found, asked in ((fp8, None), (announced(tmp_path), "fp8")):
        with pytest.raises(UnsupportedQuantForIPCError, match="vLLM was told to quantise as it loads") as caught:
            found.check_asked(asked, "vLLM")
        assert (caught.value.detail, caught.value.found) == ("other", asked or "none")


def test_its_exact_nested_form_is_the_same(tmp_path: Path) -> None:
    nested = announced(tmp_path, text_config={"quantization_config": FP8})
    nested.check_allowed()
    assert nested.config_hash == announced(tmp_path, quantization_config=FP8).config_hash
    both = announced(tmp_path, quantization_config=FP8, text_config={"quantization_config": FP8})
    both.check_allowed()
    assert both.config_hash == nested.config_hash


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "per-tensor fp8": ({"quantization_config": PER_TENSOR}, "fp8_per_tensor", "quantization_config.weight_block_size"),
    "null block size": (
        {"quantization_config": {**FP8, "weight_block_size": None}},
        "fp8_per_tensor",
        "quantization_config.weight_block_size",
    ),
    "flat block size": (
        {"quantization_config": {**FP8, "weight_block_size": [128]}},
        "fp8_per_tensor",
        "quantization_config.weight_block_size",
    ),
    "block size of zero": (
        {"quantization_config": {**FP8, "weight_block_size": [0, 128]}},
        "fp8_per_tensor",
        "quantization_config.weight_block_size",
    ),
    "no method, block size": (
        {"quantization_config": {"weight_block_size": [128, 128]}},
        "other",
        "quantization_config.quant_method",
    ),
    "no method, groups": ({"quantization_config": GROUPS}, "compressed-tensors", "quantization_config.quant_method"),
    "empty config": ({"quantization_config": {}}, "other", "quantization_config.quant_method"),
    "config that is text": ({"quantization_config": "fp8"}, "other", "quantization_config.quant_method"),
    "capitals": (
        {"quantization_config": {**FP8, "quant_method": "FP8"}},
        "other",
        "quantization_config.quant_method",
    ),
    "compressed-tensors": (
        {"quantization_config": {"quant_method": "compressed-tensors", **GROUPS}},
        "compressed-tensors",
        "quantization_config.quant_method",
    ),
    "compressed-tensors, older key": (
        {"compression_config": {"quant_method": "compressed-tensors", **GROUPS}},
        "compressed-tensors",
        "compression_config.quant_method",
    ),
    "modelopt": (
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}},
        "modelopt",
        "quantization_config.quant_method",
    ),
    "modelopt, unnamed": (
        {"quantization_config": {"quant_algo": "NVFP4"}},
        "modelopt",
        "quantization_config.quant_method",
    ),
    "static activations": (
        {"quantization_config": {**FP8, "activation_scheme": "static"}},
        "other",
        "quantization_config.activation_scheme",
    ),
    "another format": ({"quantization_config": {**FP8, "fmt": "e5m2"}}, "other", "quantization_config.fmt"),
    "nested in the vision tower": (
        {"vision_config": {"quantization_config": FP8}},
        "other",
        "vision_config.quantization_config",
    ),
    "nested, per tensor": (
        {"text_config": {"quantization_config": PER_TENSOR}},
        "fp8_per_tensor",
        "text_config.quantization_config.weight_block_size",
    ),
    "nested more deeply": (
        {"thinker_config": {"text_config": {"quantization_config": {"quant_method": "awq"}}}},
        "awq",
        "thinker_config.text_config.quantization_config.quant_method",
    ),
    "two that differ": (
        {
            "quantization_config": FP8,
            "text_config": {"quantization_config": {**FP8, "weight_block_size": [64, 64]}},
        },
        "other",
        "text_config.quantization_config",
    ),
    "experts by a dtype": ({"expert_dtype": "fp4"}, "mxfp4", "expert_dtype"),
    "experts by a flag": ({"is_fp4_experts": True}, "mxfp4", "is_fp4_experts"),
    "experts beside fp8": ({"quantization_config": FP8, "expert_dtype": "fp4"}, "mxfp4", "expert_dtype"),
    "experts, nested": ({"text_config": {"moe_quant_method": "nvfp4"}}, "nvfp4", "text_config.moe_quant_method"),
    "a plain key": ({"quantization": "awq"}, "awq", "quantization"),
    "a plain key of bits": ({"load_in_4bit": True}, "bitsandbytes", "load_in_4bit"),
    "in a list": (
        {"blocks": [{}, {"quantization_config": {"quant_method": "awq"}}]},
        "awq",
        "blocks.1.quantization_config.quant_method",
    ),
    "an option nobody knows": (
        {"quantization_config": {**FP8, "rotation": True}},
        "other",
        "quantization_config.rotation",
    ),
    "a skip list under another name": (
        {"quantization_config": {**FP8, "exclude_modules": ["lm_head"]}},
        "other",
        "quantization_config.exclude_modules",
    ),
    "fp4 experts in an fp8 config": (
        {"quantization_config": {**FP8, "expert_dtype": "fp4"}},
        "mxfp4",
        "quantization_config.expert_dtype",
    ),
    "a cache's scheme too": (
        {"quantization_config": {**FP8, "kv_cache_scheme": {"num_bits": 8}}},
        "other",
        "quantization_config.kv_cache_scheme",
    ),
    "block size in fractions": (
        {"quantization_config": {**FP8, "weight_block_size": [128.0, 128.0]}},
        "fp8_per_tensor",
        "quantization_config.weight_block_size",
    ),
    "a list of configs": ({"quantization_config": [FP8]}, "other", "quantization_config.quant_method"),
}


@pytest.mark.parametrize(("settings", "family", "key"), REFUSED.values(), ids=REFUSED.keys())
def test_everything_else_is_refused_by_its_key(tmp_path: Path, settings: dict[str, Any], family: str, key: str) -> None:
    refused(announced(tmp_path, **settings), family, key)


@pytest.mark.parametrize(
    ("method", "family"),
    [
        ("awq", "awq"),
        ("awq_marlin", "marlin"),
        ("gptq", "gptq"),
        ("gptq_marlin", "marlin"),
        ("marlin", "marlin"),
        ("mxfp4", "mxfp4"),
        ("nvfp4", "nvfp4"),
        ("modelopt_fp4", "nvfp4"),
        ("bitsandbytes", "bitsandbytes"),
        ("gguf", "gguf"),
        ("fbgemm_fp8", "fp8_per_tensor"),
        ("compressed_tensors", "compressed-tensors"),
        ("hqq", "other"),
        ("fp8 ", "other"),
    ],
)
def test_methods_have_a_family(tmp_path: Path, method: str, family: str) -> None:
    config = {"quant_method": method, "weight_block_size": [128, 128]}
    refused(announced(tmp_path, quantization_config=config), family, "quantization_config.quant_method")


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("hf_quant_config.json", "modelopt"),
        ("quantize_config.json", "gptq"),
        ("quant_config.json", "awq"),
        ("quanto_qmap.json", "other"),
        ("quantization_config.json", "other"),
    ],
)
@pytest.mark.parametrize("settings", [{}, {"quantization_config": FP8}])
def test_a_file_beside_the_config_announces_too(
    tmp_path: Path, name: str, family: str, settings: dict[str, Any]
) -> None:
    (tmp_path / name).write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    refused(announced(tmp_path, **settings), family, name)


def test_a_damaged_file_beside_the_config_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "hf_quant_config.json").write_text("{")
    with pytest.raises(CheckpointError) as caught:
        announced(tmp_path)
    assert caught.value.reason == "config_invalid"


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "bfloat16", "torch_dtype": "torch.float16", "router_dtype": "float32"},
        {"mamba_ssm_cache_dtype": "fp8"},
        {"num_quantizers": 8, "quantizer_dropout": 0.1},
        {"use_quantized_head": False, "expert_dtype": None, "quantization": "none", "fp8": 0},
    ],
)
def test_other_keys_are_left_alone(tmp_path: Path, settings: dict[str, Any]) -> None:
    announced(tmp_path, **settings).check_allowed()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("model.layers.0.self_attn.q_proj.weight", "F8_E4M3"),
        ("model.layers.0.self_attn.q_proj.weight", "F8_E5M2"),
        ("model.layers.0.self_attn.q_proj.weight", "I8"),
        ("model.layers.0.mlp.experts.gate_up_proj_blocks", "U8"),
        ("model.layers.0.self_attn.q_proj.qweight", "I32"),
        ("model.layers.0.self_attn.q_proj.weight_packed", "I32"),
        ("model.layers.0.self_attn.q_proj.weight", "F4"),
    ],
)
def test_files_that_contradict_an_unquantised_config_are_refused(tmp_path: Path, name: str, dtype: str) -> None:
    shards = checkpoints.decoder()
    shards[checkpoints.SHARDS[0]][name] = checkpoints.tensor(name, dtype, 256, 256)
    folder = checkpoints.write(tmp_path / "t", shards, checkpoints.config())
    error = refused(
        quantization.of(Checkpoint.open(folder)), "other", f"the dtype of {name} in {checkpoints.SHARDS[0]}"
    )
    assert "contradicts" in str(error)
    assert dtype in str(error)


def test_integers_that_are_no_weights_do_not_contradict(tmp_path: Path) -> None:
    shards = checkpoints.decoder()
    shards[checkpoints.SHARDS[0]]["model.position_ids"] = checkpoints.tensor("ids", "I64", 1, 512)
    shards[checkpoints.SHARDS[0]]["model.mask"] = checkpoints.tensor("mask", "U8", 8, 8)
    quantization.of(Checkpoint.open(checkpoints.write(tmp_path / "t", shards, checkpoints.config()))).check_allowed()


def test_block_fp8_with_scales_in_another_format_is_a_quantisation_not_a_dtype(tmp_path: Path) -> None:
    shards = checkpoints.decoder(quantized=True)
    name = "model.layers.0.self_attn.q_proj.weight_scale_inv"
    shards[checkpoints.SHARDS[0]][name] = checkpoints.tensor(name, "F8_E8M0", 2, 2)
    folder = checkpoints.write(tmp_path / "t", shards, checkpoints.config(quantization_config=FP8))
    error = refused(
        quantization.of(Checkpoint.open(folder)), "other", f"the dtype of {name} in {checkpoints.SHARDS[0]}"
    )
    assert "F8_E8M0" in str(error)


def conflict(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        quantization.of(Checkpoint.open(folder))
    assert caught.value.reason == "quant_conflict"
    return caught.value


@pytest.mark.parametrize("how", ["gone", "an integer"])
def test_an_fp8_weight_without_scales_is_refused(tmp_path: Path, how: str) -> None:
    shards = checkpoints.decoder(quantized=True)
    name = "model.layers.0.self_attn.q_proj.weight"
    del shards[checkpoints.SHARDS[0]][f"{name}_scale_inv"]
    if how != "gone":
        shards[checkpoints.SHARDS[0]][f"{name}_scale_inv"] = checkpoints.tensor(name, "I32", 2, 2)
    folder = checkpoints.write(tmp_path / "t", shards, checkpoints.config(quantization_config=FP8))
    assert conflict(folder).data["tensor"] == name


def test_an_fp8_config_over_plain_weights_is_refused(tmp_path: Path) -> None:
    conflict(checkpoints.plain(tmp_path / "t", quantization_config=FP8))


STATE = [
    "input_scale", "weight_scale", "weight_scale_2", "k_scale", "v_scale", "weight.absmax", "weight.quant_map",
    "weight.SCB", "qzeros", "g_idx",
]  # fmt: skip


@pytest.mark.parametrize("state", [*STATE, "weight_scale_inv"])
@pytest.mark.parametrize("quantized", [False, True])
def test_a_tensor_that_only_quantisers_write_announces_one(tmp_path: Path, state: str, quantized: bool) -> None:
    shards = checkpoints.decoder(quantized=quantized)
    name = f"model.layers.7.mlp.up_proj.{state}"
    shards[checkpoints.SHARDS[1]][name] = checkpoints.tensor(name, "F32", 1)
    settings = checkpoints.config(**({"quantization_config": FP8} if quantized else {}))
    checkpoint = Checkpoint.open(checkpoints.write(tmp_path / "t", shards, settings))
    if quantized and state == "weight_scale_inv":
        with pytest.raises(CheckpointError, match="scale of no FP8 weight") as caught:
            quantization.of(checkpoint)
        assert (caught.value.reason, caught.value.data["tensor"]) == ("quant_conflict", name)
        return
    verdict = quantization.of(checkpoint).verdict
    assert verdict is not None
    assert name in verdict.key


def test_the_hash_is_of_the_meaning(tmp_path: Path) -> None:
    q, k, v = (f"model.layers.0.self_attn.{name}_proj" for name in "qkv")

    def hashed(**changes: Any) -> str | None:
        return announced(tmp_path, quantization_config=checkpoints.fp8_config(**changes)).config_hash

    assert hashed(modules_to_not_convert=[q, k, v]) == hashed(ignored_layers=[v, k, q, q])
    assert hashed(modules_to_not_convert=[q, k, v]) == hashed(ignored_layers=["model.layers.0.self_attn.qkv_proj"])
    assert hashed(modules_to_not_convert=None) == hashed(ignored_layers=[]) == hashed()
    assert hashed(modules_to_not_convert=[q]) != hashed()
    assert hashed(weight_block_size=[64, 128]) != hashed()
    assert hashed(scale_fmt="ue8m0") != hashed()
    assert hashed(fmt="float8_e4m3fn") == hashed(fmt="e4m3")


@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (2, 3), (4,), (2, 2, 1), ()])
def test_scales_of_another_shape_are_refused_before_anything_loads(tmp_path: Path, shape: tuple[int, ...]) -> None:
    shards = checkpoints.decoder(quantized=True)
    name = "model.layers.0.self_attn.q_proj.weight"
    shards[checkpoints.SHARDS[0]][f"{name}_scale_inv"] = checkpoints.tensor(name, "F32", *shape)
    folder = checkpoints.write(tmp_path / "t", shards, checkpoints.config(quantization_config=FP8))
    with pytest.raises(ConfigError) as caught:
        quantization.of(Checkpoint.open(folder))
    assert caught.value.reason == "shard_block_mismatch"
    assert caught.value.data["layer"] == name
    assert caught.value.data["block"] == (128, 128)
    assert "[2, 2]" in str(caught.value)


def test_a_short_last_block_is_legal(tmp_path: Path) -> None:
    shards = checkpoints.decoder(quantized=True)
    shards[checkpoints.SHARDS[1]] |= checkpoints.linear("model.extra", 320, 200, quantized=True)
    folder = checkpoints.write(tmp_path / "t", shards, checkpoints.config(quantization_config=FP8))
    quantization.of(Checkpoint.open(folder)).check_allowed()
