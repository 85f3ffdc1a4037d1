"""Orders to the gate of this machine, by the socket in its runtime folder. `readmit.gate.controls` takes them."""

import http.client
import json
import socket
import time
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from weightcache.errors import ConfigError

SOCKET: Final = "gate.sock"
"""In the runtime folder."""
_LIMIT_S: Final = 10.0
_LOOK_S: Final = 0.1
_CHANGE_S: Final = 5.0
"""For one gate to follow another."""


class _Connection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("gate", timeout=_LIMIT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(_LIMIT_S)
        self.sock.connect(str(self._path))


def order(
    runtime_dir: Path, method: str, path: str, body: dict[str, Any] | None = None, *, patience_s: float = 0.0
) -> dict[str, Any]:
    """Send one order, or ask; returns the answer.

    Args:
        runtime_dir: where the gate's socket is.
        method: of HTTP.
        path: of the order.
        body: its facts.
        patience_s: how long to try again where none answers; one that says that it has only just begun, or is just
            ending, is asked again in any case.

    Raises:
        ConfigError: ``no_gate``: none answers here; ``gate_refused``, with its reason.
    """
    began = time.monotonic()
    while True:
        try:
            return _ordered(runtime_dir, method, path, body)
        except ConfigError as error:
            limit_s = patience_s if error.reason == "no_gate" else 0.0
            if error.data.get("status") == HTTPStatus.SERVICE_UNAVAILABLE:
                limit_s = max(patience_s, _CHANGE_S)
            if time.monotonic() - began >= limit_s:
                raise
        time.sleep(_LOOK_S)


def _ordered(runtime_dir: Path, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
    connection = _Connection(runtime_dir / SOCKET)
    try:
        content = None if body is None else json.dumps(body)
        connection.request(method, path, content, {"Content-Type": "application/json"})
        response = connection.getresponse()
        status, answer = response.status, json.loads(response.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ConfigError(
            "no_gate",
            f"no gate takes orders at {runtime_dir / SOCKET}: {getattr(error, 'strerror', None) or error}",
            remedy="Start one (readmit up), or name its runtime folder (READMIT_RUNTIME, --config)",
            path=str(runtime_dir / SOCKET),
        ) from error
    finally:
        connection.close()
    if status >= 400:
        raise ConfigError("gate_refused", f"the gate refuses: {answer.get('detail', answer)}", status=status)
    result: dict[str, Any] = answer
    return result
