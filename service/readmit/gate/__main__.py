"""``python -m readmit.gate``: see ``--help``."""

import os
import sys

import typer

from readmit.commands.gate import command
from weightcache.errors import WeightCacheError
from weightcache.logs import complain

if __name__ == "__main__":
    try:
        typer.run(command)
    except WeightCacheError as error:
        complain("readmit gate", error)
        sys.exit(os.EX_CONFIG)
