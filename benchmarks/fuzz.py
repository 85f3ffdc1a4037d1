"""The longer fuzzing: frames and manifests that are damaged, made up, or hostile.

Every one of them must be taken or refused with a typed error, quickly, and memory must not grow. What is taken is used:
messages are encoded again, and every tensor of a manifest is built on an arena. A share of the frames goes to a real
daemon, which must answer or hang up, and serve an honest client at the end.

    python benchmarks/fuzz.py [--frames 200000] [--manifests 100000] [--daemon 4000] [--seed 20261] [--json OUT]
"""

import argparse
import contextlib
import gc
import json
import os
import random
import resource
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from weightcache import messages
from weightcache.arena.memfd import MemfdMapping
from weightcache.arena.seals import sealed_file
from weightcache.errors import CacheMiss, ImportRejected, ProtocolError
from weightcache.fingerprint import CacheConfig
from weightcache.frames import HEADER, body_length, decode_reply, decode_request, encode
from weightcache.manifest import Manifest, Publisher, decode
from weightcache.protocol import Connection
from weightcache.version import VERSION

CONFIG = CacheConfig(
    model_path="/models/m",
    model_arch="M",
    checkpoint_digest="d",
    dtype="bfloat16",
    torch_version="2",
    engine="e",
    layout_id="l",
)
MANIFEST = Manifest(
    config=CONFIG,
    publisher=Publisher(1, "/usr/bin/python3", "/models/m", None, 0),
    arena="memfd",
    chunks=[1024],
    names=["a", "a_t", "scalar", "empty"],
    dtypes=["bfloat16", "int64"],
    dtype=[0, 0, 1, 0],
    shapes=[(4, 8), (8, 4), (), (0, 8)],
    strides=[None, (1, 8), None, None],
    offsets=[0, 0, 256, 0],
    kinds=bytes([0, 0, 1, 0]),
    aliases={"tied": 0},
    shared=[[0, 1]],
    digest_algorithm="blake3",
    digest_size=32,
    digests=bytes(128),
)
PLAIN: dict[str, Any] = msgspec.to_builtins(MANIFEST, builtin_types=(bytes,))
MESSAGES: tuple[messages.Request | messages.Reply, ...] = (
    messages.Hello(VERSION),
    messages.Attach(CONFIG.to_dict(), 1.0),
    messages.Claim(CONFIG.to_dict(), 100, True),
    messages.Progress(1, 2),
    messages.Publish(0),
    messages.Status(),
    messages.Explain(CONFIG.to_dict()),
    messages.Release("g", True),
    messages.Quarantine("g", "why"),
    messages.Welcome(VERSION, "i"),
    messages.Attached("g", 2),
    messages.Missed("absent", "m"),
    messages.Loading(1, 2, 3),
    messages.Done({"a": [1]}),
)
SLOW_S = 1.0


class Source:
    """Made-up values, all of which follow from a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def number(self) -> int:
        pick = self.random
        sizes = (pick.randrange(-2, 9), 8 * pick.randrange(64), pick.getrandbits(64), -pick.getrandbits(63))
        return pick.choices(sizes, (6, 6, 1, 1))[0]

    def value(self, depth: int = 0) -> Any:
        pick = self.random
        kind = pick.randrange(9 if depth < 4 else 7)
        if kind == 7:
            return [self.value(depth + 1) for _ in range(pick.randrange(4))]
        if kind == 8:
            return {pick.choice("abcd"): self.value(depth + 1) for _ in range(pick.randrange(4))}
        scalars = (None, True, self.number(), pick.random(), "text", pick.randbytes(4), float("nan"))
        return scalars[kind]

    def damaged(self, content: bytes) -> bytes:
        damaged = bytearray(content)
        for _ in range(self.random.randrange(1, 5)):
            damaged[self.random.randrange(len(damaged))] = self.random.randrange(256)
        if self.random.random() < 0.2:
            del damaged[self.random.randrange(len(damaged)) :]
        return bytes(damaged)

    def frame(self) -> bytes:
        pick = self.random
        good = encode(pick.choice(MESSAGES))
        kind = pick.randrange(5)
        if kind == 0:
            return self.damaged(good)
        if kind == 1:
            return pick.randbytes(pick.randrange(64))
        if kind == 2:
            return struct.pack(">4sI", b"rdm1", pick.getrandbits(32)) + good[HEADER.size :]
        fields = msgspec.msgpack.decode(good[HEADER.size :])
        if kind == 3 and len(fields) > 1:
            fields[pick.choice(list(fields))] = self.value()
        else:
            fields[pick.choice("abcd")] = self.value()
        body = msgspec.msgpack.encode(fields)
        return struct.pack(">4sI", b"rdm1", len(body)) + body

    def manifest(self) -> bytes:
        pick = self.random
        if pick.random() < 0.3:
            return self.damaged(MANIFEST.encode())
        columns = dict(PLAIN)
        makers: dict[str, Callable[[], Any]] = {
            "chunks": lambda: [self.number() for _ in range(pick.randrange(1, 3))],
            "dtype": lambda: [pick.randrange(-1, 3) for _ in range(4)],
            "shapes": lambda: [self.numbers() for _ in range(4)],
            "strides": lambda: [pick.choice((None, self.numbers())) for _ in range(4)],
            "offsets": lambda: [self.number() for _ in range(4)],
            "kinds": lambda: bytes(pick.randrange(4) for _ in range(4)),
            "aliases": lambda: {pick.choice("axy"): pick.randrange(-1, 6) for _ in range(pick.randrange(3))},
            "shared": lambda: [[pick.randrange(-1, 5) for _ in range(pick.randrange(5))] for _ in range(2)],
            "extras": self.value,
        }
        for name in pick.sample(list(makers), pick.randrange(1, 4)):
            columns[name] = makers[name]()
        return msgspec.msgpack.encode(columns)

    def numbers(self) -> list[int]:
        return [self.number() for _ in range(self.random.randrange(4))]


def take_frame(frame: bytes) -> str:
    """What becomes of a frame at either end."""
    try:
        if len(frame) < HEADER.size:
            return "short"
        body_length(frame[: HEADER.size])
    except ProtocolError as refused:
        return refused.reason
    taken = 0
    for decoding in (decode_request, decode_reply):
        try:
            encode(decoding(frame[HEADER.size :]))
            taken += 1
        except ProtocolError:
            continue
    return "taken" if taken else "no message"


def take_manifest(content: bytes) -> str:
    """What becomes of a manifest; one that is taken is used."""
    try:
        found = decode(content)
    except ImportRejected as refused:
        return refused.reason
    if found.arena == "memfd" and found.size <= 1 << 20:
        descriptor = sealed_file("fuzz", bytes(found.size))
        for row, tensor in enumerate(MemfdMapping(descriptor, found.size).views(found)):
            assert tuple(tensor.shape) == found.shapes[row]
        os.close(descriptor)
    return "taken"


def run(count: int, make: Callable[[], bytes], take: Callable[[bytes], str]) -> dict[str, Any]:
    """Feed so many; memory is compared between the first tenth and the end."""
    results: Counter[str] = Counter()
    slowest = 0.0
    before = 0
    began = time.perf_counter()
    for number in range(count):
        content = make()
        at = time.perf_counter()
        results[take(content)] += 1
        slowest = max(slowest, time.perf_counter() - at)
        if number == count // 10:
            gc.collect()
            before = resident_bytes()
    gc.collect()
    return {
        "count": count,
        "seconds": round(time.perf_counter() - began, 1),
        "slowest_ms": round(slowest * 1000, 1),
        "growth_mib": round((resident_bytes() - before) / 2**20, 1),
        "results": dict(results),
    }


def feed_daemon(count: int, source: Source) -> dict[str, Any]:
    """Send frames to a real daemon, some after a greeting, some several on one connection."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        path = Path(folder, "r", "cache.sock")
        command = [sys.executable, "-m", "weightcache.daemon", "--socket", str(path), "--metrics", "127.0.0.1:0"]
        environment = {**os.environ, "READMIT_STATE": folder + "/s", "READMIT_JOURNAL": folder + "/s/journal.sqlite3"}
        daemon = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        try:
            while not path.exists():
                time.sleep(0.05)
            before = 0
            for number in range(count):
                with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(ConnectionError):
                    connection.settimeout(60)
                    connection.connect(str(path))
                    if source.random.random() < 0.7:
                        connection.sendall(encode(messages.Hello(VERSION)))
                    for _ in range(source.random.randrange(1, 4)):
                        connection.sendall(source.frame())
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(65536):
                        pass
                if number == count // 10:
                    before = resident_bytes(daemon.pid)
            growth = resident_bytes(daemon.pid) - before
            honest = Connection(path, messages.Hello(VERSION), timeout_s=60)
            status, _ = honest.ask(messages.Status(), messages.Done)
            honest.close()
            return {
                "count": count,
                "growth_mib": round(growth / 2**20, 1),
                "descriptors": status.data["descriptors"],
                "results": status.data["refused"],
            }
        finally:
            daemon.terminate()
            daemon.wait(60)


def resident_bytes(pid: int | str = "self") -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=200_000)
    parser.add_argument("--manifests", type=int, default=100_000)
    parser.add_argument("--daemon", type=int, default=4_000, help="connections to a real daemon")
    parser.add_argument("--seed", type=int, default=20_261)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    source = Source(options.seed)
    report = {
        "frames": run(options.frames, source.frame, take_frame),
        "manifests": run(options.manifests, source.manifest, take_manifest),
        "daemon": feed_daemon(options.daemon, source),
    }
    table = Table("", "count", "seconds", "slowest, ms", "growth, MiB", "what became of them")
    for name, facts in report.items():
        cells = [str(facts.get(key, "")) for key in ("count", "seconds", "slowest_ms", "growth_mib")]
        table.add_row(name, *cells, ", ".join(f"{key} {value}" for key, value in sorted(facts["results"].items())))
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps({"seed": options.seed, **report}, indent=1) + "\n")
    failures = [name for name, facts in report.items() if facts["growth_mib"] > 64]
    failures += [name for name, facts in report.items() if facts.get("slowest_ms", 0) > SLOW_S * 1000]
    if failures:
        sys.exit(f"too slow, or memory grew: {', '.join(failures)}")


if __name__ == "__main__":
    try:
        main()
    except CacheMiss as miss:
        sys.exit(f"the daemon does not serve an honest client any more: {miss}")
