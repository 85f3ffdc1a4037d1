"""Log lines, for people or for machines; either way they say which recovery they belong to.

Standard library only.
"""

import json
import logging
from datetime import UTC, datetime
from typing import Any, Final

from weightcache.journal import Context, span_id

FORMATS: Final = ("text", "json")
_PLACE: Final = ("node", "slot", "episode", "attempt", "rank")


def configure(log_format: str = "text", level: int = logging.INFO) -> None:
    """Send the log of this process to stderr in one of `FORMATS`."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and where in the world it was said.

    ``slot``, ``episode``, ``attempt`` and ``rank`` come from a record's ``extra``, else from the process's environment.
    The trace's id is the episode's.
    """

    def __init__(self, context: Context | None = None) -> None:
        super().__init__()
        self._context = context or Context.from_environment()

    def format(self, record: logging.LogRecord) -> str:
        place = {name: getattr(record, name, getattr(self._context, name)) for name in _PLACE}
        said: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **place,
        }
        if place["episode"]:
            said["trace_id"] = place["episode"]
            said["span_id"] = span_id(place["episode"], "attempt", place["attempt"] or 0)
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps({name: value for name, value in said.items() if value is not None}, default=str)


class TextFormatter(logging.Formatter):
    """Time, level and message, with the slot and the beginning of the episode's id where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S.%f")[:-3]
        slot, episode = getattr(record, "slot", None), getattr(record, "episode", None)
        place = f" [{slot or '-'} {(episode or '-')[:8]}]" if slot or episode else ""
        text = f"{time} {record.levelname.lower():<7} {record.name}{place}: {record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text
