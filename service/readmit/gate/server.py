"""The gate's process: uvicorn on a listening socket that the service manager keeps while the process is replaced."""

import asyncio
import gc
import logging
import os
import signal
import socket
from pathlib import Path
from types import FrameType
from typing import Any, Final

import uvicorn

from readmit.gate import certificate
from readmit.gate.access import by_socket
from readmit.gate.app import create_app
from readmit.gate.gate import Gate
from readmit.gate.http import StrictProtocol
from readmit.gate.operator import SOCKET
from readmit.gate.settings import GateSettings
from weightcache import paths
from weightcache.errors import ConfigError
from weightcache.sdnotify import Notifier, listen_fds

log = logging.getLogger("readmit.gate")

STORED_AS: Final = "gate"
_BACKLOG: Final = 2048
"""Connections that wait while the gate is being replaced; uvicorn's own number."""
_CLOSE_LIMIT_S: Final = 3
"""For what still runs when draining is over."""
_UVICORN: Final[dict[str, Any]] = {
    "http": StrictProtocol,
    "loop": "uvloop",
    "log_config": None,
    "access_log": False,
    "ws": "none",
    "timeout_graceful_shutdown": _CLOSE_LIMIT_S,
    "server_header": False,
    "proxy_headers": False,
}


def run(settings: GateSettings) -> int:
    """Serve until a signal ends it; returns the process's exit code.

    Raises:
        ConfigError: ``address``: the gate cannot listen there; ``token`` or ``tls``: a file cannot be used.
    """
    notifier = Notifier.from_environment()
    app = create_app(settings)
    certificate.check(settings)
    config = uvicorn.Config(app, ssl_certfile=settings.tls_cert, ssl_keyfile=settings.tls_key, **_UVICORN)
    config.load()
    listener = listen(settings, notifier)
    # Who stops reading would keep an engine for ever: the kernel breaks off what its client takes nothing of.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, min(round(settings.idle_limit_s * 1e3), 2**31 - 1))
    if not settings.local and settings.token_file is None:
        log.warning("the status page is open to everybody who reaches %s; token_file closes it", settings.listen)
    server = GateServer(config, app.state.gate, notifier, listener)
    server.run(sockets=[listener])
    return os.EX_SOFTWARE if app.state.gate.failure is not None else os.EX_OK


def listen(settings: GateSettings, notifier: Notifier) -> socket.socket:
    """The socket that an earlier gate left with the service manager, or a new one, left there as well.

    While a gate is being replaced, clients that connect wait in this socket's queue; none is refused.

    Raises:
        ConfigError: ``address``.
    """
    host, port = settings.address
    for name, descriptor in listen_fds():
        inherited = socket.socket(fileno=descriptor)
        if name == STORED_AS and port in (0, inherited.getsockname()[1]):
            return inherited
        inherited.close()
    notifier.remove(STORED_AS)  # one with another address, perhaps
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(
            "address",
            f"the gate cannot listen on {settings.listen}",
            expected="a free address of this machine",
            found=error.strerror or str(error),
            remedy="Choose another address (listen), or stop what uses it",
        ) from error
    notifier.store(STORED_AS, listener.fileno())
    # Made anew from its descriptor it knows that it is TCP, without which asyncio leaves Nagle's algorithm on: 40 ms.
    return socket.socket(fileno=listener.detach())


class GateServer(uvicorn.Server):
    """uvicorn, except that a signal to end drains the gate first.

    Args:
        config: uvicorn's.
        gate: the gate of the application.
        notifier: the service manager.
        listener: the listening socket.
    """

    def __init__(self, config: uvicorn.Config, gate: Gate, notifier: Notifier, listener: socket.socket) -> None:
        super().__init__(config)
        self._gate = gate
        self._notifier = notifier
        self._listener = listener
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None
        self._told = ""
        self._orders: Path | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        # The service manager came back and has lost what it kept.
        self._loop.add_signal_handler(signal.SIGHUP, lambda: self._notifier.store(STORED_AS, self._listener.fileno()))
        await super().startup(sockets)
        await self._take_orders()
        gc.collect()
        gc.freeze()  # what a start leaves lives as long as the gate; a full collection of it would hold requests up
        host, port = self._listener.getsockname()[:2]
        self._notifier.ready(f"listening on {host}:{port}")
        log.info("listening on %s:%s", host, port)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._orders is not None:
            self._orders.unlink(missing_ok=True)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains; a second one ends at once. Either way the exit code is the gate's own."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._leave)
        else:
            self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        if self._gate.failure is not None:
            log.error("the gate has failed", exc_info=self._gate.failure)
            self.should_exit = True
        self._notifier.alive()
        status = ", ".join(f"slot {slot.name} {slot.state}" for slot in self._gate.slots)
        if status != self._told:
            self._told = status
            self._notifier.status(status)
        return await super().on_tick(counter)

    async def _take_orders(self) -> None:
        """Listen for operators in the runtime folder, which nobody else may enter. Without it traffic goes on."""
        if (folder := self._gate.settings.runtime_dir) is None:
            return
        config = uvicorn.Config(by_socket(self.config.loaded_app), lifespan="off", **_UVICORN)
        config.load()

        def protocol() -> asyncio.Protocol:
            return config.http_protocol_class(  # type: ignore[call-arg] # what is common to uvicorn's protocols
                config=config, server_state=self.server_state, app_state=self.lifespan.state
            )

        try:
            path = paths.checked_socket_path(folder / SOCKET)
            if await _listens(path):
                raise ConfigError("orders", f"another gate takes them at {path}", path=str(path))
            path.unlink(missing_ok=True)
            mask = os.umask(0o177)
            try:
                server = await asyncio.get_running_loop().create_unix_server(protocol, path)
            finally:
                os.umask(mask)
        except (OSError, ConfigError) as error:
            log.warning("no orders are taken (readmit gate override, readmit drain): %s", error)
        else:
            self.servers.append(server)
            self._orders = path

    def _leave(self) -> None:
        if self._drain is not None:
            self.should_exit = True
            return
        log.info("draining")
        self._notifier.stopping()
        self._drain = asyncio.create_task(self._gate.drain())
        self._drain.add_done_callback(self._drained)

    def _drained(self, drain: asyncio.Task[None]) -> None:
        self.should_exit = True
        drain.result()


async def _listens(path: Path) -> bool:
    """Whether anybody takes connections at a Unix socket; one that a dead process left refuses them."""
    try:
        _, writer = await asyncio.open_unix_connection(path)
    except OSError:
        return False
    writer.close()
    return True
