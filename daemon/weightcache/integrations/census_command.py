"""The command by which one version of an engine describes a checkpoint, for another version to be compared with."""

import argparse
import os
import sys
from collections.abc import Callable

import msgspec

from weightcache.errors import WeightCacheError
from weightcache.parity import Report


def main(report: Callable[[str, str | None], Report], description: str) -> None:
    """Print a report as JSON, or what is wrong, and exit with 0 or 2.

    Args:
        report: from a checkpoint's folder and a dtype, None for the checkpoint's own, to what the engine makes of it.
        description: of the command.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model")
    parser.add_argument("--dtype")
    arguments = parser.parse_args()
    answers = os.dup(1)
    os.dup2(2, 1)  # engines log to stdout
    try:
        found = report(arguments.model, arguments.dtype)
    except WeightCacheError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    with os.fdopen(answers, "wb") as file:
        file.write(msgspec.json.encode(found) + b"\n")
