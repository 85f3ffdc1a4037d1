"""Who may look, and who may give orders: operators by the gate's own Unix socket, or by a token.

Requests to ``/v1`` are not its business: whoever may ask the engine brings the engine's own key.
"""

import base64
import binascii
import hmac
from pathlib import Path
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from weightcache.errors import ConfigError

TOKEN_BYTES_MIN: Final = 16
"""Shorter ones can be guessed."""
_BY_SOCKET: Final = "readmit.operator"


class Access:
    """The rules of one gate.

    Args:
        token_file: holds the token, alone; None for a page and an API that everybody who reaches the gate may read, and
            that takes orders by the socket only.

    Raises:
        ConfigError: ``token``: the file holds none.
    """

    def __init__(self, token_file: Path | None) -> None:
        self._token = None if token_file is None else read_token(token_file)

    def may_order(self, scope: Scope) -> bool:
        """Whether this request may change anything."""
        return bool(scope.get(_BY_SOCKET)) or (self._token is not None and self._knows_token(scope))

    def may_look(self, scope: Scope) -> bool:
        """Whether this request may see the page, the API, and what golden questions found."""
        return self._token is None or self.may_order(scope)

    def _knows_token(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, credentials = given.partition(b" ")
        if scheme.lower() == b"basic":  # what browsers can do: any name, the token as password
            try:
                credentials = base64.b64decode(credentials, validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        elif scheme.lower() != b"bearer":
            return False
        return self._token is not None and hmac.compare_digest(credentials.strip(), self._token)


def by_socket(app: ASGIApp) -> ASGIApp:
    """The same application for requests that came by the operators' socket."""

    async def marked(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, _BY_SOCKET: True}, receive, send)

    return marked


def read_token(file: Path) -> bytes:
    """The token that a file holds.

    Raises:
        ConfigError: ``token``: it holds none.
    """
    try:
        token, problem = file.read_bytes().strip(), "a short one"
    except OSError as error:
        token, problem = b"", error.strerror or str(error)
    if len(token) < TOKEN_BYTES_MIN:
        raise ConfigError(
            "token",
            f"the gate's token file {file} holds no token",
            expected=f"{TOKEN_BYTES_MIN} bytes or more",
            found=problem,
            remedy=f"Make one: (umask 077; openssl rand -hex 32 > {file})",
            path=str(file),
        )
    return token
