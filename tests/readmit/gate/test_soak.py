"""A short soak: a real node loses engine after engine, and its gate, daemon and keeper stay as they were."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.readmit.forked import forks, interpreter

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
ENGINE = "gate_parts.engine"


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark, except that its engines are forked from the process that all tests share, and from the first."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import soak
    from gate_parts.node import Node
    from gate_parts.processes import Children

    class Forking(Children):
        def start(self, *argv: str) -> "subprocess.Popen[Any]":
            residents = dict.fromkeys(("a-preload", "b-preload"), f"benchmarks.{ENGINE}")
            with self._log.open("a") as log:
                keeper = forks().popen_keeper(argv, self._log.parent / "run", residents, stdout=log, stderr=log)
            self._running.append(keeper)
            return keeper

    class ForkedNode(Node):
        def _config(self, *facts: Any) -> str:
            text: str = super()._config(*facts).replace(ENGINE, f"benchmarks.{ENGINE}")
            return text.replace(json.dumps(sys.executable), json.dumps(interpreter(self.runtime.parent)))

        async def until_forked(self) -> None:
            """They are."""

    @contextmanager
    def place() -> Iterator[tuple[Path, Children]]:
        with tempfile.TemporaryDirectory(prefix="soak-") as folder:
            children = Forking(Path(folder) / "log")
            try:
                yield Path(folder), children
            finally:
                children.end()

    monkeypatch.setattr(soak, "Node", ForkedNode)
    monkeypatch.setattr(soak, "place", place)
    for name, value in soak.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)  # as it does itself, but not for the tests that follow
    return soak


def test_a_node_that_loses_engines_stays_as_small_as_it_was(
    soak: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "soak.json"
    monkeypatch.setattr(sys, "argv", ["soak.py", "--seconds", "16", "--every", "4", "--json", str(file)])
    with pytest.raises(SystemExit) as ended:
        soak.main()
    printed = capsys.readouterr().out
    assert ended.value.code == 0, printed
    assert printed.count("\n") == 1
    found = json.loads(file.read_text())
    assert json.loads(printed) == found
    assert found["kills"] >= 2
    assert set(found["processes"]) == {"gate", "daemon", "keeper"}
    assert found["flat"]
    assert (found["wrong"], found["hung"], found["unverified"]) == (0, 0, 0)
    assert found["answers"] > 0
