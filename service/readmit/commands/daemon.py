"""Commands that talk to the weight cache daemon: their options, and one request."""

from pathlib import Path
from typing import Annotated, Any

import typer

from weightcache import messages, paths
from weightcache.journal import Context
from weightcache.protocol import Connection
from weightcache.version import VERSION

Socket = Annotated[Path | None, typer.Option("--socket", help="The daemon's socket (default: the runtime folder's).")]
Dtype = Annotated[str | None, typer.Option(help="Of the weights in memory (default: the checkpoint's).")]


def connect(socket: Path | None) -> Connection:
    """A connection that says where the command runs.

    Raises:
        CacheMiss: no daemon answers there.
    """
    where = Context.from_environment()
    hello = messages.Hello(version=VERSION, node=where.node, slot=where.slot)
    return Connection(socket or paths.socket_path(), hello)


def ask(socket: Path | None, request: messages.Request) -> dict[str, Any]:
    """The daemon's answer to one request, as plain data.

    Raises:
        CacheMiss: no daemon answers there, or it refuses.
    """
    connection = connect(socket)
    try:
        reply, _ = connection.ask(request, messages.Done)
    finally:
        connection.close()
    return reply.data
