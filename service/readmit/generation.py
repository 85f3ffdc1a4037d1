"""Generation: one prompt at a time, token by token, with a KV cache."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from readmit.decoding import Decoder, GrowingDecoder
from readmit.detokenizer import Detokenizer


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens and when to end.

    Args:
        max_tokens: the most tokens to generate.
        temperature: 0 takes the likeliest token each time (greedy).
        top_p: choose among the likeliest tokens that together have this probability.
        seed: makes sampling repeatable.
        stop: strings that end the text; none of them is part of it.
        logprobs: how many alternatives to report for each token; None for no log-probabilities.
        ignore_eos: go on behind an end-of-text token, as vLLM and SGLang do when asked: a length that can be relied on.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    ignore_eos: bool = False


@dataclass(frozen=True)
class Step:
    """One generated token.

    ``text`` is what has become certain with it and may be empty. ``logprob`` and ``top`` (token text to
    log-probability, likeliest first) are natural logarithms under the model itself, before temperature; None when
    not asked for. ``finish`` is ``stop`` or ``length`` on the last step.
    """

    token: int
    text: str
    logprob: float | None
    top: dict[str, float] | None
    finish: str | None


class Generator:
    """A causal language model of transformers and its tokenizer. Not for more than one thread at a time."""

    def __init__(self, model: Any, tokenizer: Any, decoder: Decoder | None = None) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self._decoder = decoder or GrowingDecoder(model)
        self.context: int = self._decoder.context
        ends = model.generation_config.eos_token_id
        self._ends = set(ends if isinstance(ends, list) else [ends])

    def encode(self, text: str) -> list[int]:
        """The token ids of a text, special tokens as the tokenizer adds them."""
        ids: list[int] = self.tokenizer.encode(text)
        return ids

    def word(self, token: int) -> str:
        """The text of one token alone."""
        word: str = self.tokenizer.decode([token])
        return word

    @torch.inference_mode()
    def stream(self, prompt: Sequence[int], sampling: Sampling) -> Iterator[Step]:
        """Generate, one step a token.

        Args:
            prompt: at least one token id.
        """
        text = Detokenizer(self.tokenizer, prompt, sampling.stop)
        source = torch.Generator()
        source.manual_seed(sampling.seed) if sampling.seed is not None else source.seed()
        logits = self._decoder.prefill(prompt)
        for number in range(1, sampling.max_tokens + 1):
            token = _choose(logits, sampling, source)
            ended = token in self._ends and not sampling.ignore_eos
            piece = "" if ended else text.push(token)
            finish = "stop" if ended or text.stopped else "length" if number == sampling.max_tokens else None
            if finish and not text.stopped:
                piece += text.flush()
                finish = "stop" if text.stopped else finish
            logprob, top = self._logprobs(logits, token, sampling.logprobs)
            yield Step(token, piece, logprob, top, finish)
            if finish:
                return
            logits = self._decoder.step(token)

    def _logprobs(
        self, logits: torch.Tensor, token: int, alternatives: int | None
    ) -> tuple[float, dict[str, float]] | tuple[None, None]:
        if alternatives is None:
            return None, None
        logprobs = torch.log_softmax(logits, dim=-1)
        values, ids = logprobs.topk(alternatives)
        top = {self.word(int(index)): float(value) for value, index in zip(values, ids, strict=True)}
        return float(logprobs[token]), top


def _choose(logits: torch.Tensor, sampling: Sampling, source: torch.Generator) -> int:
    if sampling.temperature == 0:
        return int(logits.argmax())
    probabilities, ids = torch.softmax(logits / sampling.temperature, dim=-1).sort(descending=True)
    before = probabilities.cumsum(dim=-1) - probabilities
    probabilities[before >= sampling.top_p] = 0  # the likeliest token has nothing before it and always stays
    return int(ids[torch.multinomial(probabilities, 1, generator=source)])
