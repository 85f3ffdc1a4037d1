"""The document: JSON read strictly, for files that others wrote."""

import json
from types import NoneType
from typing import Any

from weightcache.checkpoint.refusal import reading, refusal


def read_object(path: str, reason: str, tensors: type = NoneType) -> dict[str, Any]:
    """The JSON object in the file at `path`; see `parse_object`.

    Raises:
        CheckpointError: `reason` where the text is not a JSON object; ``duplicate_tensor``; ``unreadable``.
    """
    with reading(path), open(path, "rb") as file:
        raw = file.read()
    return parse_object(raw, path, reason, tensors)


def parse_object(raw: bytes, path: str, reason: str, tensors: type = NoneType) -> dict[str, Any]:
    """The JSON object in `raw`. A key that appears twice is an error: which of the two counts, no two readers agree on.

    Args:
        raw: the text.
        path: the file it is from.
        reason: of the refusal.
        tensors: the type of what stands under the name of a tensor, where the text has such.

    Raises:
        CheckpointError: ``duplicate_tensor`` for a tensor that is named twice, otherwise `reason`.
    """
    try:
        found = json.loads(raw.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except _DoubledKeyError as error:
        twice = isinstance(error.value, tensors)
        raise refusal(
            "duplicate_tensor" if twice else reason,
            f"{path} names {error.key!a} twice",
            expected="one entry",
            found="two entries",
            remedy="Write the file again, or download it again",
            file=path,
            **({"tensor": error.key} if twice else {"key": error.key}),
        ) from None
    except (ValueError, RecursionError) as error:
        raise refusal(
            reason,
            f"{path} is not valid JSON",
            expected="a JSON object in UTF-8",
            found=str(error),
            remedy="Download the file again",
            file=path,
        ) from error
    if not isinstance(found, dict):
        raise refusal(
            reason,
            f"{path} is not a JSON object",
            expected="a JSON object",
            found=type(found).__name__,
            remedy="Download the file again",
            file=path,
        )
    return found


class _DoubledKeyError(Exception):
    def __init__(self, key: str, value: object) -> None:
        self.key = key
        self.value = value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")  # Python writes and reads NaN and Infinity, others do not


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    built = dict(pairs)
    if len(built) != len(pairs):
        seen: set[str] = set()
        for key, value in pairs:
            if key in seen:
                raise _DoubledKeyError(key, value)
            seen.add(key)
    return built
