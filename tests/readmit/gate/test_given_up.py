"""A slot whose engine nobody starts any more: whoever asks why nothing is ready is told so."""

from pathlib import Path

import httpx
from tests.fixtures import http
from tests.readmit.gate.harness import ending, until
from tests.readmit.gate.nodes import Node


def test_who_asks_is_told_that_nobody_starts_it_again(golden: Path, tmp_path: Path) -> None:
    nothing = tmp_path / "model"
    nothing.mkdir()
    node = Node(nothing, golden, tmp_path)
    with ending(node):
        detail = until(lambda: told(node), "the gate to have heard that the slot is given up")
        assert "Nobody starts it again: see readmit status, and then readmit restart a." in detail
        assert "slot a starting, given_up" in http.get(f"{node.gate_url}/readyz?verbose", timeout=60).text
        assert node.slot("a")["reason"] == "given_up"
        starts = node.child("a")["starts"]
        assert node.readmit("restart", "a").returncode == 0
        until(lambda: node.child("a")["starts"] > starts, "another attempt")


def told(node: Node) -> str | None:
    try:
        problem = http.get(f"{node.gate_url}/readyz", timeout=60).json()
    except httpx.TransportError:  # it has not begun to listen
        return None
    return str(problem["detail"]) if problem["reason"] == "given_up" else None
