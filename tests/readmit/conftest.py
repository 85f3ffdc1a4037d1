from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from tests.readmit.nodes import PYTHONPATH, Node, place

if TYPE_CHECKING:
    from tests.readmit.faults import Stage


@pytest.fixture(scope="module")
def stage() -> "Iterator[Stage]":
    """A daemon, a model, and commands that meet there; one for all tests of a module."""
    from tests.readmit.faults import Stage  # imports torch, which most tests here do without

    stage = Stage()
    yield stage
    stage.close()


@pytest.fixture
def node() -> Iterator[Node]:
    """A folder with the configuration of a node that does not run yet."""
    with place(Node) as here:
        here.configure()
        here.environment["PYTHONPATH"] = PYTHONPATH
        yield here
