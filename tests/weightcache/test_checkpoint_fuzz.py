"""Whatever the bytes: a typed error or a checkpoint whose every tensor can be read. Nothing else."""

import json
import math
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from tests.fixtures import checkpoints

from weightcache import identity, quantization
from weightcache.checkpoint import DTYPES, REASONS, Checkpoint
from weightcache.errors import CheckpointError, ConfigError

FILE = "model.safetensors"
bounded = settings(
    max_examples=150, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

numbers = st.one_of(st.integers(-2, 20), st.sampled_from([2**31, 2**63, 2**64, 10**30]))
scalars = st.one_of(st.none(), st.booleans(), numbers, st.floats(), st.text(max_size=4))
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)
names = st.sampled_from(["a", "b", "lm_head.weight", "model.embed_tokens.weight", "__metadata__", "", "é", "\ud800"])
dtypes = st.sampled_from(["U8", "BF16", "F32", "F4", "F8_E4M3", "BOOL", "X"])
entries = st.fixed_dictionaries(
    {"dtype": dtypes | anything, "shape": st.lists(numbers, max_size=3) | anything},
    optional={"data_offsets": st.lists(numbers, min_size=1, max_size=3) | anything, "more": anything},
)
headers = st.dictionaries(names, entries | anything, max_size=4) | anything
indices = st.fixed_dictionaries({"weight_map": st.dictionaries(names, names | anything, max_size=4) | anything})


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that have just been written count as if nobody would write them again: waiting for that is not tested."""
    monkeypatch.setattr("weightcache.checkpoint.stamp.CLOCK_TICK_NS", 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(checkpoints.config()))
    return tmp_path


def opens(folder: Path) -> bool:
    """Whether a checkpoint opens, reads and is judged without any but a typed error."""
    error = first_error(folder)
    if error is None:
        return True
    assert error.reason in REASONS or isinstance(error, ConfigError)
    json.dumps(error.to_dict())
    assert str(error)
    return False


def first_error(folder: Path) -> CheckpointError | ConfigError | None:
    try:
        checkpoint = Checkpoint.open(folder)
        for _ in checkpoint.read():
            pass
        quantization.of(checkpoint)
        identity.fields_of(checkpoint, checkpoint.digest)
    except (CheckpointError, ConfigError) as error:
        return error
    return None


def library_opens(path: Path) -> bool:
    try:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                file.get_tensor(name)
    except (SafetensorError, OSError):
        return False
    return True


@seed(1)
@bounded
@given(header=headers, data=st.binary(max_size=40))
def test_any_header(folder: Path, header: Any, data: bytes) -> None:
    checkpoints.write_raw(folder / FILE, header, data)
    if opens(folder):
        assert library_opens(folder / FILE)


@st.composite
def nearly_good(draw: st.DrawFn) -> tuple[dict[str, Any], bytes]:
    """A header whose ranges fit, with at most one thing wrong, and its data."""
    header: dict[str, Any] = {}
    at = 0
    for name in draw(st.lists(st.sampled_from("abcde"), unique=True, max_size=4)):
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        nbytes = math.prod(shape) * DTYPES[dtype].bits // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    data = draw(st.binary(min_size=at, max_size=at)).translate(bytes(byte & 1 for byte in range(256)))
    if header and draw(st.booleans()):
        entry = header[draw(st.sampled_from(sorted(header)))]
        where = draw(st.sampled_from(["dtype", "shape", "begin", "end", "size"]))
        if where in ("begin", "end"):
            entry["data_offsets"][where == "end"] += draw(st.integers(-2, 2))
        elif where == "size":
            data += b"\0"
        else:
            entry[where] = draw(anything)
    return header, data


@seed(6)
@bounded
@given(file=nearly_good())
def test_any_file_that_is_nearly_good(folder: Path, file: tuple[dict[str, Any], bytes]) -> None:
    checkpoints.write_raw(folder / FILE, *file)
    # The library reads an empty file as a checkpoint, and packs half bytes over rows.
    if opens(folder):
        assert library_opens(folder / FILE)
    elif library_opens(folder / FILE):
        assert not file[0] or any(entry["dtype"] == "F4" for entry in file[0].values())


@seed(2)
@bounded
@given(raw=st.binary(max_size=64), length=st.one_of(st.none(), st.integers(0, 2**64 - 1), st.integers(0, 64)))
def test_any_bytes(folder: Path, raw: bytes, length: int | None) -> None:
    (folder / FILE).write_bytes(raw if length is None else struct.pack("<Q", length) + raw)
    opens(folder)


@seed(3)
@bounded
@given(at=st.integers(0, 2000), byte=st.integers(0, 255))
def test_any_byte_of_a_header_changed(tmp_path_factory: pytest.TempPathFactory, at: int, byte: int) -> None:
    folder = tmp_path_factory.getbasetemp() / "changed"
    if not folder.exists():
        checkpoints.write(folder, {FILE: {
            name: checkpoints.tensor(name, "BF16", 3, 2) for name in "abc"
        }}, checkpoints.config(), index=False)  # fmt: skip
        shutil.copy(folder / FILE, folder / "good")
    raw = bytearray((folder / "good").read_bytes())
    raw[at % len(raw)] = byte
    (folder / FILE).write_bytes(raw)
    if opens(folder):
        assert library_opens(folder / FILE)


@seed(4)
@bounded
@given(index=indices | anything)
def test_any_index(folder: Path, index: Any) -> None:
    if not (folder / FILE).exists():
        checkpoints.write_file(folder / FILE, {"a": checkpoints.tensor("a", "BF16", 3, 2)})
    (folder / checkpoints.INDEX).write_text(json.dumps(index))
    opens(folder)


keys = st.sampled_from(
    ["quantization_config", "text_config", "quant_method", "weight_block_size", "ignored_layers", "architectures",
     "tie_word_embeddings", "expert_dtype", "compression_config", "is_fp4_experts"]
)  # fmt: skip
configs = st.recursive(
    st.one_of(scalars, st.sampled_from(["fp8", "FP8", [128, 128], ["lm_head"], ["LlamaForCausalLM"]])),
    lambda inner: st.dictionaries(keys, inner, max_size=5),
)


@seed(5)
@bounded
@given(config=st.dictionaries(keys, configs, max_size=6))
def test_any_config(folder: Path, config: dict[str, Any]) -> None:
    if not (folder / FILE).exists():
        tensors = {
            "model.embed_tokens.weight": checkpoints.tensor("embed", "BF16", 4, 4),
            "model.a.weight": checkpoints.tensor("a", "F8_E4M3", 4, 4),
            "model.a.weight_scale_inv": checkpoints.tensor("scale", "F32", 1, 1),
        }
        checkpoints.write_file(folder / FILE, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    opens(folder)
