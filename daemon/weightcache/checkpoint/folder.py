"""The folder of a checkpoint: which one a path means, its config, its revision and the names of its weight files.

Nothing here opens a weight file. A folder may be plain, a snapshot in a Hugging Face cache, or that cache's folder for
the whole repository (``models--org--name`` with ``refs``, ``snapshots``, ``blobs``), of which one revision is wanted.
"""

import contextlib
import errno
import os
import re
from collections.abc import Iterable
from functools import cached_property
from typing import Any, Final

from weightcache.checkpoint.document import read_object
from weightcache.checkpoint.refusal import reading, refusal
from weightcache.checkpoint.stamp import Stamp, settle, stamp_file
from weightcache.errors import CheckpointError

INDEX: Final = "model.safetensors.index.json"
SUFFIX: Final = ".safetensors"
_MAX_DEPTH: Final = 32
"""Levels of a config: real ones have four, and whoever walks one should not have to count."""

_PART: Final = re.compile(r"(.*-)(\d+)(-of-)(\d+)(\.safetensors)")


class Folder:
    """A checkpoint's folder, resolved once, so that a link moved later cannot mix two models.

    Attributes:
        path: the folder as asked for, absolute.
        root: where that leads; everything is read from here.
        revision: the commit of the hub snapshot that was opened, or None where the folder is not one.
        config: ``config.json``.
        index_settled: whether a later write to the index is sure to show in its stamp.
    """

    def __init__(self, path: str, root: str, revision: str | None, config: dict[str, Any]) -> None:
        self.path = path
        self.root = root
        self.revision = revision
        self.config = config
        self.index_settled = True

    @classmethod
    def open(cls, path: str | os.PathLike[str], revision: str | None = None) -> "Folder":
        """Resolve `path` and read its config.

        Args:
            path: a folder, a hub cache's folder for a repository, or a repository's name (``org/name``) in that cache.
            revision: a commit, or a name under ``refs``. By default what `path` itself names, or ``main``.

        Raises:
            CheckpointError: ``folder_missing``, ``revision_missing``, ``link_dangling``, ``config_missing``,
                ``config_invalid`` or ``unreadable``.
        """
        named = os.fspath(path)
        if not named or "\0" in named:
            facts = {"expected": "a folder", "found": ascii(named), "path": named}
            raise refusal("folder_missing", "A path is neither empty nor contains a NUL", **facts)
        asked = os.path.abspath(named)
        if not os.path.exists(asked) and not os.path.islink(asked):
            asked = _in_hub_cache(named) or asked
        root = os.path.realpath(_snapshot(asked, revision or "main") if _is_repository(asked) else asked)
        if not os.path.isdir(root):
            raise _no_folder(asked, root)
        commit = _commit(root)
        if revision not in (None, commit) and (commit is None or commit != _ref(_repository(root), revision)):
            raise refusal(
                "revision_missing",
                f"{asked} is not revision {revision}",
                expected=revision,
                found=commit or "a plain folder, which has no revision",
                remedy="Give the hub cache's folder of the repository, or leave the revision out",
                path=asked,
            )
        return cls(asked, root, commit, _read_config(root))

    def locate(self, name: str) -> str:
        """The path of the file called `name` in this folder."""
        return os.path.join(self.root, name)

    def read_settings(self, name: str) -> dict[str, Any] | None:
        """The JSON object in a settings file beside the config, or None where there is no such name.

        Raises:
            CheckpointError: ``config_invalid``, ``config_missing`` (no file), ``link_dangling`` or ``unreadable``.
        """
        if not os.path.lexists(self.locate(name)):
            return None
        return read_object(_settings(self.root, name), "config_invalid")

    @cached_property
    def settings_names(self) -> tuple[str, ...]:
        """The names of the folder's JSON files, sorted, indices apart.

        Raises:
            CheckpointError: ``unreadable``.
        """
        return tuple(
            name for name in self._listing if name.lower().endswith(".json") and not name.endswith(".index.json")
        )

    @cached_property
    def index_name(self) -> str | None:
        """The name of the index, or None where there is none.

        Raises:
            CheckpointError: ``index_ambiguous`` or ``unreadable``.
        """
        found = [name for name in self._listing if name.endswith(f"{SUFFIX}.index.json")]
        if INDEX in found or not found:
            return INDEX if found else None
        if len(found) > 1:
            raise refusal(
                "index_ambiguous",
                f"{self.path} has several indices",
                expected=INDEX,
                found=", ".join(found),
                remedy="Keep one",
                path=self.path,
            )
        return found[0]

    @cached_property
    def index_stamp(self) -> Stamp | None:
        """The stamp of the index from before it was read, or None where there is none.

        Raises:
            CheckpointError: ``index_ambiguous``, ``link_dangling`` or ``unreadable``.
        """
        if self.index_name is None:
            return None
        _settings(self.root, self.index_name, "index_invalid")
        return stamp_file(self.root, self.index_name)

    @cached_property
    def weight_map(self) -> dict[str, str] | None:
        """The index: tensor name to file name, or None where there is none. Names are judged, not what they resolve to:
        in a hub cache every file is a link that leads out of the folder.

        Raises:
            CheckpointError: ``index_invalid``, ``path_escape``, ``duplicate_tensor``, ``link_dangling`` or
                ``unreadable``.
        """
        if self.index_name is None or self.index_stamp is None:
            return None
        self.index_settled = settle([self.index_stamp])
        path = self.locate(self.index_name)
        mapping = read_object(path, "index_invalid", tensors=str).get("weight_map")
        if not isinstance(mapping, dict):
            raise _bad_map(path, None, type(mapping).__name__)
        for tensor, name in mapping.items():
            if not isinstance(name, str):
                raise _bad_map(path, tensor, ascii(name)[:200])
        first = {name: tensor for tensor, name in reversed(mapping.items())}
        names = {name: _judged(name, path, tensor) for name, tensor in first.items()}
        return {tensor: names[name] for tensor, name in mapping.items()}

    @cached_property
    def shards(self) -> tuple[str, ...]:
        """The names of the weight files, sorted: those in the index, or without one every safetensors file here.

        Raises:
            CheckpointError: ``shard_missing`` or ``revision_missing`` where there are none, and as `weight_map`.
        """
        if self.weight_map is not None:
            names = set(self.weight_map.values())
        else:
            names = {name for name in self._listing if name.endswith(SUFFIX)}
            names |= {sibling for name in names for sibling in _siblings(name)}
        if not names:
            raise self._no_weights()
        return tuple(sorted(names))

    @cached_property
    def strangers(self) -> tuple[str, ...]:
        """Safetensors files in the folder that the index does not name. They take no part in anything."""
        return tuple(name for name in self._listing if name.endswith(SUFFIX) and name not in self.shards)

    @cached_property
    def _listing(self) -> list[str]:
        with reading(self.root):
            return sorted(os.listdir(self.root))

    def _no_weights(self) -> CheckpointError:
        if self.revision is not None:
            return refusal(
                "revision_missing",
                f"The weights of revision {self.revision} were never downloaded to {self.path}",
                expected=f"{INDEX} or *{SUFFIX}",
                found=", ".join(self._listing),
                remedy="Download this revision, or ask for one that is complete",
                path=self.path,
                revision=self.revision,
            )
        return refusal(
            "shard_missing",
            f"{self.path} has no weights",
            expected=f"{INDEX} or *{SUFFIX}",
            found=", ".join(self._listing[:20]) or "an empty folder",
            remedy="Download the model again",
            path=self.path,
        )


def _is_repository(path: str) -> bool:
    return os.path.isdir(os.path.join(path, "snapshots")) and not os.path.lexists(os.path.join(path, "config.json"))


def _repository(snapshot: str) -> str:
    return os.path.dirname(os.path.dirname(snapshot))


def _commit(root: str) -> str | None:
    """The commit that a folder is the snapshot of; None for one that only happens to lie below ``snapshots``."""
    if os.path.basename(os.path.dirname(root)) != "snapshots":
        return None
    repository = _repository(root)
    named = os.path.basename(repository).startswith("models--")
    return os.path.basename(root) if named or os.path.isdir(os.path.join(repository, "refs")) else None


def _in_hub_cache(name: str) -> str | None:
    """The hub cache's folder for a repository called `name`, if there is one."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return None
    home = os.environ.get("HF_HOME") or os.path.join(os.path.expanduser("~"), ".cache", "huggingface")
    cache = os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")
    folder = os.path.abspath(os.path.join(cache, f"models--{name.replace('/', '--')}"))
    return folder if os.path.isdir(folder) else None


def _ref(repository: str, revision: str) -> str | None:
    """The commit that the ref called `revision` names, or None where there is no such ref."""
    path = os.path.join(repository, "refs", revision)
    if not _stays_inside(revision) or not os.path.isfile(path):
        return None
    with reading(path), open(path, "rb") as file:
        return file.read(256).decode(errors="replace").strip()


def _snapshot(repository: str, revision: str) -> str:
    """The folder of the snapshot that `revision` names. No other one is put in its place."""
    commit = _ref(repository, revision) or revision
    snapshots = os.path.join(repository, "snapshots")
    folder = os.path.join(snapshots, commit)
    if _stays_inside(commit) and os.path.isdir(folder):
        return folder
    with reading(snapshots):
        present = sorted(os.listdir(snapshots))
    raise refusal(
        "revision_missing",
        f"{repository} has no snapshot of revision {revision}",
        expected=commit,
        found=", ".join(present) or "no snapshot",
        remedy="Download this revision, or ask for one that is there",
        path=repository,
        revision=revision,
    )


def _no_folder(asked: str, root: str) -> CheckpointError:
    facts: dict[str, Any] = {"expected": "a folder with config.json and safetensors files", "path": asked}
    if os.path.islink(asked):
        return refusal(
            "link_dangling", f"{asked} leads nowhere", found=f"a link to {os.readlink(asked)}",
            remedy="Point the link at a checkpoint", **facts,
        )  # fmt: skip
    with reading(asked), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        os.stat(root)
    found = "a file" if os.path.exists(root) else "nothing"
    return refusal("folder_missing", f"There is no folder {asked}", found=found, remedy="Check the path", **facts)


def _read_config(root: str) -> dict[str, Any]:
    path = _settings(root, "config.json")
    config = read_object(path, "config_invalid")
    level: list[Any] = [config]
    for _ in range(_MAX_DEPTH):
        level = [item for section in level if isinstance(section, dict | list) for item in _items(section)]
    if level:
        raise refusal(
            "config_invalid",
            f"{path} is nested too deeply",
            expected=f"at most {_MAX_DEPTH} levels",
            found="more",
            remedy="Download the model again",
            file=path,
        )
    return config


def _items(section: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return section.values() if isinstance(section, dict) else section


def leads_nowhere(error: OSError) -> bool:
    """Whether an error says that there is nothing behind a name, be it a link that ends at itself."""
    return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def _settings(root: str, name: str, reason: str = "config_missing") -> str:
    """The path of a settings file in `root`, once it is known to be there; `reason` where it is something else."""
    path = os.path.join(root, name)
    with reading(path):
        try:
            os.stat(path)  # which says that this user may not look, where isfile would say that nothing is there
        except OSError as error:
            if not leads_nowhere(error):
                raise
    if os.path.isfile(path):
        return path
    if os.path.islink(path):
        raise refusal(
            "link_dangling",
            f"{path} leads nowhere",
            expected="a file",
            found=f"a link to {os.readlink(path)}",
            remedy="Download the model again",
            file=path,
            target=os.readlink(path),
        )
    raise refusal(
        reason,
        f"{root} has no {name}",
        expected=f"a file called {name}",
        found="something that is not a file" if os.path.exists(path) else "nothing of that name",
        remedy="Give the folder of a checkpoint",
        path=root,
        file=path,
    )


def _bad_map(path: str, tensor: str | None, found: str) -> CheckpointError:
    return refusal(
        "index_invalid",
        f"{path} has no weight_map of tensor names to file names",
        expected="an object of text to text" if tensor is None else f"the name of the file that holds {tensor!a}",
        found=found,
        remedy="Download the index again",
        file=path,
        tensor=tensor,
    )


def _judged(name: str, path: str, tensor: str) -> str:
    """`name` without what does not change its meaning, once it is known to stay in the folder."""
    if not _stays_inside(name):
        raise refusal(
            "path_escape",
            f"{path} names what is no file of its folder",
            expected="a relative name without '..'",
            found=ascii(name),
            remedy="Download the index again, from a source you trust",
            file=path,
            tensor=tensor,
        )
    return os.path.normpath(name)


def _stays_inside(name: str) -> bool:
    """Whether a name stays in the folder that it is joined to, also where others take a backslash for a separator."""
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    first, *others = re.split(r"[/\\]", name)
    return bool(first) and "\0" not in name and ".." not in (first, *others)


def _siblings(name: str) -> list[str]:
    """The names of all parts of which `name` says it is one (``model-00001-of-00002.safetensors``)."""
    part = _PART.fullmatch(name)
    if part is None:
        return []
    stem, number, of, count, suffix = part.groups()
    return [f"{stem}{index:0{len(number)}d}{of}{count}{suffix}" for index in range(1, min(int(count), 10_000) + 1)]
