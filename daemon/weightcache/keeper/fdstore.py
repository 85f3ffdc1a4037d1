"""Descriptors kept for a child process: what systemd calls its file descriptor store. Standard library only."""

import contextlib
import fcntl
import os
import select
import socket
import stat
from pathlib import Path
from typing import Final, NamedTuple

from weightcache.sdnotify import STORE_MAX

_F_DUPFD_QUERY: Final = 1024 + 3
"""Linux 6.10: whether two descriptors share one open file (include/uapi/linux/fcntl.h)."""
_SYS_KCMP: Final = {"x86_64": 312, "aarch64": 272}
_KCMP_FILE: Final = 0


class Stored(NamedTuple):
    """One descriptor and its name."""

    name: str
    fd: int


class DescriptorStore:
    """Descriptors in the order of their storing. It owns what it takes."""

    def __init__(self) -> None:
        self._stored: dict[str, list[int]] = {}
        self._order: dict[int, str] = {}
        self._polled: set[int] = set()
        self._hangups = select.epoll()

    def __len__(self) -> int:
        return len(self._order)

    def fileno(self) -> int:
        """Readable when a polled descriptor reported hang-up or error; call `drop_hung_up` then."""
        return self._hangups.fileno()

    def entries(self) -> list[Stored]:
        """What is stored, in order."""
        return [Stored(name, fd) for fd, name in self._order.items()]

    def hand_over(self) -> list[tuple[str, int, bool]]:
        """Name, descriptor and whether it is polled, in order; what `add` takes again."""
        return [(name, fd, fd in self._polled) for fd, name in self._order.items()]

    def holds(self, prefix: str) -> bool:
        """Whether the name of something stored begins like this."""
        return any(name.startswith(prefix) for name in self._stored)

    def add(self, name: str, fd: int, *, poll: bool) -> bool:
        """Take a descriptor over.

        Args:
            name: what it is called when it is handed out.
            fd: closed if an equal one is stored under this name already.
            poll: drop it by itself once it reports hang-up or error.

        Returns:
            Whether it is stored now; False when the store is full, and then it is closed.
        """
        if any(_same_file(fd, other) for other in self._stored.get(name, ())):
            os.close(fd)
            return True
        if len(self._order) >= STORE_MAX:
            os.close(fd)
            return False
        self._stored.setdefault(name, []).append(fd)
        self._order[fd] = name
        if poll:
            self._polled.add(fd)
            with contextlib.suppress(PermissionError):  # regular files cannot be polled, and never hang up
                # No events asked for: hang-up and error always come. Readable data is the owner's affair, and on a
                # duplicate of a connection would never end.
                self._hangups.register(fd, 0)
        return True

    def remove(self, name: str) -> int:
        """Close every descriptor with this name; returns how many there were."""
        fds = self._stored.pop(name, [])
        for fd in fds:
            self._close(fd)
        return len(fds)

    def drop_hung_up(self) -> list[str]:
        """Close the polled descriptors that reported hang-up or error; returns their names."""
        names = []
        for fd, _ in self._hangups.poll(0):
            name = self._order[fd]
            names.append(name)
            self._stored[name].remove(fd)
            if not self._stored[name]:
                del self._stored[name]
            self._close(fd)
        return names

    def clear(self) -> None:
        """Close everything that is stored."""
        for name in list(self._stored):
            self.remove(name)

    def close(self) -> None:
        """Close everything, and the store itself."""
        self.clear()
        self._hangups.close()

    def listening_at(self) -> list[Path]:
        """The paths of the Unix sockets that are stored listening."""
        paths = []
        for fd in self._order:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as stored:
                address = stored.getsockname() if stored.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) else ""
                if isinstance(address, str) and address.startswith("/"):
                    paths.append(Path(address))
        return paths

    def _close(self, fd: int) -> None:
        del self._order[fd]
        self._polled.discard(fd)
        # Closing alone is not enough: duplicates keep the open file, and with it epoll's entry, alive.
        with contextlib.suppress(FileNotFoundError, PermissionError):
            self._hangups.unregister(fd)
        os.close(fd)


def remove_dead_socket(path: Path) -> None:
    """Remove a Unix socket that nobody listens on any more."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.setblocking(False)
        try:
            caller.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except OSError:  # gone already, or somebody answers there now
            return


def _same_file(one: int, other: int) -> bool:
    """Whether two descriptors of this process share one open file; False where the kernel will not say."""
    try:
        return fcntl.fcntl(one, _F_DUPFD_QUERY, other) == 1
    except OSError:  # EINVAL before Linux 6.10
        number = _SYS_KCMP.get(os.uname().machine)
    if number is None:
        return False
    import ctypes  # costs half a MiB, which only old kernels have to pay

    pid = os.getpid()
    return bool(ctypes.CDLL(None).syscall(number, pid, pid, _KCMP_FILE, one, other) == 0)
