"""Which table is for which command."""

import re
from collections.abc import Sequence
from typing import Final

from readmit.observe import sglang, vllm
from readmit.observe.markers import Table

TABLES: Final = (vllm.TABLE, sglang.TABLE)
_PROGRAMS: Final = {
    "vllm": r"(?:^|[ /])vllm serve |-m vllm\.entrypoints\.",
    "sglang": r"-m sglang\.launch_server|(?:^|[ /])sglang serve ",
}
_PORTS: Final = {"vllm": 8000, "sglang": 30000}


def table_for(command: Sequence[str]) -> Table | None:
    """The table of the engine that a command starts; None for an engine without one."""
    words = " ".join(command) + " "
    return next((table for table in TABLES if re.search(_PROGRAMS[table.engine], words)), None)


def url_of(command: Sequence[str]) -> str | None:
    """The base URL that the engine of a command will have; None where neither it nor its engine says so."""
    words = " ".join(command) + " "
    table = table_for(command)
    port = re.search(r" --port[ =](\d+) ", words)
    host = re.search(r" --host[ =](\S+) ", words)
    number = port[1] if port else _PORTS[table.engine] if table else None
    name = host[1] if host and host[1] not in ("0.0.0.0", "::") else "127.0.0.1"
    return None if number is None else f"http://{name}:{number}"
