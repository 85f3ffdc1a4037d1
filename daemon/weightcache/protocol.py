"""Frames on a Unix socket: a header, a message, and descriptors beside it.

A frame is ``b"rdm1"``, the body's length as four big-endian bytes, and a MessagePack body (`weightcache.messages`).
Descriptors ride on the frame's first byte with SCM_RIGHTS. Lengths are capped before anything is allocated, every
exchange has one deadline in total, and both ends ask the kernel who the other is (SO_PEERCRED).
"""

import array
import contextlib
import os
import select
import socket
import stat
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import msgspec

from weightcache.errors import CacheMiss, ProtocolError
from weightcache.messages import PROTOCOL, Hello, Missed, Reply, Request, Welcome
from weightcache.paths import checked_socket_path

HEADER: Final = struct.Struct(">4sI")
MAGIC: Final = b"rdm1"
MAX_BODY: Final = 1 << 20
"""Weights and manifests travel as descriptors; no message comes near this."""
MAX_DESCRIPTORS: Final = 253
"""The kernel's limit for one message (SCM_MAX_FD)."""
NOBODY: Final = 65534
"""What an unmapped uid looks like from inside a user namespace: proves nothing about who calls."""

_encode = msgspec.msgpack.Encoder().encode
_decode_request = msgspec.msgpack.Decoder(Request)
_decode_reply = msgspec.msgpack.Decoder(Reply)

M = TypeVar("M")
R = TypeVar("R", bound=Reply)


class Peer(NamedTuple):
    """Who is at the other end, as the kernel says."""

    pid: int
    uid: int
    gid: int


def peer_of(connection: socket.socket) -> Peer:
    """The process that connected (or called ``listen``), by SO_PEERCRED."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return Peer(*struct.unpack("3i", raw))


def encode(message: Request | Reply) -> bytes:
    """The frame that carries a message."""
    body = _encode(message)
    if len(body) > MAX_BODY:
        raise ProtocolError("protocol", f"a {type(message).__name__} of {len(body)} bytes exceeds {MAX_BODY}")
    return HEADER.pack(MAGIC, len(body)) + body


def decode_request(body: bytes | bytearray) -> Request:
    """The request in a frame's body; `ProtocolError` if it is none."""
    return _decoded(_decode_request, body)


def body_length(header: bytes | bytearray) -> int:
    """The length that a header promises.

    Raises:
        ProtocolError: not our magic (another protocol version, or no client of ours), or a length beyond the cap.
    """
    magic, length = HEADER.unpack(header)
    if magic != MAGIC:
        if magic[:3] == MAGIC[:3]:
            raise ProtocolError(
                "protocol_version", "the peer frames its messages differently", expected=MAGIC, found=magic
            )
        raise ProtocolError("protocol", "the peer does not speak this protocol", expected=MAGIC, found=bytes(magic))
    if length > MAX_BODY:
        raise ProtocolError("protocol", "a frame is too long", expected=f"at most {MAX_BODY} bytes", found=length)
    return int(length)


def send_frame(connection: socket.socket, frame: memoryview, descriptors: Sequence[int]) -> int:
    """Send what the socket takes of a frame, descriptors with its first byte; returns the bytes taken."""
    if not descriptors:
        return connection.send(frame, socket.MSG_NOSIGNAL)
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
    return connection.sendmsg([frame], [rights], socket.MSG_NOSIGNAL)


def receive_some(connection: socket.socket, size: int, into: list[int]) -> bytes:
    """Receive at most ``size`` bytes; descriptors that come along are appended to ``into``, close-on-exec.

    Raises:
        ProtocolError: the kernel dropped descriptors, because this process may open no more.
    """
    space = socket.CMSG_SPACE(MAX_DESCRIPTORS * 4)
    data, ancillary, flags, _ = connection.recvmsg(size, space, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received = array.array("i")
            received.frombytes(content[: len(content) - len(content) % received.itemsize])
            into.extend(received)
    if flags & socket.MSG_CTRUNC:
        raise ProtocolError(
            "resource",
            "descriptors were lost on the way, because this process has too many open",
            detail="descriptors",
            found=f"{len(os.listdir('/proc/self/fd'))} open",
            remedy="Raise the limit of open files (ulimit -n, LimitNOFILE)",
        )
    return data


class Connection:
    """A client's connection to the daemon: requests, replies, one total deadline each.

    Args:
        path: the daemon's socket.
        hello: who this is.
        timeout_s: for connecting and the greeting.

    Raises:
        CacheMiss: ``no_daemon``, ``refused``, ``timeout``, ``peer_refused``, ``protocol``, ``protocol_version``.
        ConfigError: the path is too long.
    """

    def __init__(self, path: Path, hello: Hello, *, timeout_s: float = 5.0) -> None:
        self.path = checked_socket_path(path)
        self.welcome: Welcome
        self._socket = _connect(path, timeout_s)
        try:
            self.peer = peer_of(self._socket)
            _check_server(path, self.peer)
            self.welcome, _ = self.ask(hello, Welcome, timeout_s=timeout_s)
            if self.welcome.protocol != PROTOCOL:
                raise _version(self.welcome.protocol, f"the daemon at {path}")
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Request, descriptors: Sequence[int] = (), *, timeout_s: float = 10.0) -> None:
        """Send a request that is not answered."""
        with self._deadline(time.monotonic() + timeout_s) as wait:
            self._send(encode(message), descriptors, wait)

    def ask(
        self, message: Request, reply: type[R], descriptors: Sequence[int] = (), *, timeout_s: float = 10.0
    ) -> tuple[R, list[int]]:
        """Send a request and wait for this kind of reply, and its descriptors, which the caller must close.

        Raises:
            CacheMiss: the daemon's own reason, or what went wrong on the way.
        """
        for got, received in self.ask_for_all(message, descriptors, timeout_s=timeout_s):
            if isinstance(got, reply):
                return got, received
            _close_all(received)
            raise ProtocolError("protocol", "the daemon answered something else", expected=reply, found=type(got))
        raise AssertionError("unreachable: the replies end with an error or a reply")

    def ask_for_all(
        self, message: Request, descriptors: Sequence[int] = (), *, timeout_s: float = 10.0
    ) -> Iterator[tuple[Reply, list[int]]]:
        """Send a request and yield every reply to it; the caller stops at the one it takes for the last.

        Raises:
            CacheMiss: a `Missed` reply becomes the miss it describes.
        """
        with self._deadline(time.monotonic() + timeout_s) as wait:
            self._send(encode(message), descriptors, wait)
            while True:
                received: list[int] = []
                try:
                    header = self._receive(HEADER.size, received, wait)
                    body = self._receive(body_length(header), received, wait)
                    got: Reply = _decoded(_decode_reply, body)
                    promised = getattr(got, "descriptors", 0)
                    if promised != len(received):
                        raise ProtocolError(
                            "protocol", "descriptors are missing", expected=promised, found=len(received)
                        )
                except BaseException:
                    _close_all(received)
                    raise
                if isinstance(got, Missed):
                    _close_all(received)
                    raise miss_from(got)
                yield got, received

    def close(self) -> None:
        self._socket.close()

    def _send(self, frame: bytes, descriptors: Sequence[int], wait: "_Wait") -> None:
        rest = memoryview(frame)
        try:
            while rest:
                wait(self._socket, select.POLLOUT)
                sent = send_frame(self._socket, rest, descriptors)
                rest, descriptors = rest[sent:], ()
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._died() from error

    def _receive(self, size: int, descriptors: list[int], wait: "_Wait") -> bytes:
        received = bytearray()
        while len(received) < size:
            wait(self._socket, select.POLLIN)
            try:
                data = receive_some(self._socket, size - len(received), descriptors)
            except ConnectionResetError as error:
                raise self._died() from error
            if not data:
                raise self._died()
            received += data
        return bytes(received)

    @contextlib.contextmanager
    def _deadline(self, at: float) -> "Iterator[_Wait]":
        yield _Wait(at, self.path)

    def _died(self) -> CacheMiss:
        if not hasattr(self, "welcome"):
            return ProtocolError(
                "protocol", f"whoever listens at {self.path} hung up before greeting", path=str(self.path)
            )
        return CacheMiss(
            "daemon_died",
            f"the weight cache daemon at {self.path} (pid {self.peer.pid}) broke off in the middle of a request",
            remedy="See the daemon's log; its keeper restarts it",
            pid=self.peer.pid,
        )


class _Wait:
    """Waits for a socket, never past a deadline."""

    def __init__(self, deadline: float, path: Path) -> None:
        self._deadline = deadline
        self._path = path

    def __call__(self, connection: socket.socket, event: int) -> None:
        poll = select.poll()
        poll.register(connection, event)
        left = self._deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            raise CacheMiss(
                "timeout",
                f"the weight cache daemon at {self._path} did not answer in time",
                remedy="It may be stopped or overloaded: readmit cache status",
                path=str(self._path),
            )


def miss_from(missed: Missed) -> CacheMiss:
    """The exception that a `Missed` reply describes."""
    return CacheMiss(
        missed.reason,
        missed.message,
        detail=missed.detail,
        expected=missed.expected,
        found=missed.found,
        remedy=missed.remedy,
        differences=missed.differences,
        **missed.data,
    )


def missed_from(miss: CacheMiss) -> Missed:
    """The reply that makes the client raise this miss."""
    plain = miss.to_dict()
    known = ("kind", "reason", "detail", "message", "expected", "found", "remedy", "differences")
    return Missed(
        reason=miss.reason,
        message=miss.message,
        detail=miss.detail,
        expected=None if miss.expected is None else str(miss.expected),
        found=None if miss.found is None else str(miss.found),
        remedy=miss.remedy,
        differences=list(miss.data.get("differences", [])),
        data={key: value for key, value in plain.items() if key not in known},
    )


def version_mismatch(peer_protocol: int, peer: Peer) -> CacheMiss:
    """The miss that tells a client of another protocol version so."""
    return _version(peer_protocol, f"the client with pid {peer.pid}")


def _version(found: int, who: str) -> CacheMiss:
    return ProtocolError(
        "protocol_version",
        f"{who} speaks another version of the protocol",
        expected=PROTOCOL,
        found=found,
        remedy="Run the same readmit release in the daemon's and the engine's environment",
    )


def _connect(path: Path, timeout_s: float) -> socket.socket:
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CacheMiss(
            "no_daemon",
            f"no weight cache daemon: there is no socket at {path}",
            remedy="Start one with: readmit cache serve",
            path=str(path),
        ) from error
    except PermissionError as error:
        raise _not_ours(path, f"uid {os.getuid()} may not look into {path.parent}") from error
    if not stat.S_ISSOCK(status.st_mode):
        raise CacheMiss("refused", f"{path} is not a socket", found=stat.filemode(status.st_mode), path=str(path))
    if status.st_uid not in (os.getuid(), 0):
        raise _not_ours(path, f"the socket belongs to uid {status.st_uid}")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    connection.settimeout(timeout_s)
    try:
        connection.connect(os.fspath(path))
    except PermissionError as error:
        connection.close()
        raise _not_ours(path, f"uid {os.getuid()} may not connect") from error
    except (ConnectionRefusedError, FileNotFoundError) as error:
        connection.close()
        raise CacheMiss(
            "refused",
            f"nobody listens at {path}: the daemon that bound it is gone",
            remedy="Start one with: readmit cache serve",
            path=str(path),
        ) from error
    except (TimeoutError, BlockingIOError) as error:
        connection.close()
        raise CacheMiss(
            "timeout", f"the daemon at {path} took no connection in {timeout_s} s", path=str(path)
        ) from error
    connection.setblocking(False)
    return connection


def _check_server(path: Path, peer: Peer) -> None:
    if peer.uid == NOBODY or peer.uid not in (os.getuid(), 0):
        raise _not_ours(path, f"the process that listens (pid {peer.pid}) runs as uid {peer.uid}")


def _not_ours(path: Path, why: str) -> CacheMiss:
    return CacheMiss(
        "peer_refused",
        f"the weight cache at {path} is not to be trusted: {why}",
        expected=f"uid {os.getuid()} or 0",
        remedy="Run daemon and engine as one user, or name the right socket with --socket",
        path=str(path),
    )


def _decoded(decoder: "msgspec.msgpack.Decoder[M]", body: bytes | bytearray) -> M:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError("protocol", f"a message does not follow the schema: {error}") from error


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
