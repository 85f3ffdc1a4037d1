"""``python -m readmit.observability``: write the rules or the dashboards, or check those that are there."""

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from readmit.observability.alerts import Alerts
from readmit.observability.config import Settings
from readmit.observability.dashboards import dashboards
from readmit.observability.rules import recording_rules
from readmit.observability.yaml import dump


def rules(settings: Settings) -> dict[Path, str]:
    """The rule files by their path."""
    return {
        Path("alerts/readmit.rules.yaml"): _rule_file(recording_rules()),
        Path("alerts/readmit.alerts.yaml"): _rule_file(Alerts(settings).groups()),
    }


def dashboard_files(settings: Settings) -> dict[Path, str]:
    """The dashboards by their path."""
    return {
        Path(f"dashboards/{it.uid}.json"): json.dumps(it.build(settings.runbooks), indent=1) + "\n"
        for it in dashboards()
    }


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    settings = Settings(**{name: value for name, value in vars(options).items() if name in Settings.__annotations__})
    files = rules(settings) if options.what == "rules" else dashboard_files(settings)
    return _check(options.into, files) if options.check else _write(options.into, files)


def _rule_file(groups: list[dict[str, Any]]) -> str:
    return f"# Made by python -m readmit.observability rules; changes belong there.\n{dump({'groups': groups})}\n"


def _write(folder: Path, files: Mapping[Path, str]) -> int:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
        print(folder / path)
    return 0


def _check(folder: Path, files: Mapping[Path, str]) -> int:
    stale = [
        path for path, text in files.items() if not (folder / path).exists() or (folder / path).read_text() != text
    ]
    for path in stale:
        print(f"{folder / path} is not what is generated", file=sys.stderr)
    return 1 if stale else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m readmit.observability",
        description="Write the rules or the dashboards, or check those that are there.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("what", choices=("rules", "dashboards"))
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a file differs")
    parser.add_argument("--into", type=Path, default=Path("."), help="the folder that alerts/ and dashboards/ are in")
    default, about = Settings(), dict(re.findall(r"^ +(\w+): (.*)\.$", Settings.__doc__ or "", re.MULTILINE))
    for name, kind in Settings.__annotations__.items():
        parser.add_argument(
            "--" + name.replace("_", "-"), type=kind, default=getattr(default, name), help=about.get(name)
        )
    return parser


if __name__ == "__main__":
    sys.exit(main())
