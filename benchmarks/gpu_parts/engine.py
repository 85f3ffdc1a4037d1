"""A language model of transformers on the GPU, from its checkpoint and from the cache: the same tokens each time."""

import time
from pathlib import Path
from typing import Any

import torch

from gpu_parts.processes import Talk, cuda_context

TOKENS = 16


def make_checkpoint(talk: Talk, folder: Path) -> int:
    """A Llama of 0.4 B parameters with random weights; its bytes."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(5)
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=32000,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        dtype=torch.bfloat16,
    )
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    time.sleep(2.1)  # younger files could still change unseen, so no digest of theirs is remembered
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def load_and_generate(talk: Talk, folder: Path, mode: str) -> dict[str, Any]:
    """Load, generate greedily, then the same with the forward pass captured as a CUDA graph."""
    from weightcache.integrations.transformers import from_pretrained

    cuda_context(torch.device("cuda", 0))
    began = time.perf_counter()
    model, outcome = from_pretrained(folder, mode=mode, device="cuda:0")
    torch.cuda.synchronize()
    loaded = time.perf_counter() - began
    prompt = list(range(100, 132))
    eager = _greedy(model, prompt)
    captured = _greedy_captured(model, prompt)
    return {
        "load_s": loaded,
        "path": outcome.path,
        "reason": outcome.reason,
        "detail": outcome.detail,
        "private_because": outcome.private_because,
        "generation": outcome.generation,
        "phases": outcome.phases,
        "tokens": eager,
        "captured_tokens": captured,
    }


@torch.inference_mode()
def _greedy(model: Any, prompt: list[int]) -> list[int]:
    """Tokens chosen one by one, each from a whole forward pass over a window of fixed length."""
    ids = torch.tensor([prompt], device="cuda")
    chosen = []
    for _ in range(TOKENS):
        token = model(input_ids=ids, use_cache=False).logits[0, -1].argmax()
        chosen.append(int(token))
        ids = torch.cat([ids[:, 1:], token.view(1, 1)], dim=1)
    return chosen


@torch.inference_mode()
def _greedy_captured(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt], device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            model(input_ids=ids, use_cache=False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        best = model(input_ids=ids, use_cache=False).logits[0, -1].argmax()
    chosen = []
    for _ in range(TOKENS):
        graph.replay()
        chosen.append(int(best))
        ids.copy_(torch.cat([ids[:, 1:], best.view(1, 1)], dim=1))
    return chosen
