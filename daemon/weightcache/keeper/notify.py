"""A service manager's half of sd_notify(3): one socket per child, credentials checked. Standard library only."""

import array
import contextlib
import os
import socket
import struct
from pathlib import Path
from typing import Final, NamedTuple

from weightcache.paths import checked_socket_path
from weightcache.sdnotify import FDS_PER_MESSAGE

_CREDENTIALS: Final = struct.Struct("iII")
"""pid, uid, gid: ``struct ucred``, unix(7)."""
_MESSAGE_MAX: Final = 4096


class Message(NamedTuple):
    """One datagram: its lines, and descriptors that the receiver now owns. ``cut``: some of them were lost."""

    pid: int
    fields: list[str]
    fds: list[int]
    cut: bool

    def value(self, key: str) -> str | None:
        """The value of the last ``KEY=value`` line."""
        prefix = key + "="
        return next((line[len(prefix) :] for line in reversed(self.fields) if line.startswith(prefix)), None)

    def close(self) -> None:
        """Close the descriptors that nobody took; taken ones are gone from ``fds``."""
        while self.fds:
            os.close(self.fds.pop())


class NotifySocket:
    """The ``NOTIFY_SOCKET`` of one child, bound anew: what an earlier keeper left at the path is replaced.

    Args:
        path: where.
        bound: the descriptor of one that is bound there, from an earlier program in this process.

    Raises:
        ConfigError: ``path_too_long``.
    """

    def __init__(self, path: Path, bound: int | None = None) -> None:
        self.path = checked_socket_path(path)
        if bound is not None:
            self._socket = socket.socket(fileno=bound)
            self._socket.setblocking(False)
            return
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.path.unlink(missing_ok=True)
        self._socket.bind(str(path))

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self) -> Message | None:
        """The next message, None when none waits."""
        ancillary_size = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(FDS_PER_MESSAGE * 4)
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(_MESSAGE_MAX, ancillary_size, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return None
        pid, fds = 0, array.array("i")
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
            elif level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                pid, _, _ = _CREDENTIALS.unpack(payload)
        fields = data.decode(errors="replace").splitlines()
        return Message(pid, fields, fds.tolist(), bool(flags & socket.MSG_CTRUNC))

    def close(self) -> None:
        """Close the socket and remove its path."""
        self._socket.close()
        with contextlib.suppress(OSError):
            self.path.unlink()
