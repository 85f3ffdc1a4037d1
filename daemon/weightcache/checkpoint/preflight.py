"""The preflight: what index and headers can tell about a checkpoint, before any tensor is allocated or mapped."""

import logging
import os
import stat
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from weightcache.checkpoint.folder import Folder
from weightcache.checkpoint.header import TensorInfo, read_header
from weightcache.checkpoint.refusal import reading, refusal
from weightcache.checkpoint.stamp import Stamp, settle, stamp_file, stamp_of, stamp_open
from weightcache.checkpoint.tied import Tie, find_tie
from weightcache.errors import CheckpointError

if TYPE_CHECKING:
    import torch

_COMPARE_BYTES: Final = 4 << 20

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
        self.total_bytes = sum(info.end - info.begin for info in tensors.values())
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
        files: list[Stamp] = []
        holders: dict[str, list[TensorInfo]] = {}
        for name in folder.shards:
            file, held = _open_shard(folder, name)
            files.append(file)
            for tensor, info in held.items():
                holders.setdefault(tensor, []).append(info)
        tensors, notes = _resolve(folder, holders)
        if not tensors:
            raise refusal("empty", f"{folder.path} holds no tensor", expected="tensors", found="none", path=folder.path)
        if folder.strangers:
            notes.append(f"{_listed(folder.strangers)} in {folder.path} are not in the index and take no part")
        for note in notes:
            log.warning("%s", note)
        tie = find_tie(folder.config, tensors, lambda one, other: _equal(folder, one, other))
        return cls(folder, tuple(files), settled and files == stamps, tensors, tie, tuple(notes))

    def read(self) -> "Iterator[tuple[str, torch.Tensor]]":
        """Every tensor, in the order of `tensors`, read once into private memory; see `weightcache.checkpoint.reader`.

        Raises:
            CheckpointError: ``changed``, ``truncated`` or ``unreadable``.
        """
        from weightcache.checkpoint.reader import read_tensors

        return read_tensors(self)

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
        except (FileNotFoundError, NotADirectoryError):
            (dangling if os.path.islink(path) else missing).append(name)
            continue
        except OSError:
            with reading(path):
                raise
        if not stat.S_ISREG(status.st_mode):
            raise refusal(
                "not_safetensors",
                f"{name} is not a regular file",
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


def _resolve(folder: Folder, holders: Mapping[str, list[TensorInfo]]) -> tuple[dict[str, TensorInfo], list[str]]:
    """Index against files, both ways: which of the holders of each tensor counts, and what is odd."""
    index = folder.weight_map
    tensors: dict[str, TensorInfo] = {}
    unindexed = []
    for tensor, infos in holders.items():
        chosen = infos[0]
        if index is not None:
            owner = index.get(tensor)
            if owner is None:
                unindexed.append(tensor)
            else:
                chosen = next((info for info in infos if info.file == owner), chosen)
        if len(infos) > 1:
            _check_copies(folder, tensor, chosen, infos)
        tensors[tensor] = chosen
    lost = {
        tensor: name for tensor, name in (index or {}).items() if tensor not in tensors or tensors[tensor].file != name
    }
    if lost:
        tensor, name = next(iter(lost.items()))
        raise refusal(
            "tensor_missing",
            f"{len(lost)} tensors are not where the index says",
            expected=f"{tensor} in {name}",
            found=f"it in {tensors[tensor].file}" if tensor in tensors else "it in no file",
            remedy="Download index and weight files again, of one revision",
            file=folder.locate(name),
            tensor=tensor,
            tensors=list(lost)[:100],
        )
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].file, item[1].begin, item[1].end, item[0])))
    return ordered, [f"{_listed(unindexed)} are in the files but not in the index"] if unindexed else []


def _check_copies(folder: Folder, tensor: str, chosen: TensorInfo, infos: list[TensorInfo]) -> None:
    """Copies of one tensor are accepted only if an index says which counts and all hold the same bytes."""
    for other in infos:
        if other.file == chosen.file or (folder.weight_map is not None and _equal(folder, chosen, other)):
            continue
        files = sorted(info.file for info in infos)
        raise refusal(
            "duplicate_tensor",
            f"{tensor} is in {len(files)} files",
            expected="one file, or equal copies and an index that names one",
            found=", ".join(files),
            remedy="Remove the files that do not belong to this checkpoint",
            file=folder.locate(other.file),
            tensor=tensor,
            files=files,
        )


def _equal(folder: Folder, one: TensorInfo, other: TensorInfo) -> bool:
    """Whether two tensors have the same dtype, shape and bytes. Stops at the first difference."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return all(mine == theirs for mine, theirs in zip(_chunks(folder, one), _chunks(folder, other), strict=True))


def _chunks(folder: Folder, info: TensorInfo) -> Iterator[bytes]:
    path = folder.locate(info.file)
    with reading(path), open(path, "rb", buffering=0) as file:
        for begin in range(info.begin, info.end, _COMPARE_BYTES):
            yield os.pread(file.fileno(), min(_COMPARE_BYTES, info.end - begin), begin)


def _listed(names: Any, most: int = 5) -> str:
    names = sorted(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
