"""The identity of a checkpoint's bytes, remembered, so that a restart need not read them to know them.

Hashing 120 GB takes longer than a recovery may. A digest once computed is kept beside what the file system says about
each weight file: device, inode, size, modification and change time. While all of that is as it was, the digest holds.

How strong that is: the kernel moves an inode's change time with every write, also one that restores the modification
time, and a replaced file or a moved link shows another inode. It does not show writes under a clock set back, writes
below the file system, or further writes through a mapping to a page that is already dirty. A file so young that its
stamp could hide a write is never remembered. Whoever can write the state folder can claim any digest: it is private to
the user, who could as well write the weights.
"""

import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from weightcache import quantization
from weightcache.checkpoint import Checkpoint, Folder, Stamp
from weightcache.checkpoint.refusal import refusal
from weightcache.checkpoint.stamp import stamp_file
from weightcache.errors import CheckpointError
from weightcache.fingerprint import Value, stable_hash
from weightcache.paths import private_dir, state_dir

HASH_LIMIT_BYTES: Final = 1 << 30
"""Up to this size a checkpoint that nobody remembers is hashed at once: it takes about as long as a connection may."""

_NOT_OF_TENSORS: Final = frozenset(
    {"_name_or_path", "architectures", "dtype", "quantization_config", "torch_dtype", "transformers_version"}
)
"""Keys of a config that decide no tensor, or that have a field of their own in the identity."""

STATUSES: Final = ("proven", "remembered", "hashed", "absent", "unproven")

log = logging.getLogger("weightcache.identity")


class Identity(NamedTuple):
    """A digest, or None, and how it is known.

    - ``proven``: this process has read the files before.
    - ``remembered``: the files are as they were when it was computed.
    - ``hashed``: computed now.
    - ``absent``: the weight files are gone. It is the last they had in this folder; nothing left contradicts it.
    - ``unproven``: no digest. The files changed or are new, and are too large to hash now.
    """

    digest: str | None
    status: str


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    root: str
    digest: str
    settings: str
    index: Stamp | None
    files: tuple[Stamp, ...]


def digest_of(
    checkpoint: str | os.PathLike[str] | Folder | Checkpoint,
    *,
    hash_limit_bytes: int = HASH_LIMIT_BYTES,
    state: Path | None = None,
) -> Identity:
    """The content identity of a checkpoint, read from disk only if that is cheap.

    Args:
        checkpoint: its folder, or an opened one.
        hash_limit_bytes: hash files that nobody remembers if together they have at most this size.
        state: the folder where digests are remembered, by default one in the state folder.

    Raises:
        CheckpointError: the folder is bad, or files had to be read and are bad.
        ConfigError: the state folder cannot be used.
    """
    if isinstance(checkpoint, Checkpoint):
        if checkpoint.digest is not None and _is_as_seen(checkpoint):
            return Identity(checkpoint.digest, "proven")
        folder = checkpoint.folder
    else:
        folder = checkpoint if isinstance(checkpoint, Folder) else Folder.open(checkpoint)
    memory = _Memory(folder, state)
    record = memory.recall()
    if record is not None and _is_unchanged(record, folder):
        return Identity(record.digest, "remembered")
    files = _stamps(folder)
    if not files:
        known = record is not None and record.settings == _settings(folder)
        return Identity(record.digest, "absent") if record is not None and known else Identity(None, "unproven")
    if None in files:
        return Identity(None, "unproven")
    elsewhere = memory.recall_files(tuple(file for file in files if file is not None))
    if elsewhere is not None:
        return Identity(elsewhere.digest, "remembered")
    if sum(file.size for file in files if file is not None) > hash_limit_bytes:
        return Identity(None, "unproven")
    return Identity(prove(Checkpoint.open(folder), state=state), "hashed")


def fields_of(source: Checkpoint | Folder, digest: str | None) -> dict[str, Value]:
    """The fields of a `CacheConfig` that a checkpoint decides; an engine adds its own.

    Args:
        source: the checkpoint; its quantisation is what `weightcache.quantization.of` says of it.
        digest: its content identity, as far as it is known.

    Raises:
        CheckpointError: ``config_invalid``, where no architecture is named; and as `weightcache.quantization.of`.
        ConfigError: as `weightcache.quantization.of`.
    """
    folder = source if isinstance(source, Folder) else source.folder
    found = quantization.of(source)
    architectures = folder.config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise refusal(
            "config_invalid",
            f"config.json in {folder.path} does not say which architecture the model has",
            expected="a list of names under architectures",
            found=ascii(architectures)[:200],
            remedy="Correct config.json",
            file=folder.locate("config.json"),
        )
    return {
        "model_path": folder.path,
        "model_arch": architectures[0],
        "revision": folder.revision,
        "checkpoint_digest": digest,
        "quant_method": found.method,
        "quant_config_hash": found.config_hash,
    }


def computed_from(source: Checkpoint | Folder) -> str:
    """What tensors in no file (rotary frequencies) are computed from, for the ``kernel_backend`` of a `CacheConfig`.

    The cache hands those out as well, and equal files do not make them equal: the config does, but for a few keys.
    """
    settings = {key: value for key, value in source.config.items() if key not in _NOT_OF_TENSORS}
    return f"config-{stable_hash(settings)[:12]}"


def lookup(checkpoint: Checkpoint, *, state: Path | None = None) -> str | None:
    """The digest remembered for these files, if each is still as the preflight saw it. Opens no weight file.

    Raises:
        ConfigError: the state folder cannot be used.
    """
    if not _is_as_seen(checkpoint):
        return None
    record = _Memory(checkpoint.folder, state).recall_files(checkpoint.files)
    return None if record is None else record.digest


def remember(checkpoint: Checkpoint, digest: str, *, state: Path | None = None) -> bool:
    """Keep a digest for the files of `checkpoint`, as its preflight saw them.

    Returns whether it is kept. It is not if a file changed since, or is so young that a write could still go unseen, or
    if the state folder is full: a later start then hashes again, which is slower and never wrong.

    Raises:
        ConfigError: the state folder cannot be used.
    """
    if not checkpoint.settled or not _is_as_seen(checkpoint):
        log.warning("the digest of %s is not kept: its files changed, or are too young to trust", checkpoint.path)
        return False
    folder = checkpoint.folder
    record = _Record(
        root=folder.root,
        digest=digest,
        settings=_settings(folder),
        index=folder.index_stamp,
        files=checkpoint.files,
    )
    return _Memory(folder, state).keep(record)


def prove(checkpoint: Checkpoint, progress: Callable[[int], None] | None = None, *, state: Path | None = None) -> str:
    """Hash the files now, and remember the result.

    Args:
        checkpoint: the checkpoint.
        progress: called with the number of bytes read so far.
        state: the folder where digests are remembered, by default one in the state folder.

    Raises:
        CheckpointError: ``changed``, ``truncated`` or ``unreadable``.
        ConfigError: the state folder cannot be used.
    """
    from weightcache.checkpoint.reader import hash_files

    digest = hash_files(checkpoint, progress)
    remember(checkpoint, digest, state=state)
    return digest


def know_digest(folder: Folder) -> str:
    """The digest of a checkpoint; its files are read if nobody knows it. Ranks read parts, which nobody can hash.

    Raises:
        CheckpointError: ``changed``, ``truncated`` or ``unreadable``, and as `Checkpoint.open`.
        ConfigError: the state folder cannot be used.
    """
    return digest_of(folder).digest or prove(Checkpoint.open(folder))


class _Memory:
    """Records in small files, written whole. Each is found by its folder, and by its files, wherever they lie now."""

    def __init__(self, folder: Folder, state: Path | None) -> None:
        self._place = private_dir(state if state is not None else state_dir() / "identities")
        self._by_folder = self._place / f"folder-{hashlib.sha256(os.fsencode(folder.root)).hexdigest()[:32]}.json"

    def recall(self) -> _Record | None:
        return _read(self._by_folder)

    def recall_files(self, files: tuple[Stamp, ...]) -> _Record | None:
        record = _read(self._of_files(files))
        return record if record is not None and record.files == files else None

    def keep(self, record: _Record) -> bool:
        before = self.recall()
        unfinished = self._place / f"unfinished-{os.urandom(8).hex()}"
        try:
            for path in (self._of_files(record.files), self._by_folder):
                unfinished.write_bytes(msgspec.json.encode(record))
                unfinished.replace(path)
            if before is not None and before.files != record.files:
                self._of_files(before.files).unlink(missing_ok=True)
        except OSError as error:
            log.warning("the digest of %s is not kept: %s", record.root, error)
            unfinished.unlink(missing_ok=True)
            return False
        return True

    def _of_files(self, files: tuple[Stamp, ...]) -> Path:
        return self._place / f"files-{stable_hash(files)[:32]}.json"


def _read(path: Path) -> _Record | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Record)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        log.warning("a remembered digest is not used: %s: %s", path, error)
        return None


def _is_as_seen(checkpoint: Checkpoint) -> bool:
    try:
        return checkpoint.stamp() == checkpoint.files
    except CheckpointError:  # a file is gone
        return False


def _is_unchanged(record: _Record, folder: Folder) -> bool:
    """Whether every file of the record is as it was, and the folder still means the same files."""
    try:
        if folder.index_name is None:
            same = record.index is None and tuple(file.name for file in record.files) == folder.shards
        else:  # while the index file is the same, so are the names in it: no need to parse it
            same = record.index == folder.index_stamp
        return same and all(stamp_file(folder.root, file.name) == file for file in record.files)
    except CheckpointError:  # a file is gone
        return False


def _stamps(folder: Folder) -> list[Stamp | None]:
    """What the file system says about each weight file, None for one that is missing; empty if all are."""
    try:
        names = folder.shards
    except CheckpointError as error:
        if error.reason in ("shard_missing", "revision_missing"):
            return []
        raise
    stamps = [stamp_file(folder.root, name) if os.path.exists(folder.locate(name)) else None for name in names]
    return stamps if any(stamps) else []


def _settings(folder: Folder) -> str:
    """A hash of what is left when the weight files are gone: the config and the index."""
    return stable_hash([folder.config, folder.weight_map])
