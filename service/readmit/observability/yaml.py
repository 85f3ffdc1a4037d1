"""YAML for rule files: text that Prometheus reads and people review. Nothing is imported that readmit does not need."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

_PLAIN: Final = re.compile(r"[A-Za-z][A-Za-z0-9_./:-]*")
_WORDS: Final = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})


def dump(value: Any, indent: int = 0) -> str:
    """A value of dicts, lists, strings and numbers as block YAML."""
    pad = " " * indent
    lines = []
    if isinstance(value, Mapping):
        for key, item in value.items():
            lines.append(f"{pad}{key}:{_below(item, indent)}")
        return "\n".join(lines)
    for item in value:
        text = dump(item, indent + 2) if _is_block(item) else f"{pad}  {_scalar(item, indent)}"
        lines.append(f"{pad}- {text[indent + 2 :]}")
    return "\n".join(lines)


def _below(item: Any, indent: int) -> str:
    return "\n" + dump(item, indent + 2) if _is_block(item) else " " + _scalar(item, indent)


def _is_block(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, Sequence) and not isinstance(value, str))


def _scalar(value: Any, indent: int) -> str:
    if not isinstance(value, str):
        return json.dumps(value)
    if "\n" in value or '"' in value:
        return "|\n" + "\n".join(" " * (indent + 2) + line for line in value.strip("\n").split("\n"))
    plain = _PLAIN.fullmatch(value) and value.lower() not in _WORDS
    return value if plain else json.dumps(value, ensure_ascii=False)
