"""Log lines, for people or for machines; either way they say which recovery they belong to.

Standard library only.
"""

import logging
import sys
from datetime import datetime

from weightcache.journal import Context
from weightcache.log_line import chosen, log_line


def configure(log_format: str | None = None, level: int = logging.INFO) -> None:
    """Send the log of this process to stderr.

    Args:
        log_format: ``text`` or ``json``; what ``READMIT_LOG_FORMAT`` says if None.
        level: what is less important is not said.

    Raises:
        ConfigError: ``log_format``: there is no such format.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if chosen(log_format) == "json" else TextFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)


def complain(program: str, error: Exception) -> None:
    """Say on stderr what ends this process: a paragraph for people, or one more line among others for machines."""
    if any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers):
        logging.getLogger(program.replace(" ", ".")).error("%s", error)
    else:
        print(f"{program}: {error}", file=sys.stderr)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and where in the world it was said.

    ``slot``, ``episode``, ``attempt`` and ``rank`` come from a record's ``extra``, else from the process's environment.
    The trace's id is the episode's.
    """

    def __init__(self, context: Context | None = None) -> None:
        super().__init__()
        self._context = context or Context.from_environment()

    def format(self, record: logging.LogRecord) -> str:
        place = {name: getattr(record, name, value) for name, value in self._context._asdict().items()}
        exception = self.formatException(record.exc_info) if record.exc_info else None
        level, message = record.levelname.lower(), record.getMessage()
        return log_line(level, record.name, message, place, at_s=record.created, exception=exception)


class TextFormatter(logging.Formatter):
    """Time, level and message, with the slot and the beginning of the episode's id where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S.%f")[:-3]
        slot, episode = getattr(record, "slot", None), getattr(record, "episode", None)
        place = f" [{slot or '-'} {(episode or '-')[:8]}]" if slot or episode else ""
        text = f"{time} {record.levelname.lower():<7} {record.name}{place}: {record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text
