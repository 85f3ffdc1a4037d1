"""Text from tokens as they come."""

from collections.abc import Sequence
from typing import Any, Final

_CONTEXT: Final = 4
"""Prompt tokens decoded along with the first new one: tokenizers treat spaces at a text's start differently."""
_INCOMPLETE: Final = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Whole characters only, and nothing from a stop string on.

    Args:
        tokenizer: a transformers tokenizer.
        prompt: the token ids that come before.
        stop: strings that end the text; none of them is part of it.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._ids = list(prompt[-_CONTEXT:])
        self._window, self._read = 0, len(self._ids)
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that has become certain with this token; often empty."""
        self._ids.append(token)
        if self._decode(self._window, len(self._ids)).endswith(_INCOMPLETE):
            return ""
        return self._release(self._fresh())

    def flush(self) -> str:
        """The rest, when no token follows: held back for a stop string or a character that never came."""
        text = self._release(self._fresh())
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _fresh(self) -> str:
        text = self._decode(self._window, len(self._ids))[len(self._decode(self._window, self._read)) :]
        self._window, self._read = self._read, len(self._ids)
        return text

    def _release(self, text: str) -> str:
        text = self._held + text
        cuts = [place for place in map(text.find, self._stop) if place >= 0]
        if cuts:
            self.stopped = True
            self._held = ""
            return text[: min(cuts)]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _decode(self, start: int, end: int) -> str:
        ids = self._ids[start:end]
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of ``text`` could be the beginning of ``stop``."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
