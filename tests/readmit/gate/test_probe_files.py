"""Each slot gives the golden answers of the weights that it serves, also while a model is rolled out."""

from pathlib import Path

import msgspec
import pytest
from tests.readmit.gate.harness import Gate, History, ScriptedEngine, ending, probe_file

from readmit.gate.probe_files import ProbeFiles, staleness
from readmit.node import check_probes
from readmit.probes import ProbeSet
from weightcache.errors import ConfigError
from weightcache.journal import Context


def recorded(path: Path, answer: str, digest: str | None) -> ProbeSet:
    probe_set = msgspec.structs.replace(ProbeSet.load(probe_file(path, answer)), checkpoint_digest=digest)
    probe_set.save(path)
    return probe_set


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "probes"
    folder.mkdir()
    recorded(folder / "old.json", " London", "old")
    recorded(folder / "new.json", " Paris", "new")
    return folder


@pytest.mark.parametrize("digest", ["old", "new"])
def test_the_set_of_its_own_weights_is_chosen(folder: Path, digest: str) -> None:
    recorded(folder / "any.json", " Rome", None)
    chosen = ProbeFiles(folder).of({"checkpoint_digest": digest})
    assert chosen is not None
    assert chosen.checkpoint_digest == digest


def test_where_nothing_tells_which_none_is_guessed(folder: Path) -> None:
    files = ProbeFiles(folder)
    assert files.of({}) is None
    assert "its engine names no checkpoint" in files.why_none()


def test_weights_that_no_set_speaks_of_have_a_stale_one(folder: Path) -> None:
    chosen = ProbeFiles(folder).of({"checkpoint_digest": "another"})
    assert chosen is not None
    assert staleness(chosen, {"checkpoint_digest": "another"}) is not None


def test_a_file_that_has_become_unreadable_leaves_its_set_in_force_and_a_new_one_counts_at_once(folder: Path) -> None:
    files = ProbeFiles(folder)
    assert len(files.sets()) == 2
    (folder / "old.json").write_text("{")
    assert files.of({"checkpoint_digest": "old"}) is not None
    assert files.error is not None
    recorded(folder / "third.json", " Rome", "third")
    assert files.of({"checkpoint_digest": "third"}) is not None


def test_a_node_is_not_started_on_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="probe file"):
        check_probes(tmp_path, unverified_ok=False)


def test_two_slots_on_two_models_are_each_asked_their_own(folder: Path, tmp_path: Path) -> None:
    history = History(tmp_path / "journal.sqlite3")
    engines = {"a": ScriptedEngine(), "b": ScriptedEngine()}
    where = [word for slot, engine in engines.items() for word in ("--slot", f"{slot}={engine.url}")]
    with ending(*engines.values()):
        engines["a"].tell(answer=" London")
        for (slot, engine), digest in zip(engines.items(), ("old", "new"), strict=True):
            episode = history.spawned(engine.pid, slot=slot)
            asked = {"config": {"checkpoint_digest": digest}, "generation": digest}
            history.journal.append("lookup", "hit", asked, context=Context("node", slot, episode, 1, 0))
        gate = Gate(*where, "--journal", str(history.path), "--probes", str(folder), "--drain-notice", "0")
        with ending(gate):
            for slot in engines:
                gate.until_state("ready", "verified", slot)
