"""The keeper's control socket: one JSON object a line, one answer each, for this user alone. Standard library only."""

import json
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from weightcache.errors import ConfigError
from weightcache.keeper.loop import Loop
from weightcache.paths import checked_socket_path

_CREDENTIALS: Final = struct.Struct("iII")
_LINE_MAX: Final = 64 << 10
_ANSWER_LIMIT_S: Final = 10.0


class Later:
    """An answer that is given later, by `ControlServer.answer`, perhaps by another program in this process."""

    def __init__(self, client: int | None = None) -> None:
        self.client = client
        """Descriptor of whoever asked."""


class ControlServer:
    """Answers requests from the loop.

    Args:
        path: where to listen; what an earlier keeper left there is replaced.
        answer: from the request to its answer; a ValueError becomes ``{"error": text}``.
        handed: what `hand_over` gave to this program, listener and clients included.
    """

    def __init__(
        self,
        loop: Loop,
        path: Path,
        answer: Callable[[dict[str, Any]], dict[str, Any] | Later],
        handed: dict[str, Any] | None = None,
    ) -> None:
        self._loop = loop
        self._path = checked_socket_path(path)
        self._answer = answer
        self._clients: dict[socket.socket, bytes] = {}
        self._waiting: dict[socket.socket, Later] = {}
        if handed is None:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.setblocking(False)
            path.unlink(missing_ok=True)
            self._listener.bind(str(path))
            self._listener.listen(16)
        else:
            self._listener = _again(handed["listener"])
            for descriptor, rest in handed["clients"]:
                self._welcome(_again(descriptor), bytes.fromhex(rest))
        loop.watch(self._listener, self._accept)

    def answer(self, later: Later, answer: dict[str, Any]) -> None:
        """Answer whoever still waits for it."""
        for client in self._clients:
            if client.fileno() == later.client:
                self._waiting.pop(client, None)
                self._send(client, answer)

    def hand_over(self) -> dict[str, Any]:
        """Listener and clients, with the beginnings of their requests, for another program in this process."""
        clients = [[client.fileno(), rest.hex()] for client, rest in self._clients.items()]
        return {"listener": self._listener.fileno(), "clients": clients}

    def close(self) -> None:
        """Hang up on everybody and remove the socket."""
        for client in list(self._clients):
            self._hang_up(client)
        self._loop.unwatch(self._listener)
        self._listener.close()
        self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        client.setblocking(False)
        _, uid, _ = _CREDENTIALS.unpack(client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        self._welcome(client, b"")
        if uid not in (0, os.geteuid()):
            self._send(client, {"error": f"uid {uid} may not control this keeper; uid {os.geteuid()} may"})
            self._hang_up(client)

    def _welcome(self, client: socket.socket, rest: bytes) -> None:
        self._clients[client] = rest
        self._loop.watch(client, lambda: self._read(client))

    def _read(self, client: socket.socket) -> None:
        try:
            data = client.recv(_LINE_MAX)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        *lines, rest = (self._clients[client] + data).split(b"\n")
        self._clients[client] = rest
        for line in lines:
            answer = self._respond(line)
            if isinstance(answer, Later):
                answer.client, self._waiting[client] = client.fileno(), answer
            else:
                self._send(client, answer)
        if not data or len(rest) > _LINE_MAX:
            self._hang_up(client)

    def _respond(self, line: bytes) -> dict[str, Any] | Later:
        try:
            request = json.loads(line)
            if not isinstance(request, dict):
                raise ValueError("a request is a JSON object")
            return self._answer(request)
        except ValueError as error:
            return {"error": str(error)}

    def _send(self, client: socket.socket, answer: dict[str, Any]) -> None:
        try:
            client.send(json.dumps(answer).encode() + b"\n")
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):
            return  # it asked and did not wait for the answer

    def _hang_up(self, client: socket.socket) -> None:
        if client in self._clients:
            del self._clients[client]
            if client in self._waiting:  # the number may soon be somebody else's
                self._waiting.pop(client).client = None
            self._loop.unwatch(client)
            client.close()


def _again(descriptor: int) -> socket.socket:
    """A socket that came through exec."""
    kept = socket.socket(fileno=descriptor)
    kept.setblocking(False)
    return kept


def ask(runtime_dir: Path, request: dict[str, Any], *, timeout_s: float = _ANSWER_LIMIT_S) -> dict[str, Any]:
    """Put one request to the keeper of a runtime folder.

    Raises:
        ConfigError: ``no_keeper``, when none runs there; ``keeper_refused``, with its reason.
    """
    path = runtime_dir / "keeper.sock"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(path))
            connection.sendall(json.dumps(request).encode() + b"\n")
            with connection.makefile("rb") as lines:
                answer = lines.readline()
    except OSError as error:
        raise ConfigError(
            "no_keeper",
            f"no keeper answers at {path}: {error.strerror or error}",
            remedy="Start one (readmit up), or name its runtime folder (READMIT_RUNTIME, --config)",
            path=str(path),
        ) from error
    result: dict[str, Any] = json.loads(answer) if answer else {"error": "the keeper hung up"}
    if "error" in result:
        raise ConfigError("keeper_refused", f"the keeper refused: {result['error']}", path=str(path))
    return result
