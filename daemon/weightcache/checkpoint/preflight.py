"""The preflight: what index and headers can tell about a checkpoint, before any tensor is allocated or mapped."""

import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from weightcache.checkpoint.folder import Folder, leads_nowhere
from weightcache.checkpoint.header import TensorInfo, read_header
from weightcache.checkpoint.inventory import equal_bytes, take_inventory
from weightcache.checkpoint.part import Part
from weightcache.checkpoint.refusal import reading, refusal
from weightcache.checkpoint.stamp import Stamp, settle, stamp_file, stamp_of, stamp_open
from weightcache.checkpoint.tied import Tie, find_tie
from weightcache.errors import CheckpointError

if TYPE_CHECKING:
    import torch

log = logging.getLogger("weightcache.checkpoint")


class Checkpoint:
    """A checkpoint whose index, headers, names and ties have been found good.

    Attributes:
        path: the folder as asked for, absolute; ``folder`` has where it leads.
        folder: the resolved folder.
        config: ``config.json``.
        revision: the commit of the hub snapshot that was opened, or None.
        files: the stamps of the weight files, by name, from when their headers were read.
        settled: whether a write since then is sure to show in the stamps of files and index.
        tensors: name to `TensorInfo`, in the order of files and positions.
        tie: head and embedding that share one tensor, or None.
        total_bytes: the size of all tensors.
        notes: what is odd but harmless, a sentence each.
        digest: content identity (`weightcache.digest`), known after a complete `read`.
    """

    def __init__(
        self,
        folder: Folder,
        files: tuple[Stamp, ...],
        settled: bool,
        tensors: dict[str, TensorInfo],
        tie: Tie | None,
        notes: tuple[str, ...],
    ) -> None:
        self.folder = folder
        self.path = folder.path
        self.config = folder.config
        self.revision = folder.revision
        self.files = files
        self.settled = settled
        self.tensors = tensors
        self.tie = tie
        self.notes = notes
        self.total_bytes = sum(info.nbytes for info in tensors.values())
        self.digest: str | None = None

    @classmethod
    def open(cls, path: str | os.PathLike[str] | Folder, revision: str | None = None) -> "Checkpoint":
        """Check a checkpoint and describe it. Reads index and headers; no tensor, unless two must be compared.

        Args:
            path: a folder, or what else `Folder.open` understands.
            revision: the revision wanted of a hub cache's folder.

        Raises:
            CheckpointError: with a reason from `weightcache.checkpoint.REASONS`.
        """
        folder = path if isinstance(path, Folder) else Folder.open(path, revision)
        stamps = _find_shards(folder)
        settled = folder.index_settled and settle(stamps)
        opened = [_open_shard(folder, name) for name in folder.shards]
        files = [file for file, _ in opened]
        tensors = take_inventory(folder, [header for _, header in opened])
        if not tensors:
            raise refusal("empty", f"{folder.path} holds no tensor", expected="tensors", found="none", path=folder.path)
        notes = _notes(folder, tensors)
        for note in notes:
            log.warning("%s", note)
        tie = find_tie(folder.config, tensors, partial(equal_bytes, folder))
        return cls(folder, tuple(files), settled and files == stamps, tensors, tie, notes)

    def read(self) -> "Iterator[tuple[str, torch.Tensor]]":
        """Every tensor, in the order of `tensors`, read once into private memory; see `weightcache.checkpoint.reader`.

        Raises:
            CheckpointError: ``changed``, ``truncated`` or ``unreadable``.
        """
        from weightcache.checkpoint.reader import read_tensors

        return read_tensors(self)

    def read_parts(self, part_of: Callable[[str], Part | None]) -> "Iterator[tuple[str, torch.Tensor]]":
        """One rank's part of every tensor, and no other byte; see `weightcache.checkpoint.reader`.

        Raises:
            CheckpointError: ``changed``, ``truncated`` or ``unreadable``.
        """
        from weightcache.checkpoint.reader import read_parts

        return read_parts(self, part_of)

    def stamp(self) -> tuple[Stamp, ...]:
        """The files as they are now.

        Raises:
            CheckpointError: ``unreadable``.
        """
        return tuple(stamp_file(self.folder.root, file.name) for file in self.files)


def _open_shard(folder: Folder, name: str) -> tuple[Stamp, dict[str, TensorInfo]]:
    path = folder.locate(name)
    with reading(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        file = stamp_open(descriptor, name, path)
        return file, read_header(descriptor, name, path, file.size)
    finally:
        os.close(descriptor)


def _find_shards(folder: Folder) -> list[Stamp]:
    """Find every weight file.

    Raises:
        CheckpointError: ``shard_missing``, ``link_dangling``, ``not_safetensors`` (no regular file) or ``unreadable``.
    """
    missing: list[str] = []
    dangling: list[str] = []
    stamps: list[Stamp] = []
    for name in folder.shards:
        path = folder.locate(name)
        try:
            status = os.stat(path)
        except OSError as error:
            if not leads_nowhere(error):
                with reading(path):
                    raise
            (dangling if os.path.islink(path) else missing).append(name)
            continue
        if not stat.S_ISREG(status.st_mode):
            raise refusal(
                "not_safetensors",
                f"{path} is not a regular file",
                expected="a file",
                found="a folder" if stat.S_ISDIR(status.st_mode) else "a device, pipe or socket",
                file=path,
            )
        stamps.append(stamp_of(name, status))
    if missing:
        raise _missing(folder, missing + dangling)
    if dangling:
        raise _dangling(folder, dangling)
    return stamps


def _missing(folder: Folder, names: list[str]) -> CheckpointError:
    return refusal(
        "shard_missing",
        f"{folder.path} lacks {len(names)} of {len(folder.shards)} weight files",
        expected=", ".join(names),
        found="nothing of these names",
        remedy="Download the missing files",
        path=folder.path,
        file=folder.locate(names[0]),
        files=names,
    )


def _dangling(folder: Folder, names: list[str]) -> CheckpointError:
    targets = {name: os.readlink(folder.locate(name)) for name in names}
    return refusal(
        "link_dangling",
        f"{len(names)} of {len(folder.shards)} weight files in {folder.path} are links that lead nowhere",
        expected="links to files",
        found=", ".join(f"{name} -> {target}" for name, target in targets.items()),
        remedy="Download the files that the links name; a copy of a hub cache needs its blobs folder too",
        path=folder.path,
        file=folder.locate(names[0]),
        links=targets,
    )


def _notes(folder: Folder, tensors: dict[str, TensorInfo]) -> tuple[str, ...]:
    notes = []
    unindexed = [] if folder.weight_map is None else tensors.keys() - folder.weight_map.keys()
    if unindexed:
        notes.append(f"{_listed(unindexed)} are in the files of {folder.path} but not in its index")
    if folder.strangers:
        notes.append(f"{_listed(folder.strangers)} in {folder.path} are not in the index and take no part")
    return tuple(notes)


def _listed(names: Iterable[str], most: int = 5) -> str:
    names = sorted(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
