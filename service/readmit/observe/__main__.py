"""``python -m readmit.observe --slot NAME -- COMMAND``: one slot's observer, under the keeper."""

import argparse

from readmit.observe.observer import Observer
from weightcache import paths
from weightcache.journal import Context


def main() -> None:
    parser = argparse.ArgumentParser(prog="readmit.observe")
    parser.add_argument("--slot", required=True)
    parser.add_argument("--address")
    parser.add_argument("--engine")
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    Observer(
        paths.journal_path(),
        Context.from_environment().node,
        arguments.slot,
        arguments.command,
        paths.state_dir() / "output",
        arguments.address,
        arguments.engine,
    ).run()


if __name__ == "__main__":
    main()
