"""``python -m readmit.gate``: see ``--help``."""

import os
import sys

from readmit.gate import huge_pages

if __name__ == "__main__":
    huge_pages.settle()  # before what takes long to import is imported

    from readmit.commands.gate import app
    from weightcache.errors import WeightCacheError
    from weightcache.logs import complain

    try:
        app(prog_name="readmit gate")
    except WeightCacheError as error:
        complain("readmit gate", error)
        sys.exit(os.EX_CONFIG)
