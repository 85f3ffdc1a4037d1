"""The tie: an output head that shares the input embedding's storage.

The flag ``tie_word_embeddings`` stands at the top of a config or in the section of its language model (``text_config``
and other names), sometimes in both with different values. The files settle it, by one rule for whoever asks:

- The files hold no head: it is tied if the flag is true at either level, since nothing else can give it values. False
  wherever it stands would leave the head random, and is refused. Without the flag, the architecture decides.
- The files hold a head, and the flag is true wherever it stands: the two must be equal, and are tied.
- The files hold a head, and the flag is false at either level or stands nowhere: the files' own head is used.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

from weightcache.checkpoint.header import TensorInfo
from weightcache.checkpoint.refusal import refusal

FLAG: Final = "tie_word_embeddings"
_EMBEDDINGS: Final = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight", "shared.weight")
_LANGUAGE_SECTIONS: Final = ("text_config", "language_config", "llm_config", "thinker_config")
"""Where multimodal models keep the config of their language model."""
_HEADS: Final = ("lm_head.weight", "embed_out.weight")


class Tie(NamedTuple):
    """Two names for one tensor. ``head`` is None where the files hold only the embedding."""

    embedding: str
    head: str | None


def find_tie(
    config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], equal: Callable[[TensorInfo, TensorInfo], bool]
) -> Tie | None:
    """The tie in a checkpoint, or None where head and embedding are two tensors.

    Args:
        config: ``config.json``.
        tensors: the checkpoint's tensors.
        equal: whether two tensors hold the same bytes; called only where flag and files do not settle it.

    Raises:
        CheckpointError: ``tie_conflict``; ``config_invalid`` for a flag that is neither true nor false.
    """
    flags = {
        where: _flag(where, section[FLAG]) for where, section in _sections(config) if section.get(FLAG) is not None
    }
    embedding = _shortest(tensors, _EMBEDDINGS)
    head = _shortest(tensors, _HEADS)
    if embedding is None or not flags:
        return None
    said = ", ".join(f"{where} {str(flag).lower()}" for where, flag in flags.items())
    if head is None:
        if any(flags.values()):
            return Tie(embedding, None)
        if not _generates(config) or _has_other_head(tensors, embedding):
            return None
        raise refusal(
            "tie_conflict",
            "The output head is neither in the files nor tied to the embedding, so it would stay random",
            expected=f"lm_head.weight, or {FLAG} true",
            found=said,
            remedy="Correct the config, or download the file that holds the head",
            tensor=embedding,
        )
    if not all(flags.values()):
        return None
    here, there = tensors[embedding], tensors[head]
    if (here.dtype, here.shape) == (there.dtype, there.shape) and equal(here, there):
        return Tie(embedding, head)
    raise refusal(
        "tie_conflict",
        f"{head} in {there.file} differs from {embedding} in {here.file}, though the config ties them",
        expected=f"equal tensors, as {said} says",
        found=f"{there.dtype} {list(there.shape)} and {here.dtype} {list(here.shape)} with other bytes",
        remedy=f"Set {FLAG} to false to use the head in the files, or remove the head from them",
        file=there.file,
        tensor=head,
    )


def _flag(where: str, value: object) -> bool:
    if value in (True, False):  # 0 and 1 are those too, to every engine
        return bool(value)
    raise refusal(
        "config_invalid",
        f"{where} in config.json is neither true nor false",
        expected="true or false",
        found=ascii(value)[:200],
        remedy="Correct config.json",
        file="config.json",
        key=where,
    )


def _sections(config: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Mapping[str, Any]]]:
    yield f"{prefix}{FLAG}", config
    for name in _LANGUAGE_SECTIONS:
        nested = config.get(name)
        if isinstance(nested, Mapping):
            yield from _sections(nested, f"{prefix}{name}.")


def _generates(config: Mapping[str, Any]) -> bool:
    names = config.get("architectures")
    return isinstance(names, list) and any(
        isinstance(name, str) and name.endswith(("ForCausalLM", "ForConditionalGeneration")) for name in names
    )


def _has_other_head(tensors: Mapping[str, TensorInfo], embedding: str) -> bool:
    """Whether a head may be there under another name: called so, or as large as the embedding and in no layer."""
    for name, info in tensors.items():
        in_layer = any(part.isdigit() for part in name.split("."))
        if name != embedding and ("head" in name or (info.shape == tensors[embedding].shape and not in_layer)):
            return True
    return False


def _shortest(tensors: Mapping[str, TensorInfo], endings: tuple[str, ...]) -> str | None:
    """The least nested tensor with one of these names: draft heads and towers have their own, deeper down."""
    below = tuple(f".{ending}" for ending in endings)
    found = [name for name in tensors if name.endswith(below) or name in endings]
    return min(found, key=lambda name: (name.count("."), name), default=None)
