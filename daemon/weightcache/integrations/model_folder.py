"""Where an engine's model lies, and what its files hold before and after they were read.

The folder is the one that the engine was given, or the snapshot that a name on the hub stands for.
"""

import os
from collections.abc import Callable

from weightcache.checkpoint import Folder
from weightcache.errors import CheckpointError
from weightcache.identity import digest_of, know_digest


def model_folder(model: str, revision: str | None, download_dir: str | None, download: Callable[[], None]) -> Folder:
    """The checkpoint's folder.

    Args:
        model: a folder, or a name on the hub (``org/name``).
        revision: of a model on the hub; a folder has none.
        download_dir: the engine's own hub cache, None for everybody's.
        download: called for a name, and has the files in the cache afterwards.

    Raises:
        CheckpointError: see `Folder.open`.
    """
    if os.path.isdir(model):
        return Folder.open(model)
    download()
    cached = os.path.join(download_dir, f"models--{model.replace('/', '--')}") if download_dir else model
    return Folder.open(cached, revision)


def digest_before(folder: Folder, *, shared: bool) -> str | None:
    """What the files hold, for weights that may be shared at the cost of reading them all once.

    Raises:
        CheckpointError: the files are bad.
    """
    return know_digest(folder) if shared else digest_of(folder).digest


def require_unchanged(folder: Folder, digest: str | None) -> None:
    """Check, after a load, that what the files held before it, if anybody knew, is what they hold now.

    Raises:
        CheckpointError: ``changed``.
    """
    if digest is not None and digest_of(folder).digest != digest:
        raise CheckpointError(
            "changed",
            f"the files of {folder.path} changed while the model was loaded",
            expected=f"content {digest}",
            found="files written to since it was determined",
            remedy="Do not write to a checkpoint in use; start again",
            path=folder.path,
        )
