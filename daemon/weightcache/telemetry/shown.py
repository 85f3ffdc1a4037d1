"""What scrapes have shown of counters that no journal event steps, so that the next daemon does not show less.

Running time is counted up to the moment of a scrape; when the end of it becomes known, it may lie before that moment.
Other counters are the daemon's own and begin at 0 with each. A file beside the journal has what the latest scrape
showed, written before it was: the death of the daemon, at whatever moment, leaves nobody with a higher figure.
"""

import json
import logging
import os
from hashlib import blake2b
from pathlib import Path

log = logging.getLogger(__name__)


class Shown:
    """Values of counters by name, never falling.

    Args:
        path: the file, None to remember nothing beyond this process.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._before: dict[str, float] = {}
        self._values: dict[str, float] = {}
        self._file: int | None = None
        self._refused = False

    def load(self, last_id: int) -> None:
        """Read what earlier daemons showed.

        Args:
            last_id: the journal's; a file that knows of later events belongs to another journal.
        """
        try:
            digest, _, text = self._path.read_text().partition(" ") if self._path else ("", "", "")
        except (OSError, UnicodeDecodeError):
            return
        if digest and digest == _digest(text):
            found = json.loads(text)
            if found["position"] <= last_id:
                self._before = found["values"]
                self._values = dict(self._before)

    def rising(self, name: str, value: float) -> float:
        """A counter that is worked out anew each time: not below what was shown."""
        self._values[name] = value = max(value, self._values.get(name, 0.0))
        return value

    def carried(self, name: str, value: float) -> float:
        """A counter of this process: on top of what its predecessors had counted."""
        self._values[name] = value = value + self._before.get(name, 0.0)
        return value

    def save(self, position: int) -> None:
        """Write down what is about to be shown, as of the event with the id ``position``. A full disk is said once."""
        if self._path is None:
            return
        text = json.dumps({"position": position, "values": self._values})
        try:
            if self._file is None:
                self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            # In place: putting a new file there instead takes milliseconds, on a busy disk many. One write into the
            # page cache is whole or not at all when its process is killed; the digest is for the loss of power.
            written = os.pwrite(self._file, f"{_digest(text)} {text}".encode(), 0)
            os.ftruncate(self._file, written)
            self._refused = False
        except OSError as error:
            if not self._refused:
                log.warning("%s is not kept, and after a restart some counters may fall: %s", self._path, error)
            self._refused = True

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=8).hexdigest()
