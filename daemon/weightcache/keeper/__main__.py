"""``python -m weightcache.keeper SPEC``. Exit status: 0 told to stop, 1 its engine was given up, 2 bad settings.

``SPEC HANDOVER`` goes on where an earlier program of this process was (`weightcache.keeper.handover`), and
``--trial SPEC HANDOVER`` only says whether it could.
"""

import sys
from pathlib import Path

from weightcache.errors import ConfigError
from weightcache.keeper.handover import TRIAL, Handover
from weightcache.keeper.keeper import Keeper
from weightcache.keeper.spec import KeeperSpec
from weightcache.log_line import chosen


def main(words: list[str]) -> int:
    trial = words[:1] == [TRIAL]
    words = words[trial:]
    if len(words) not in (1, 2) or (trial and len(words) == 1):
        print("usage: python -m weightcache.keeper SPEC", file=sys.stderr)
        return 2
    try:
        chosen()
        handover = Handover.read(int(words[1])) if len(words) == 2 else None
        if trial:
            KeeperSpec.load(Path(words[0]))
            return 0
        return Keeper(Path(words[0]), handover).run()
    except ConfigError as error:
        print(f"readmit: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
