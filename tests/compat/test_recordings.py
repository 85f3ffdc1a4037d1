"""What earlier releases wrote is read by this one, also where there is no history to run them from."""

import json
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest

from weightcache.episodes import Replay
from weightcache.fingerprint import CacheConfig
from weightcache.frames import HEADER, body_length, decode_reply, decode_request
from weightcache.journal import Context, Journal, boot_id
from weightcache.keeper.state import read
from weightcache.manifest import decode, generation_of
from weightcache.recollection import recall

RECORDINGS = sorted(Path(__file__).with_name("recordings").glob("*.json"))
REPLIES = {"welcome", "attached", "missed", "loading", "claimed", "published", "done"}


@pytest.fixture(params=RECORDINGS, ids=lambda path: path.stem)
def recording(request: pytest.FixtureRequest) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(request.param.read_text())
    return facts


def test_there_are_recordings() -> None:
    assert RECORDINGS


def test_every_message_means_what_it_meant(recording: dict[str, Any]) -> None:
    for text, meant in recording["frames"]:
        frame = bytes.fromhex(text)
        body = frame[HEADER.size :]
        assert body_length(frame[: HEADER.size]) == len(body)
        read_ = msgspec.to_builtins((decode_reply if meant["type"] in REPLIES else decode_request)(body))
        assert {name: read_.get(name) for name in meant} == meant


def test_a_manifest_still_proves_its_name(recording: dict[str, Any]) -> None:
    content = bytes.fromhex(recording["manifest"]["content"])
    assert generation_of(content) == recording["manifest"]["generation"]
    manifest = decode(content)
    assert (manifest.names, manifest.shapes, manifest.aliases) == (["weight", "seen"], [(4, 8), ()], {"tied": 0})
    assert manifest.config.differences(CacheConfig.from_dict(recording["frames"][1][1]["config"])) == []


def test_a_journal_tells_the_same_story(recording: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite3"
    with sqlite3.connect(path) as database:
        database.executescript("\n".join(recording["journal"]["sql"]))
        database.execute(f"PRAGMA user_version={recording['journal']['version']}")
    database.close()
    journal, generation = Journal(path, Context("n")), recording["manifest"]["generation"]
    past = recall(journal)
    assert past.quarantined == {generation: "wrong answers"}
    assert [it.generation for it in past.residences.values()] == [generation]
    assert list(past.leases) == [f"lease-{generation}-i.1"]
    replay = Replay()
    replay.catch_up(journal)
    (episode,) = replay.episodes
    assert (episode.cause, episode.path, episode.outcome, episode.verified) == ("crash", "hit", "ready", True)
    assert episode.phases_s()["load_weights"] == pytest.approx(2e-6)
    journal.append("clock", "after")
    assert journal.last_id() > 10


def test_a_keepers_children_are_known(recording: dict[str, Any], tmp_path: Path) -> None:
    state = {**recording["keeper"], "boot_id": boot_id()}
    (tmp_path / "keeper.json").write_text(json.dumps(state))
    pid, (child,) = read(tmp_path)
    assert pid == state["pid"]
    assert (child.name, child.pid, child.start_ticks, child.ready, child.attempt) == ("a", 7, 8, True, 1)
