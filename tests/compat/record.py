"""Records what a release writes: frames, a manifest, a journal and a keeper's state, as one JSON file.

PYTHONPATH=RELEASE/daemon python tests/compat/record.py > tests/compat/recordings/RELEASE.json

It is run by the release it records and uses nothing else.
"""

import json
import sqlite3
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from weightcache import messages
from weightcache.fingerprint import CacheConfig
from weightcache.frames import encode
from weightcache.journal import Context, Journal
from weightcache.keeper.state import ChildRecord, KeeperState
from weightcache.manifest import Manifest, Publisher, generation_of

CONFIG = CacheConfig(
    model_path="/models/m",
    model_arch="Tiny",
    checkpoint_digest="d" * 64,
    dtype="bfloat16",
    torch_version="2.13.0",
    engine="test",
    layout_id="test-1",
)
MESSAGES = [
    messages.Hello(version="0", node="n", slot="a", episode="e" * 32, attempt=1, rank=0, traceparent="00-e-s-01"),
    messages.Attach(config=CONFIG.to_dict(), wait_s=1.5),
    messages.Claim(config=CONFIG.to_dict(), bytes=4096, replace=True),
    messages.Progress(done=1, total=2),
    messages.Publish(descriptors=2),
    messages.Status(),
    messages.Explain(config=CONFIG.to_dict()),
    messages.Release(generation="g" * 32, force=True),
    messages.Quarantine(generation="g" * 32, reason="wrong answers", lift=False),
    messages.Load(argv=["python", "-m", "engine"], env={"A": "b"}, wait_s=60.0),
    messages.Welcome(version="0", instance="i"),
    messages.Attached(generation="g" * 32, descriptors=2),
    messages.Missed(reason="fingerprint", message="no", detail="dtype", differences=[{"field": "dtype"}]),
    messages.Loading(pid=7, done=1, total=2, elapsed_s=0.5),
    messages.Claimed(released=["g" * 32]),
    messages.Published(generation="g" * 32),
    messages.Done(data={"pid": 7}),
]


def manifest() -> Manifest:
    return Manifest(
        config=CONFIG,
        publisher=Publisher(pid=7, executable="/bin/engine", origin="disk", slot="a", wall_ns=1),
        arena="memfd",
        chunks=[96],
        names=["weight", "seen"],
        dtypes=["bfloat16", "int64"],
        dtype=[0, 1],
        shapes=[(4, 8), ()],
        strides=[None, None],
        offsets=[0, 64],
        kinds=bytes([0, 1]),
        aliases={"tied": 0},
        digest_algorithm="blake3",
        digest_size=4,
        digests=bytes(range(8)),
        extras={"note": "x"},
    )


def journal(path: Path, generation: str) -> dict[str, Any]:
    """A recovery by hit, and what a daemon remembers by it."""
    it = Journal(path, Context("n", "a", "e" * 32, 1))
    outside = Context("n", "a", "e" * 32)
    resident = {"generation": generation, "config": CONFIG.to_dict(), "bytes": 96, "tensors": 2}
    it.append("publish", "published", resident, context=Context("n"))
    it.append("quarantine", "set", {"generation": generation, "reason": "wrong answers"}, context=Context("n"))
    fault = {"cause": "crash", "fault_boottime_ns": 1_000, "fault_clock": "exit", "previous": None}
    it.append("episode_open", "crash", fault, at_ns=1_000, context=outside)
    it.append("attempt_start", "", {"command": ["engine"], "starting_state": None}, at_ns=2_000)
    it.append("phase_begin", "load_weights", at_ns=2_000)
    it.append("lookup", "hit", {"config": CONFIG.to_dict(), "mode": "client", "generation": generation}, at_ns=3_000)
    it.append("lease_open", "", {"generation": generation, "lease": f"lease-{generation}-i.1", "pid": 7}, at_ns=3_000)
    it.append("phase_end", "load_weights", at_ns=4_000)
    it.append("attempt_end", "ready", at_ns=5_000)
    it.append("episode_close", "ready", {"verified": True, "generation": generation}, at_ns=5_000, context=outside)
    it.close()
    with sqlite3.connect(path) as database:
        (version,) = database.execute("PRAGMA user_version").fetchone()
        return {"version": version, "sql": list(database.iterdump())}


def record() -> dict[str, Any]:
    content = manifest().encode()
    with tempfile.TemporaryDirectory() as folder:
        state = KeeperState(Path(folder, "r"), ["a"])
        state.save("n", [ChildRecord("a", "engine", "running", 7, 8, True, 9, "e" * 32, 1)])
        kept = json.loads(Path(folder, "r", "keeper.json").read_text())
        return {
            "frames": [[encode(it).hex(), msgspec.to_builtins(it)] for it in MESSAGES],
            "manifest": {"content": content.hex(), "generation": generation_of(content)},
            "journal": journal(Path(folder, "journal.sqlite3"), generation_of(content)),
            "keeper": kept,
        }


if __name__ == "__main__":
    json.dump(record(), sys.stdout, indent=1)
    print()
