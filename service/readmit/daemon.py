"""Questions to the weight cache daemon, each over a connection of its own."""

from contextlib import closing
from pathlib import Path
from typing import Any

from weightcache import messages, paths
from weightcache.journal import Context
from weightcache.protocol import Connection
from weightcache.version import VERSION


def connect(socket: Path | None = None, node: str | None = None) -> Connection:
    """A connection that says where it comes from: from this environment, unless ``node`` says it.

    Raises:
        CacheMiss: no daemon answers there.
    """
    where = Context.from_environment()
    hello = messages.Hello(version=VERSION, node=node or where.node, slot=where.slot)
    return Connection(socket or paths.socket_path(), hello)


def ask_daemon(socket: Path | None, request: messages.Request, node: str | None = None) -> dict[str, Any]:
    """The daemon's answer to one request, as plain data.

    Raises:
        CacheMiss: no daemon answers there, or it refuses.
    """
    with closing(connect(socket, node)) as connection:
        reply, _ = connection.ask(request, messages.Done)
    return reply.data
