"""Where an engine's model lies: the folder that it was given, or the snapshot that a name on the hub stands for."""

import os
from collections.abc import Callable

from weightcache.checkpoint import Folder


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
