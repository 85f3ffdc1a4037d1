"""The refusal: why a checkpoint may not be loaded, a word from a closed list."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from weightcache.errors import CheckpointError

REASONS: Final = {
    "folder_missing": "there is no such folder",
    "config_missing": "the folder has no config.json",
    "config_invalid": "config.json, or another settings file beside it, is not what its name says",
    "index_invalid": "the index is not an object that maps tensor names to file names",
    "index_ambiguous": "several indices claim the folder",
    "revision_missing": "the revision asked for is not in this hub cache, or was never downloaded with its weights",
    "shard_missing": "a file of weights is not there",
    "link_dangling": "a link leads to a file that is not there",
    "path_escape": "a name in the index leaves the folder",
    "unreadable": "the operating system refuses to read",
    "not_safetensors": "the file is in another format, or its header is not a safetensors header",
    "truncated": "the file is shorter than its header promises",
    "geometry": "byte ranges overlap, leave holes or do not fit their shapes",
    "dtype": "a dtype is unknown, or has no torch type",
    "tensor_missing": "the index names a tensor that its file does not hold",
    "duplicate_tensor": "two files hold the same tensor, or one file names it twice",
    "empty": "the checkpoint holds no tensor",
    "tie_conflict": "the config's word on tied embeddings contradicts the files",
    "quant_conflict": "the config's word on quantised layers contradicts the files",
    "changed": "a file changed while it was in use",
}
"""Every reason a `CheckpointError` may carry, and what it means."""


def refusal(reason: str, message: str, **facts: Any) -> CheckpointError:
    """A `CheckpointError` whose reason is from the closed list."""
    if reason not in REASONS:
        raise ValueError(f"{reason!r} is not a reason to refuse a checkpoint: {sorted(REASONS)}")
    return CheckpointError(reason, message, **facts)


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn what the operating system says about `path` into a typed refusal.

    Raises:
        CheckpointError: ``unreadable``, with the system's own words as ``found``.
    """
    try:
        yield
    except OSError as error:
        raise refusal(
            "unreadable",
            f"{path} cannot be read",
            expected="a readable file",
            found=error.strerror or str(error),
            remedy="Check the permissions and the file system",
            file=path,
        ) from error
