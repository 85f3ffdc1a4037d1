"""Which golden answers a slot is to give: those of its weights, from a probe file or a folder of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from readmit.probes import ProbeSet
from weightcache.errors import ConfigError

Weights = Mapping[str, Any]
"""What is known of the weights that a slot runs on: fields of a `CacheConfig`."""


class _Read(NamedTuple):
    """A file as it was last read: its last good set, and what is wrong with it now."""

    stamp: tuple[int, int, int] | None
    probe_set: ProbeSet | None
    error: ConfigError | None


class ProbeFiles:
    """A probe file, or a folder in which every ``*.json`` is one; read again when something has changed.

    Slots run on different weights while a model is rolled out; each is asked what was recorded from its own. A file
    that has become unreadable leaves its last good set in force, and one that was replaced by another model's leaves
    it in force for its own weights: a slip of the pen takes nobody out of service.

    Args:
        path: the file or folder, or None.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._read: dict[Path, _Read] = {}
        self._known: dict[str, ProbeSet] = {}
        """What was read last of each checkpoint, whether or not a file holds it still."""

    @property
    def error(self) -> ConfigError | None:
        """What is wrong with a file, None where nothing is."""
        return next((read.error for read in self._read.values() if read.error is not None), None)

    def sets(self) -> list[ProbeSet]:
        """All sets that are in force."""
        if self.path is None:
            return []
        paths = sorted(self.path.glob("*.json")) if self.path.is_dir() else [self.path]
        self._read = {path: _again(path, self._read.get(path, _Read(None, None, None))) for path in paths}
        sets = [read.probe_set for read in self._read.values() if read.probe_set is not None]
        self._known.update({it.checkpoint_digest: it for it in sets if it.checkpoint_digest is not None})
        return sets

    def of(self, weights: Weights) -> ProbeSet | None:
        """The set of these weights. None where there is none, or where too little is known of them to choose.

        Where all there are speak of others, the one that spoke of these before, or one of those: `staleness` then says
        how it differs.
        """
        sets = self.sets()
        fitting = [it for it in sets if staleness(it, weights) is None]
        proven = [it for it in fitting if it.checkpoint_digest == weights.get("checkpoint_digest") is not None]
        chosen = proven or fitting or self._former(weights) or sets[:1]
        return chosen[0] if len(chosen) == 1 else None

    def outdated(self, weights: Weights) -> str | None:
        """That these weights are asked what no file holds any more, for people; None where that is not so."""
        if any(staleness(it, weights) is None for it in self.sets()) or not (former := self._former(weights)):
            return None
        return (
            f"no file in {self.path} speaks of checkpoint {former[0].checkpoint_digest} any more, which an engine "
            "serves; it is asked what was there before, but the next gate would keep it out. Put them back "
            "(a folder holds those of several models)"
        )

    def _former(self, weights: Weights) -> list[ProbeSet]:
        known = self._known.get(weights.get("checkpoint_digest") or "")
        return [known] if known is not None and staleness(known, weights) is None else []

    def why_none(self) -> str:
        """Why `of` gives none, for people."""
        if self.path is None:
            return "no probe file is configured"
        if self._read and self.error is None:
            return f"which probe file in {self.path} is this slot's is not known: its engine names no checkpoint"
        return str(self.error or f"there is no probe file in {self.path}")


def staleness(probe_set: ProbeSet, weights: Weights) -> str | None:
    """Why a probe set says nothing about these weights, None where nothing is known against it."""
    for field in ("checkpoint_digest", "quant_method"):
        recorded, found = getattr(probe_set, field), weights.get(field)
        if recorded is not None and found is not None and recorded != found:
            return (
                f"the golden answers are those of another model: {field} {recorded} recorded, {found} found in the "
                "engine. Record them anew from a good load of it (readmit probe record)"
            )
    return None


def _again(path: Path, before: _Read) -> _Read:
    try:
        stat = path.stat()
        stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
    except OSError:
        stamp = None
    if stamp == before.stamp and before.probe_set is not None:
        return before
    try:
        return _Read(stamp, ProbeSet.load(path), None)
    except ConfigError as error:
        return _Read(stamp, before.probe_set, error)
