"""The table of field failures names tests that exist, for every entry that it promises."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs/bug-log.md").read_text()
ENTRIES = [line.split("|") for line in TABLE.splitlines() if re.match(r"\| B\d\d ", line)]


def test_every_entry_of_the_cpu_is_there() -> None:
    promised = [f"B{number:02}" for number in (*range(1, 23), *range(31, 36))]
    assert [cells[1].strip() for cells in ENTRIES] == promised


def test_every_test_that_is_named_exists() -> None:
    for cells in ENTRIES:
        named = re.findall(r"`([\w/]+\.py)`: ((?:`test_\w+`(?:, )?)+)", cells[3])
        assert named, cells[1]
        for file, tests in named:
            folder = ROOT / "tests" if file.startswith(("observability/", "readmit/")) else ROOT / "tests/weightcache"
            defined = set(re.findall(r"def (test_\w+)", (folder / file).read_text()))
            missing = set(re.findall(r"test_\w+", tests)) - defined
            assert not missing, f"{cells[1].strip()}: {file} has no {', '.join(sorted(missing))}"
