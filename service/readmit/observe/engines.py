"""Which table is for which command."""

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Final

from readmit.observe import sglang, vllm
from readmit.observe.markers import Table


class Engine(StrEnum):
    """Engines whose lines are known."""

    VLLM = "vllm"
    SGLANG = "sglang"


TABLES: Final = (vllm.TABLE, sglang.TABLE)
_PROGRAMS: Final = {
    "vllm": r"(?:^|[ /])vllm serve |-m vllm\.entrypoints\.",
    "sglang": r"-m sglang\.launch_server|(?:^|[ /])sglang serve ",
}
_PORTS: Final = {"vllm": 8000, "sglang": 30000}


def table_for(command: Sequence[str], told: str | None = None) -> Table | None:
    """The table of the engine that a command starts, or of the one that was told; None for an engine without one."""
    words = " ".join(command) + " "
    if told is not None:
        return next(table for table in TABLES if table.engine == told)
    return next((table for table in TABLES if re.search(_PROGRAMS[table.engine], words)), None)


def looks(table: Table, command: Sequence[str], told: str | None = None) -> bool:
    """Whether an engine may look for resident weights: not when the command is its own, and does not say so."""
    return told is not None or re.search(table.asks, " ".join(command)) is not None


def url_of(command: Sequence[str], told: str | None = None) -> str | None:
    """The base URL that the engine of a command will have; None where neither it nor its engine says so."""
    words = " ".join(command) + " "
    table = table_for(command, told)
    port = re.search(r" --port[ =](\d+) ", words)
    host = re.search(r" --host[ =](\S+) ", words)
    number = port[1] if port else _PORTS[table.engine] if table else None
    name = host[1] if host and host[1] not in ("0.0.0.0", "::") else "127.0.0.1"
    name = f"[{name}]" if ":" in name else name
    return None if number is None else f"http://{name}:{number}"
