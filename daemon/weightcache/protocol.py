"""A client's end of the protocol: requests and replies on a connection to the daemon, one total deadline each."""

import os
import select
import socket
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

from weightcache.errors import CacheMiss, ConfigError, ProtocolError, ResourceError
from weightcache.frames import (
    HEADER,
    NOBODY,
    body_length,
    check_descriptors,
    close_all,
    decode_reply,
    encode,
    miss_from,
    peer_of,
    receive_some,
    send_frame,
    version_mismatch,
)
from weightcache.messages import PROTOCOL, Hello, Missed, Reply, Request, Welcome
from weightcache.paths import checked_socket_path

_BACKLOG_PAUSE_S: Final = 0.01

R = TypeVar("R", bound=Reply)


class Connection:
    """A client's connection to the daemon.

    Args:
        path: the daemon's socket.
        hello: who this is.
        timeout_s: for connecting and the greeting.

    Raises:
        CacheMiss: ``no_daemon``, ``refused``, ``timeout``, ``peer_refused``, ``protocol``, ``protocol_version``,
            ``resource``.
        ConfigError: the path is too long.
    """

    def __init__(self, path: Path, hello: Hello, *, timeout_s: float = 5.0) -> None:
        self.path = checked_socket_path(path)
        self.welcome: Welcome | None = None
        deadline = time.monotonic() + timeout_s
        self._socket = _connect(path, deadline)
        try:
            self.peer = peer_of(self._socket)
            trusted = trusted_uids()
            if self.peer.uid == NOBODY or self.peer.uid not in trusted:
                raise _not_ours(path, f"the process that listens (pid {self.peer.pid}) runs as uid {self.peer.uid}")
            self.welcome, _ = self.ask(hello, Welcome, timeout_s=deadline - time.monotonic())
            if self.welcome.protocol != PROTOCOL:
                raise version_mismatch(self.welcome.protocol, f"the daemon at {path}")
        except BaseException:
            self.close()
            raise

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # It hangs on the model whose weights it leases; a copied or pickled model has bytes of its own.
        return type(None), ()

    def __del__(self) -> None:
        if hasattr(self, "_socket"):
            self.close()

    def fileno(self) -> int:
        return self._socket.fileno()

    def tell(self, message: Request) -> bool:
        """Send a short request that is not answered, without waiting; False if the daemon takes nothing now."""
        try:
            return bool(send_frame(self._socket, memoryview(encode(message)), ()))
        except OSError:  # full, because the daemon is busy or stopped, or broken: what matters is asked for
            return False

    def ask(
        self, message: Request, reply: type[R], descriptors: Sequence[int] = (), *, timeout_s: float = 10.0
    ) -> tuple[R, list[int]]:
        """Send a request and wait for this kind of reply, and its descriptors, which the caller must close.

        Raises:
            CacheMiss: the daemon's own reason, or what went wrong on the way.
        """
        got, received = next(self.ask_for_all(message, descriptors, timeout_s=timeout_s))
        if not isinstance(got, reply):
            close_all(received)
            raise ProtocolError(
                "protocol",
                "the daemon answered something else",
                expected=reply.__name__,
                found=type(got).__name__,
            )
        return got, received

    def ask_for_all(
        self, message: Request, descriptors: Sequence[int] = (), *, timeout_s: float = 10.0
    ) -> Iterator[tuple[Reply, list[int]]]:
        """Send a request; every reply to it, of which the caller stops at the one it takes for the last.

        Raises:
            CacheMiss: a `Missed` reply becomes the miss it describes.
        """
        deadline = time.monotonic() + timeout_s
        self._send(encode(message), descriptors, deadline)
        return self._replies(deadline)

    def _replies(self, deadline: float) -> Iterator[tuple[Reply, list[int]]]:
        while True:
            received: list[int] = []
            try:
                header = self._receive(HEADER.size, received, deadline)
                got = decode_reply(self._receive(body_length(header), received, deadline))
                check_descriptors(got, received)
                if isinstance(got, Missed):
                    raise miss_from(got)
            except BaseException:
                close_all(received)
                raise
            yield got, received

    def close(self) -> None:
        self._socket.close()

    def _send(self, frame: bytes, descriptors: Sequence[int], deadline: float) -> None:
        rest = memoryview(frame)
        while rest:
            self._wait(select.POLLOUT, deadline)
            try:
                sent = send_frame(self._socket, rest, descriptors)
            except BlockingIOError:
                continue
            except ConnectionError:
                return  # the daemon hung up; what it said before, or that it said nothing, is read next
            rest, descriptors = rest[sent:], ()

    def _receive(self, size: int, descriptors: list[int], deadline: float) -> bytes:
        received = bytearray()
        while len(received) < size:
            self._wait(select.POLLIN, deadline)
            try:
                data = receive_some(self._socket, size - len(received), descriptors)
            except BlockingIOError:
                continue
            except ConnectionError as error:
                raise self._died() from error
            if not data:
                raise self._died()
            received += data
        return bytes(received)

    def _wait(self, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(self._socket, event)
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            raise _late(self.path)

    def _died(self) -> CacheMiss:
        if self.welcome is None:
            return ProtocolError(
                "protocol", f"whoever listens at {self.path} hung up before greeting", path=str(self.path)
            )
        return CacheMiss(
            "daemon_died",
            f"the weight cache daemon at {self.path} (pid {self.peer.pid}) broke off in the middle of a request",
            remedy="See the daemon's log; its keeper restarts it",
            pid=self.peer.pid,
        )


def trusted_uids(environ: Mapping[str, str] = os.environ) -> frozenset[int]:
    """Whose daemon this process believes: its own user's, root's, and that of ``WEIGHTCACHE_UID``.

    Raises:
        ConfigError: ``WEIGHTCACHE_UID`` is no uid.
    """
    named = environ.get("WEIGHTCACHE_UID")
    if named and not named.isdecimal():
        raise ConfigError(
            "uid",
            "WEIGHTCACHE_UID is no uid",
            expected="a number",
            found=named,
            remedy="Set it to the uid of the user whose daemon this is (id -u NAME), or unset it",
        )
    return frozenset({os.geteuid(), 0, *([int(named)] if named else ())})


def _connect(path: Path, deadline: float) -> socket.socket:
    _look(path)
    try:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    except OSError as error:
        raise ResourceError(
            f"no socket can be opened: {error.strerror}",
            detail="descriptors",
            remedy="Raise the limit of open files (ulimit -n, LimitNOFILE)",
        ) from error
    try:
        connection.setblocking(False)
        while True:
            try:
                connection.connect(os.fspath(path))
            except BlockingIOError:  # its backlog is full, and the kernel tells nobody when there is room
                if time.monotonic() > deadline:
                    raise _late(path) from None
                time.sleep(_BACKLOG_PAUSE_S)
            else:
                return connection
    except PermissionError as error:
        connection.close()
        raise _not_ours(path, f"uid {os.geteuid()} may not connect") from error
    except OSError as error:
        connection.close()
        raise CacheMiss(
            "refused",
            f"nobody listens at {path}: the daemon that bound it is gone ({error.strerror})",
            remedy="Start one (readmit up, readmit cache serve), or name its socket (--socket, --config)",
            path=str(path),
        ) from error
    except BaseException:
        connection.close()
        raise


def _look(path: Path) -> None:
    """Check what lies at a socket's path before connecting to it."""
    try:
        status = path.lstat()
    except PermissionError as error:
        raise _not_ours(path, f"uid {os.geteuid()} may not look into {path.parent}") from error
    except OSError as error:
        raise CacheMiss(
            "no_daemon",
            f"no weight cache daemon: there is no socket at {path}",
            remedy="Start one (readmit up, readmit cache serve), or name its socket (--socket, --config)",
            path=str(path),
        ) from error
    if not stat.S_ISSOCK(status.st_mode):
        raise CacheMiss(
            "refused",
            f"{path} is not a socket",
            expected="the socket of a weight cache daemon",
            found=stat.filemode(status.st_mode),
            path=str(path),
        )
    if status.st_uid not in trusted_uids():
        raise _not_ours(path, f"the socket belongs to uid {status.st_uid}")


def _late(path: Path) -> CacheMiss:
    return CacheMiss(
        "timeout",
        f"the weight cache daemon at {path} did not answer in time",
        remedy="It may be stopped or overloaded: readmit cache status",
        path=str(path),
    )


def _not_ours(path: Path, why: str) -> CacheMiss:
    return CacheMiss(
        "peer_refused",
        f"the weight cache at {path} is not to be trusted: {why}",
        expected=f"uid {' or '.join(map(str, sorted(trusted_uids())))}",
        remedy="Run daemon and engine as one user, or name the daemon's user in WEIGHTCACHE_UID",
        path=str(path),
    )
