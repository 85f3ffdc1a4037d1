"""What scrapes have shown of counters that no journal event steps, so that the next daemon does not show less.

Running time is counted up to the moment of a scrape; when the end of it becomes known, it may lie before that moment.
Other counters are the daemon's own and begin at 0 with each. A file beside the journal has what the latest scrape
showed, written before it was: the death of the daemon, at whatever moment, leaves nobody with a higher figure.
"""

import contextlib
import json
import logging
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
        self._refused = False

    def load(self, last_id: int) -> None:
        """Read what earlier daemons showed.

        Args:
            last_id: the journal's; a file that knows of later events belongs to another journal.
        """
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            found = json.loads(self._path.read_text()) if self._path else None
            if found is not None and found["position"] <= last_id:
                self._before = {str(name): float(value) for name, value in found["values"].items()}
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
        fresh = self._path.with_name(self._path.name + ".new")
        try:
            fresh.write_text(json.dumps({"position": position, "values": self._values}))
            fresh.replace(self._path)
            self._refused = False
        except OSError as error:
            if not self._refused:
                log.warning("%s is not kept, and after a restart some counters may fall: %s", self._path, error)
            self._refused = True
