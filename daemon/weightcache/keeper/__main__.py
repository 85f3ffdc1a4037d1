"""``python -m weightcache.keeper SPEC``. Exit status: 0 told to stop, 1 its engine was given up, 2 bad settings."""

import sys
from pathlib import Path

from weightcache.errors import ConfigError
from weightcache.keeper.keeper import Keeper
from weightcache.keeper.spec import KeeperSpec
from weightcache.log_line import chosen


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m weightcache.keeper SPEC", file=sys.stderr)
        return 2
    try:
        chosen()
        return Keeper(KeeperSpec.load(Path(sys.argv[1]))).run()
    except ConfigError as error:
        print(f"readmit: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
