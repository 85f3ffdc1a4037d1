"""``python -m readmit.gate``: see ``--help``."""

import os
import sys

from readmit.commands.gate import app
from weightcache.errors import WeightCacheError
from weightcache.logs import complain

if __name__ == "__main__":
    try:
        app(prog_name="readmit gate")
    except WeightCacheError as error:
        complain("readmit gate", error)
        sys.exit(os.EX_CONFIG)
