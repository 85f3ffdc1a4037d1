"""Every alert has a runbook, and its first command is run on a real node and shows what it says is healthy."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.observability.lab import Lab
from tests.observability.servers import ROOT
from tests.observability.test_rules import ALERTS, NAMES
from tests.readmit.nodes import place

RUNBOOKS = sorted((ROOT / "alerts/runbooks").glob("*.md"))
SECTIONS = ("What it means", "First command", "What to do", "How to bypass", "When it is safe to ignore")


@pytest.fixture(scope="module")
def node() -> Iterator[Lab]:
    """A healthy node that has recovered once."""
    with place(Lab) as lab:
        lab.configure("a")
        process = lab.up()
        lab.until_closed("a", 1)
        assert lab.fault("a").outcome == "ready"
        yield lab
        lab.end(process)


def block(text: str, number: int) -> str:
    return re.findall(r"```(?:sh)?\n(.*?)\n```", text, re.DOTALL)[number]


def test_there_is_one_for_each_alert() -> None:
    assert [runbook.stem for runbook in RUNBOOKS] == NAMES


@pytest.mark.parametrize("runbook", RUNBOOKS, ids=lambda file: file.stem)
def test_it_says_all_there_is_to_say(runbook: Path) -> None:
    text = runbook.read_text()
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == list(SECTIONS)
    severity = {alert["labels"]["severity"] for alert in ALERTS if alert["alert"] == runbook.stem}
    first = text.split("\n")[2]
    assert first.lower().startswith(f"{severity.pop()}, domain: ")
    assert "process" in first or "node" in first
    for linked in re.findall(r"\]\(([^)]+)\)", text):
        assert (runbook.parent / linked).exists()


@pytest.mark.parametrize("runbook", RUNBOOKS, ids=lambda file: file.stem)
def test_its_first_command_shows_a_healthy_node(runbook: Path, node: Lab) -> None:
    text = runbook.read_text()
    command = block(text, 0).replace("readmit ", f"{sys.executable} -m readmit.cli ", 1)
    command = command.replace(":9464/", f":{node.metrics_port}/").replace(":8000/", f":{node.gate_port}/")
    result = subprocess.run(
        ["bash", "-c", command], cwd=node.folder, env=node.environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    output = " ".join(result.stdout.split())
    for line in block(text, 1).split("\n"):
        pattern = ".*".join(re.escape(part.strip()) for part in " ".join(line.split()).split("..."))
        assert re.search(pattern, output), f"{line!r} is not in what {command} says: {result.stdout}"
