"""Real engines with a real language model, shared by the tests that leave them as they were."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.gate_parts.damage import Damage, last_norm
from tests.readmit.gate.harness import ReferenceEngine, ScriptedEngine, ending, probe_file, until
from tests.readmit.gate.nodes import Node

from readmit import demo_model


@pytest.fixture(scope="module")
def engine() -> Iterator[ScriptedEngine]:
    """An engine without a model, for tests of what lies between it and clients."""
    engine = ScriptedEngine()
    with ending(engine):
        yield engine


@pytest.fixture(scope="session")
def model() -> Path:
    return demo_model.prepare()


@pytest.fixture(scope="session")
def golden(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A probe file with what the model says, two tokens long."""
    return probe_file(tmp_path_factory.mktemp("golden") / "probes.json", " Paris.", model=model.name, max_tokens=2)


@pytest.fixture(scope="session")
def engines(model: Path) -> Iterator[tuple[ReferenceEngine, ReferenceEngine]]:
    pair = ReferenceEngine(model), ReferenceEngine(model)
    with ending(*pair):
        yield pair[0].until_serving(), pair[1].until_serving()


@pytest.fixture(scope="module")  # no longer: its gate goes on verifying, at the cost of all that comes after
def pair(model: Path, golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A node with two slots on the same resident weights, both ready."""
    node = Node(model, golden, tmp_path_factory.mktemp("pair"), "--hang-limit", "10", cached=True, slots=("a", "b"))
    with ending(node):
        node.until_ready()
        for slot in ("a", "b"):
            node.until_state(slot, "ready")
        until(lambda: not node.replay().open_episodes, "the first starts to be over")
        yield node


@pytest.fixture(scope="session")
def tensor(model: Path) -> bytes:
    return last_norm(model)


@pytest.fixture
def damages(engines: tuple[ReferenceEngine, ReferenceEngine], tensor: bytes) -> Iterator[list[Damage]]:
    """Damage to each engine's weights, not yet done; undone at the end."""
    damages = [Damage(engine.pid, tensor) for engine in engines]
    yield damages
    for damage in damages:
        damage.lift()
