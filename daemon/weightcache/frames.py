"""Frames on a Unix socket: a header, a message, and descriptors beside it.

A frame is ``b"rdm1"``, the body's length as four big-endian bytes, and a MessagePack body (`weightcache.messages`).
Descriptors ride on the frame's first byte with SCM_RIGHTS. Lengths are capped before anything is allocated, and both
ends ask the kernel who the other is (SO_PEERCRED).
"""

import array
import errno
import os
import resource
import socket
import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from weightcache.errors import CacheMiss, ProtocolError, ResourceError
from weightcache.messages import PROTOCOL, Missed, Reply, Request
from weightcache.vocabulary import MISS_REASONS

HEADER: Final = struct.Struct(">4sI")
MAGIC: Final = b"rdm1"
MAX_BODY: Final = 1 << 20
"""Weights and manifests travel as descriptors; no message comes near this."""
MAX_DESCRIPTORS: Final = 253
"""The kernel's limit for one message (SCM_MAX_FD)."""
NOBODY: Final = 65534
"""What an unmapped uid looks like from inside a user namespace: proves nothing about who calls."""

_ANCILLARY: Final = socket.CMSG_SPACE(MAX_DESCRIPTORS * 4)
_FACTS: Final = ("kind", "reason", "message", "detail", "expected", "found", "remedy", "differences")

_encode = msgspec.msgpack.Encoder().encode
_decode_request = msgspec.msgpack.Decoder(Request)
_decode_reply = msgspec.msgpack.Decoder(Reply)

M = TypeVar("M")


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
    """The frame that carries a message.

    Raises:
        ProtocolError: it is longer than a frame may be.
    """
    body = _encode(message)
    if len(body) > MAX_BODY:
        what = f"a {type(message).__name__} is too long for a frame"
        raise ProtocolError("protocol", what, expected=f"at most {MAX_BODY} bytes", found=len(body))
    return HEADER.pack(MAGIC, len(body)) + body


def decode_request(body: bytes) -> Request:
    """The request in a frame's body; `ProtocolError` if it is none."""
    return _decoded(_decode_request, body)


def decode_reply(body: bytes) -> Reply:
    """The reply in a frame's body; `ProtocolError` if it is none."""
    return _decoded(_decode_reply, body)


def body_length(header: bytes) -> int:
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
        raise ProtocolError("protocol", "the peer does not speak this protocol", expected=MAGIC, found=magic)
    if length > MAX_BODY:
        raise ProtocolError("protocol", "a frame is too long", expected=f"at most {MAX_BODY} bytes", found=length)
    return int(length)


def send_frame(connection: socket.socket, frame: memoryview, descriptors: Sequence[int]) -> int:
    """Send what the socket takes of a frame, descriptors with its first byte; returns the bytes taken.

    Raises:
        ResourceError: more descriptors than one message can carry, or than this user may have on the way at once.
        BlockingIOError: the socket takes nothing now.
    """
    if not descriptors:
        return connection.send(frame, socket.MSG_NOSIGNAL)
    if len(descriptors) > MAX_DESCRIPTORS:
        raise ResourceError(
            "more descriptors than one message can carry",
            detail="descriptors",
            expected=f"at most {MAX_DESCRIPTORS}",
            found=len(descriptors),
        )
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
    try:
        return connection.sendmsg([frame], [rights], socket.MSG_NOSIGNAL)
    except OSError as error:
        if error.errno != errno.ETOOMANYREFS:
            raise
        raise _out_of_descriptors("too many descriptors of this user are on the way") from error


def receive_some(connection: socket.socket, size: int, into: list[int]) -> bytes:
    """Receive at most ``size`` bytes; descriptors that come along are appended to ``into``, close-on-exec.

    Raises:
        ResourceError: the kernel dropped descriptors, because this process may open no more.
        ProtocolError: more descriptors than one message may have.
    """
    data, ancillary, flags, _ = connection.recvmsg(size, _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received = array.array("i")
            received.frombytes(content[: len(content) - len(content) % received.itemsize])
            into.extend(received)
    if flags & socket.MSG_CTRUNC:
        raise _out_of_descriptors("descriptors were lost on the way, because this process has too many open")
    if len(into) > MAX_DESCRIPTORS:
        raise ProtocolError("protocol", "too many descriptors", expected=f"at most {MAX_DESCRIPTORS}", found=len(into))
    return data


def check_descriptors(message: Request | Reply, received: Sequence[int]) -> None:
    """Check that a message came with as many descriptors as it says.

    Raises:
        ProtocolError: it did not.
    """
    promised = getattr(message, "descriptors", 0)
    if promised != len(received):
        raise ProtocolError(
            "protocol", "a message came with other descriptors than it says", expected=promised, found=len(received)
        )


def close_all(descriptors: Sequence[int]) -> None:
    """Close descriptors."""
    for descriptor in descriptors:
        os.close(descriptor)


def miss_from(missed: Missed) -> CacheMiss:
    """The exception that a `Missed` reply describes."""
    if missed.reason not in MISS_REASONS:
        what = f"the daemon gave a reason unknown here: {missed.message}"
        return ProtocolError("protocol", what, expected="a miss reason", found=missed.reason)
    return CacheMiss(
        missed.reason,
        missed.message,
        detail=missed.detail,
        expected=missed.expected,
        found=missed.found,
        remedy=missed.remedy,
        differences=missed.differences,
        **{key: value for key, value in missed.data.items() if key not in _FACTS},
    )


def missed_from(miss: CacheMiss) -> Missed:
    """The reply that makes the client raise this miss."""
    plain = miss.to_dict()
    return Missed(
        reason=miss.reason,
        message=miss.message,
        detail=miss.detail,
        expected=_text(miss.expected),
        found=_text(miss.found),
        remedy=miss.remedy,
        differences=list(miss.data.get("differences", [])),
        data={key: value for key, value in plain.items() if key not in _FACTS},
    )


def version_mismatch(found: int, who: str) -> ProtocolError:
    """The miss that says that somebody speaks another version of the protocol."""
    return ProtocolError(
        "protocol_version",
        f"{who} speaks another version of the protocol",
        expected=PROTOCOL,
        found=found,
        remedy="Run the same readmit release in the daemon's and the engine's environment",
    )


def _decoded(decoder: "msgspec.msgpack.Decoder[M]", body: bytes) -> M:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError("protocol", f"a message does not follow the schema: {error}") from error


def _out_of_descriptors(message: str) -> ResourceError:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ResourceError(
        message,
        detail="descriptors",
        found=f"a limit of {limit} open files",
        remedy="Raise the limit of open files (ulimit -n, LimitNOFILE)",
    )


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
