"""The gate tells the C library and Python how to allocate, whoever starts it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.readmit.gate.harness import Gate, ScriptedEngine, ending, plainly, probe_file

from readmit.gate import huge_pages


def environment_of(pid: int) -> dict[str, str]:
    pairs = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if pair)


def test_a_gate_that_was_started_plainly_starts_itself_anew_in_the_same_process(
    engine: ScriptedEngine, tmp_path: Path
) -> None:
    where = ["--journal", str(tmp_path / "journal.sqlite3"), "--probes", str(probe_file(tmp_path / "probes.json"))]
    gate = Gate("--slot", f"a={engine.url}", "--unsupervised", "--drain-notice", "0", *where, start=plainly)
    with ending(gate):
        gate.until_ready()
        assert huge_pages.ENVIRONMENT.items() <= environment_of(gate.pid).items()


@pytest.mark.parametrize("program", [["-m", "readmit.gate"], ["-m", "readmit.cli", "gate"]])
def test_both_ways_to_start_it_keep_their_arguments(program: list[str]) -> None:
    plain = {name: value for name, value in os.environ.items() if name not in huge_pages.ENVIRONMENT}
    argv = [sys.executable, *program, "--no-such-option", "a b"]
    done = subprocess.run(argv, env=plain, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--no-such-option" in done.stderr


def test_whoever_chose_how_memory_is_allocated_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONMALLOC", "pymalloc")
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("started anew"))
    huge_pages.settle()
