"""``python -m readmit.gate``: see ``--help``."""

import os
import sys

import typer

from readmit.commands.gate import command
from weightcache.errors import WeightCacheError

if __name__ == "__main__":
    try:
        typer.run(command)
    except WeightCacheError as error:
        print(f"readmit gate: {error}", file=sys.stderr)
        sys.exit(os.EX_CONFIG)
