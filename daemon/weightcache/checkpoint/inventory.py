"""The inventory: which file holds each tensor, by the index and by the headers, one against the other."""

import os
from collections.abc import Iterator
from typing import Final

from weightcache.checkpoint.folder import Folder
from weightcache.checkpoint.header import TensorInfo
from weightcache.checkpoint.refusal import reading, refusal

_COMPARE_BYTES: Final = 4 << 20


def take_inventory(folder: Folder, headers: list[dict[str, TensorInfo]]) -> dict[str, TensorInfo]:
    """The tensors of a checkpoint, in the order of files and positions.

    A tensor in several files is accepted if the index says which counts and all hold the same bytes. One that the index
    does not name is accepted too: every loader takes what the named files hold.

    Args:
        folder: the checkpoint's.
        headers: the tensors of each file, in the order of ``folder.shards``.

    Raises:
        CheckpointError: ``duplicate_tensor``, ``tensor_missing`` or ``unreadable``.
    """
    tensors: dict[str, TensorInfo] = {}
    copies: dict[str, list[TensorInfo]] = {}
    for header in headers:
        for tensor in header.keys() & tensors.keys():
            copies.setdefault(tensor, [tensors[tensor]]).append(header[tensor])
        tensors |= header
    if copies:
        tensors |= {tensor: _choose(folder, tensor, infos) for tensor, infos in copies.items()}
        tensors = dict(sorted(tensors.items(), key=lambda item: (item[1].file, item[1].begin, item[1].end)))
    _check_index(folder, tensors)
    return tensors


def equal_bytes(folder: Folder, one: TensorInfo, other: TensorInfo) -> bool:
    """Whether two tensors hold the same bytes. Stops at the first difference.

    Raises:
        CheckpointError: ``unreadable``.
    """
    if one.nbytes != other.nbytes:
        return False
    return all(mine == theirs for mine, theirs in zip(_chunks(folder, one), _chunks(folder, other), strict=True))


def _choose(folder: Folder, tensor: str, infos: list[TensorInfo]) -> TensorInfo:
    index = folder.weight_map
    owner = None if index is None else index.get(tensor)
    chosen = next((info for info in infos if info.file == owner), infos[0])
    for other in infos:
        same_kind = (other.dtype, other.shape) == (chosen.dtype, chosen.shape)
        if other is chosen or (index is not None and same_kind and equal_bytes(folder, chosen, other)):
            continue
        files = [info.file for info in infos]
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
    return chosen


def _check_index(folder: Folder, tensors: dict[str, TensorInfo]) -> None:
    lost = [
        tensor
        for tensor, name in (folder.weight_map or {}).items()
        if tensor not in tensors or tensors[tensor].file != name
    ]
    if not lost or folder.weight_map is None:
        return
    tensor = lost[0]
    name = folder.weight_map[tensor]
    raise refusal(
        "tensor_missing",
        f"{len(lost)} tensors are not where the index says",
        expected=f"{tensor} in {name}",
        found=f"it in {tensors[tensor].file}" if tensor in tensors else "it in no file",
        remedy="Download index and weight files again, of one revision",
        file=folder.locate(name),
        tensor=tensor,
        tensors=lost[:100],
    )


def _chunks(folder: Folder, info: TensorInfo) -> Iterator[bytes]:
    path = folder.locate(info.file)
    with reading(path), open(path, "rb", buffering=0) as file:
        for begin in range(info.begin, info.end, _COMPARE_BYTES):
            yield os.pread(file.fileno(), min(_COMPARE_BYTES, info.end - begin), begin)
