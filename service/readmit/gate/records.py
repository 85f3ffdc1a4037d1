"""What the keeper writes down of its engines: heard of also while a busy database keeps the journal waiting."""

import contextlib
from pathlib import Path

from weightcache.errors import ConfigError
from weightcache.keeper.state import STATE_FILE, ChildRecord, read


class Records:
    """The keeper's records, read again when they have changed.

    Args:
        runtime_dir: the keeper's runtime folder, or None where there is none.
    """

    def __init__(self, runtime_dir: Path | None) -> None:
        self._runtime_dir = runtime_dir
        self._seen: tuple[int, int] | None = None
        self._records: dict[str, ChildRecord] = {}

    def of(self, slot: str) -> ChildRecord | None:
        """What is written down of a slot's engine, None where nothing is."""
        if self._runtime_dir is None:
            return None
        try:
            status = (self._runtime_dir / STATE_FILE).stat()
            seen = (status.st_ino, status.st_mtime_ns)
        except OSError:  # no keeper runs
            seen = None
        if seen != self._seen:
            self._seen, self._records = seen, {}
            with contextlib.suppress(ConfigError):  # the next keeper says so; the journal has the same
                self._records = {record.name: record for record in read(self._runtime_dir)[1]}
        return self._records.get(slot)
