"""The HTTP server of the engine: uvicorn on a socket bound before the model was loaded."""

import errno
import logging
import socket
from typing import TYPE_CHECKING, Final

import uvicorn

from weightcache.errors import ConfigError
from weightcache.journal import Journal

if TYPE_CHECKING:
    from starlette.applications import Starlette

log: Final = logging.getLogger("readmit.engine")

_PORT_MAX: Final = 65535
_DRAIN_S: Final = 30
"""How long answers under way may take after SIGTERM; Kubernetes' own default."""


def bind(host: str, port: int) -> socket.socket:
    """A TCP socket on this address that does not listen yet: clients are refused until `serve`.

    Raises:
        ConfigError: ``address``, when the port is taken or the host is not one of this machine.
    """
    if not 0 <= port <= _PORT_MAX:
        raise ConfigError(
            "address",
            f"cannot serve on {host}:{port}",
            expected=f"a port from 0 to {_PORT_MAX}",
            found=port,
            remedy="Choose another --port",
            host=host,
            port=port,
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only where the protocol is named; with it on, a kept-alive answer waits 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restart need not wait for old connections
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        taken = error.errno == errno.EADDRINUSE
        raise ConfigError(
            "address",
            f"cannot serve on {host}:{port}",
            expected="a free port" if taken else "an address of this machine that this user may serve on",
            found="one that another process has" if taken else error.strerror or str(error),
            remedy="Choose another --port, or stop what uses it" if taken else "Choose another --host or --port",
            host=host,
            port=port,
        ) from error
    return listener


def serve(app: "Starlette", listener: socket.socket, journal: Journal) -> None:
    """Serve until a signal ends it, marking ``server_ready`` until the first connection can be accepted."""
    # Parser and loop that `readmit.engine_fork` holds ready, also where quicker ones are installed.
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http="h11",
        lifespan="off",
        log_config=None,
        log_level="warning",
        timeout_graceful_shutdown=_DRAIN_S,
    )
    _Server(config, journal).run(sockets=[listener])


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, journal: Journal) -> None:
        super().__init__(config)
        self._journal = journal

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        with self._journal.phase("server_ready"):
            await super().startup(sockets)
        for listener in sockets or ():
            host, port = listener.getsockname()[:2]
            log.info("serving on http://%s:%s", host, port)
