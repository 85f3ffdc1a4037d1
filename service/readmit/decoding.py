"""Decoding: what a model says of the next token, for one sequence at a time, from the KV cache of those before.

On a CPU the cache grows with its text. On a GPU it has a fixed size, so that a step can be captured once, as a CUDA
graph, and replayed for every token: no kernel then waits for Python.
"""

from collections.abc import Sequence
from types import MethodType
from typing import Any, Final, Protocol

import torch
from transformers import DynamicCache, StaticCache

from weightcache.errors import ConfigError

MAX_CONTEXT: Final = 4096
"""Tokens that a cache of fixed size holds: every step reads all of it, used or not."""
FEW_ROWS: Final = 128
"""Up to here a product with bfloat16 weights on a CPU is quicker with the weights as its left factor (measured)."""
_WARM_UP_RUNS: Final = 3
"""Forward passes before a capture, as torch's documentation of CUDA graphs asks for: libraries set themselves up."""


class Decoder(Protocol):
    """One sequence's model and cache. A new prompt takes the place of the sequence before."""

    context: int
    """Tokens that prompt and answer may have together."""

    def prefill(self, prompt: Sequence[int]) -> torch.Tensor:
        """Begin a sequence; the logits behind it: float32, on the CPU, one for each word of the vocabulary."""

    def step(self, token: int) -> torch.Tensor:
        """Go on with a token; the logits behind it."""


class GrowingDecoder:
    """A cache that grows with the text."""

    def __init__(self, model: Any) -> None:
        self.context: int = model.config.max_position_embeddings
        self._model = model
        self._cache: DynamicCache | None = None
        for layer in model.modules():
            plain = type(layer) is torch.nn.Linear and "bias" not in dict(layer.named_parameters())
            if plain and layer.weight.dtype == torch.bfloat16:
                layer.forward = MethodType(_weights_first, layer)

    def prefill(self, prompt: Sequence[int]) -> torch.Tensor:
        self._cache = DynamicCache(config=self._model.config)
        return self._forward(prompt)

    def step(self, token: int) -> torch.Tensor:
        return self._forward([token])

    @torch.inference_mode()
    def _forward(self, tokens: Sequence[int]) -> torch.Tensor:
        ids = torch.tensor([tokens], device=self._model.device)
        output = self._model(input_ids=ids, cache=self._cache, use_cache=True, logits_to_keep=1)
        logits: torch.Tensor = output.logits[0, -1].float().cpu()
        return logits


class StaticDecoder:
    """A cache of fixed size, and from `capture` on a step that is one CUDA graph.

    Args:
        model: on any device; only on a GPU a step can be captured.
        context: tokens that the cache holds, at most what the model can.
    """

    def __init__(self, model: Any, context: int = MAX_CONTEXT) -> None:
        self.context: int = min(context, model.config.max_position_embeddings)
        self._model = model
        self._cache = StaticCache(config=model.config, max_cache_len=self.context)
        self._token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits: torch.Tensor | None = None

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run the model once, without a cache: the first request shall not pay for what is set up on first use."""
        self._model(input_ids=self._token, use_cache=False, logits_to_keep=1)
        self._wait()

    def allocate(self) -> None:
        """Make the cache. Only the model knows the shapes of its layers' keys, so it is shown two tokens."""
        self.prefill([0, 0])
        self._wait()

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture a step.

        Raises:
            ConfigError: ``graph_capture``: this model needs values from the GPU in the middle of a step.
        """
        aside = torch.cuda.Stream(self._model.device)  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UP_RUNS):
                self._forward(self._token)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._logits = self._forward(self._token)
        except RuntimeError as error:
            raise ConfigError(
                "graph_capture",
                f"a step of {type(self._model).__name__} cannot be captured as a CUDA graph",
                expected="a model that needs no value from the GPU in the middle of a step",
                found=str(error).splitlines()[0],
                remedy="Start the engine with --eager",
            ) from error
        self._graph = graph
        self._cache.reset()  # type: ignore[no-untyped-call]
        self._wait()

    @torch.inference_mode()
    def prefill(self, prompt: Sequence[int]) -> torch.Tensor:
        self._cache.reset()  # type: ignore[no-untyped-call]
        return self._forward(torch.tensor([prompt], device=self._model.device)).cpu()

    @torch.inference_mode()
    def step(self, token: int) -> torch.Tensor:
        self._token.fill_(token)
        if self._graph is None or self._logits is None:
            return self._forward(self._token).cpu()
        self._graph.replay()
        return self._logits.cpu()

    def _forward(self, ids: torch.Tensor) -> torch.Tensor:
        output = self._model(input_ids=ids, cache=self._cache, use_cache=True, logits_to_keep=1)
        logits: torch.Tensor = output.logits[0, -1].float()
        return logits

    def _wait(self) -> None:
        """A phase ends when the GPU has done its work."""
        if self._token.is_cuda:
            torch.cuda.synchronize(self._token.device)


def _weights_first(layer: torch.nn.Linear, rows: torch.Tensor) -> torch.Tensor:
    """What the layer would give, with its weights as the left factor, as long as there are few rows.

    oneDNN repacks the right factor for every product, which with few rows takes longer than the product; and the last
    row of a prompt has the strides of all rows, with which it is twenty times slower than with a row of its own.
    """
    few = rows.reshape(-1, rows.shape[-1])
    if len(few) > FEW_ROWS:
        return torch.nn.functional.linear(rows, layer.weight)
    product = torch.mv(layer.weight, few[0]) if len(few) == 1 else torch.mm(layer.weight, few.t()).t().contiguous()
    return product.view(*rows.shape[:-1], -1)
