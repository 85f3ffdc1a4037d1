"""Small random checkpoints of real architectures, written by transformers' own classes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import transformers

_COMMON: Final[dict[str, Any]] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _llama() -> Any:
    return transformers.LlamaConfig(**_COMMON, tie_word_embeddings=True)


def _qwen3() -> Any:
    return transformers.Qwen3Config(**_COMMON, tie_word_embeddings=False)


def _qwen3_moe() -> Any:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    return transformers.Qwen3MoeConfig(**_COMMON, **experts, tie_word_embeddings=False)


ARCHITECTURES: Final[dict[str, Callable[[], Any]]] = {"llama": _llama, "qwen3": _qwen3, "qwen3_moe": _qwen3_moe}


def write(architecture: str, folder: Path, *, tokenizer_of: Path | None = None) -> Path:
    """Write a checkpoint in bf16; the same architecture gives the same bytes.

    Args:
        architecture: one of `ARCHITECTURES`.
        folder: the folder to make.
        tokenizer_of: a checkpoint whose tokenizer and vocabulary it gets.
    """
    torch.manual_seed(7)
    config = ARCHITECTURES[architecture]()
    if tokenizer_of is not None:
        config.vocab_size = json.loads((tokenizer_of / "config.json").read_text())["vocab_size"]
        folder.mkdir(parents=True, exist_ok=True)
        for file in tokenizer_of.glob("tokenizer*.json"):
            shutil.copy(file, folder)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # wide enough that greedy decoding does not hang on rounding
                parameter.normal_(0, 0.25)
    model.save_pretrained(folder)
    return folder
