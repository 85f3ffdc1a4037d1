"""Controls: things that must be caught, or the rest of the demo proves nothing."""

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from readmit.demo.node import Node
from weightcache import messages
from weightcache.arena.seals import sealed_file
from weightcache.errors import CacheMiss
from weightcache.manifest import read
from weightcache.protocol import Connection
from weightcache.version import VERSION

SHUT_FOR_S: Final = 3.0
"""How long after the first wrong answer the gate must stay shut."""


def wrong_golden_answer(folder: Path, model: Path, cache_socket: Path, probes: dict[str, Any]) -> dict[str, Any]:
    """A node whose golden answer is wrong: its gate must see the engine answer and stay shut."""
    wrong = json.loads(json.dumps(probes))
    wrong["probes"][0]["expect"] = {"text": " Atlantis"}
    file = folder / "wrong-probes.json"
    file.write_text(json.dumps(wrong))
    node = Node(folder, "control", model, file, cache_socket)
    node.up("client")
    opened = False
    seen: str | None = None
    try:
        deadline = time.monotonic() + 120.0
        while time.monotonic() < deadline:
            status, body = node.get("/readyz")
            opened |= status == 200
            if seen is None and "wrong" in str(body.get("reason")):
                seen = str(node.get("/api/status")[1]["slots"][0]["message"])
                deadline = time.monotonic() + SHUT_FOR_S
            time.sleep(0.05)
    finally:
        node.down()
    return {"refused": seen is not None and not opened, "because": seen}


def damaged_manifest(cache_socket: Path, config: dict[str, Any]) -> dict[str, Any]:
    """A manifest whose first tensor reaches past its arena: the daemon must refuse to make it resident."""
    hello = messages.Hello(version=VERSION)
    with contextlib.closing(Connection(cache_socket, hello)) as attached:
        reply, descriptors = attached.ask(messages.Attach(config=config), messages.Attached)
        try:
            _, manifest = read(descriptors[0], reply.generation)
            other = msgspec.structs.replace(manifest.config, revision="damaged")
            damaged = msgspec.structs.replace(
                manifest, config=other, offsets=[manifest.size - 1, *manifest.offsets[1:]]
            )
            descriptors.append(sealed_file("damaged-manifest", damaged.encode()))
            offered = [descriptors[-1], *descriptors[1:-1]]
            with contextlib.closing(Connection(cache_socket, hello)) as publisher:
                publisher.ask(messages.Claim(config=other.to_dict()), messages.Claimed)
                publisher.ask(messages.Publish(descriptors=len(offered)), messages.Published, offered)
        except CacheMiss as refused:
            return {"refused": refused.reason == "manifest_invalid", "because": str(refused)}
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
    return {"refused": False, "because": None}
