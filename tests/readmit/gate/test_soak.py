"""A short soak: a real node loses engine after engine, and its gate, daemon and keeper stay as they were."""

import json
import subprocess
import sys
from pathlib import Path

SOAK = Path(__file__).parents[3] / "benchmarks" / "soak.py"


def test_a_node_that_loses_engines_stays_as_small_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "soak.json"
    command = [sys.executable, str(SOAK), "--seconds", "16", "--every", "4", "--json", str(file)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("\n") == 1
    found = json.loads(file.read_text())
    assert json.loads(result.stdout) == found
    assert found["kills"] >= 2
    assert set(found["processes"]) == {"gate", "daemon", "keeper"}
    assert found["flat"]
    assert (found["wrong"], found["hung"], found["unverified"]) == (0, 0, 0)
    assert found["answers"] > 0
