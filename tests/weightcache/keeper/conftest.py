import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.weightcache.keeper.harness import Node


@pytest.fixture
def node() -> Iterator[Node]:
    # Not tmp_path: a socket's path has 107 bytes.
    node = Node(Path(tempfile.mkdtemp(prefix="keeper-")))
    yield node
    node.close()
