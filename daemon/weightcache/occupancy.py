"""Occupancy: what resident weights take of each device, for whoever sizes a KV cache by what is left.

An engine that gives itself a share of a device (``total * utilization``) subtracts what it holds privately and all that
is resident: its own weights are in that, and those of others take room just the same. To free memory, as the driver
counts it, resident weights are used memory already.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from weightcache import messages
from weightcache.paths import socket_path
from weightcache.protocol import Connection
from weightcache.version import VERSION

HOST: Final = "host"
"""In the place of a GPU's UUID: host memory."""


class Occupancy(NamedTuple):
    """Bytes of resident weights on a device: all, what somebody has a lease on, and the asking engine's own."""

    resident: int = 0
    leased: int = 0
    own: int = 0

    @property
    def others(self) -> int:
        """What is resident and not the asking engine's."""
        return self.resident - self.own


def ask(socket: Path | None = None, *, device: str | None = None, own: str | None = None) -> Occupancy:
    """The occupancy of a device, from the daemon.

    Args:
        socket: the daemon's; `weightcache.paths.socket_path` if None.
        device: a GPU's UUID as CUDA gives it (`weightcache.device.describe`); host memory if None.
        own: the generation that the asking engine is mapped on (``Outcome.generation``).

    Raises:
        CacheMiss: no daemon answers.
    """
    connection = Connection(socket or socket_path(), messages.Hello(version=VERSION))
    try:
        done, _ = connection.ask(messages.Status(), messages.Done)
    finally:
        connection.close()
    return by_device(done.data["generations"], own).get(device or HOST, Occupancy())


def by_device(generations: Iterable[Mapping[str, Any]], own: str | None = None) -> dict[str, Occupancy]:
    """The occupancy of every device that something is resident on, from what a daemon's status says."""
    found: dict[str, Occupancy] = {}
    for each in generations:
        size, device = each["bytes"], each["device"] or HOST
        before = found.get(device, Occupancy())
        found[device] = Occupancy(
            before.resident + size,
            before.leased + (size if each["leases"] else 0),
            before.own + (size if each["generation"] == own else 0),
        )
    return found
