"""One line of a log for machines: what was said, and the recovery that it belongs to.

Standard library only, and little of it: the keeper imports this module.
"""

import json
import os
import time
from collections.abc import Mapping
from typing import Any, Final

from weightcache.errors import ConfigError
from weightcache.journal import span_id

FORMATS: Final = ("text", "json")
VARIABLE: Final = "READMIT_LOG_FORMAT"
"""The environment variable that hands the format on to a node's processes."""


def chosen(log_format: str | None = None) -> str:
    """The format asked for, else the environment's, else ``text``.

    Raises:
        ConfigError: ``log_format``, when it is none of `FORMATS`.
    """
    found = log_format or os.environ.get(VARIABLE) or "text"
    if found not in FORMATS:
        raise ConfigError(
            "log_format",
            "logs cannot be written in this format",
            expected=" or ".join(FORMATS),
            found=found,
            remedy=f"Set {VARIABLE}, or --log-format, to one of them",
        )
    return found


def log_line(
    level: str, logger: str, message: str, place: Mapping[str, Any], *, at_s: float | None = None, **more: Any
) -> str:
    """A JSON object without a line end.

    Args:
        level: such as ``info``.
        logger: who says it.
        message: for people.
        place: the fields of `weightcache.journal.Context`. The trace's id is the episode's.
        at_s: Unix seconds; now if None.
        more: further members. Members that are None are left out.
    """
    at_s = time.time() if at_s is None else at_s
    second = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at_s))
    said = {"time": f"{second}.{int(at_s % 1 * 1e6):06d}+00:00", "level": level, "logger": logger, "message": message}
    said |= place
    if episode := place.get("episode"):
        said |= {"trace_id": episode, "span_id": span_id(episode, "attempt", place.get("attempt") or 0)}
    return json.dumps({name: value for name, value in (said | more).items() if value is not None}, default=str)
