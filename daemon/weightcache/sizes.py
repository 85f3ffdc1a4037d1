"""Sizes as people write them: ``120GiB``, ``4GB``, or a number of bytes. Standard library only."""

import re
from typing import Final

_UNITS: Final = {"": 1, "B": 1} | {
    f"{letter}{kind}": base**power
    for power, letter in enumerate("KMGT", 1)
    for kind, base in (("B", 1000), ("iB", 1024))
}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B|B|)")


def parse_size(text: str) -> int:
    """Bytes from text; raises ValueError for other text."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size: write 120GiB, 4GB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2]])
