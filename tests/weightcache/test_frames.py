"""Frames: descriptors beside messages, caps before allocation, and nothing but typed errors for whatever comes."""

import array
import ast
import contextlib
import os
import socket
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from tests.weightcache.caches import descriptors, few_descriptors

from weightcache import messages
from weightcache.errors import CacheMiss, ProtocolError, ResourceError
from weightcache.frames import (
    HEADER,
    MAX_BODY,
    MAX_DESCRIPTORS,
    body_length,
    close_all,
    decode_reply,
    decode_request,
    encode,
    miss_from,
    missed_from,
    peer_of,
    receive_some,
    send_frame,
)
from weightcache.vocabulary import MISS_REASONS


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    yield one, other
    one.close()
    other.close()


def body(message: messages.Request | messages.Reply) -> bytes:
    return encode(message)[HEADER.size :]


def test_a_message_comes_out_as_it_went_in() -> None:
    request = messages.Attach(config={"model_path": "/m", "tp_size": 2}, wait_s=1.5)
    assert decode_request(body(request)) == request
    reply = messages.Missed(reason="absent", message="nothing there", data={"found": ["a"]})
    assert decode_reply(body(reply)) == reply
    assert body_length(encode(request)[: HEADER.size]) == len(body(request))


def test_the_peer_is_who_the_kernel_says(pair: tuple[socket.socket, socket.socket]) -> None:
    assert peer_of(pair[0]) == (os.getpid(), os.getuid(), os.getgid())


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"GET / HT", "protocol"),
        (bytes(8), "protocol"),
        (struct.pack(">4sI", b"rdm2", 5), "protocol_version"),
        (struct.pack(">4sI", b"rdm1", MAX_BODY + 1), "protocol"),
        (struct.pack(">4sI", b"rdm1", 2**32 - 1), "protocol"),
    ],
)
def test_a_bad_header_is_refused_before_anything_is_allocated(header: bytes, reason: str) -> None:
    tracemalloc.start()
    with pytest.raises(ProtocolError) as refused:
        body_length(header)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert refused.value.reason == reason


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xc1",
        b"cposix\nsystem\n(S'touch marker'\ntR.",
        b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x04true\x94\x85\x94R\x94.",
        msgspec.msgpack.encode({"type": "os.system", "argv": ["true"]}),
        msgspec.msgpack.encode({"argv": ["true"]}),
        msgspec.msgpack.encode(["attach", {}]),
        msgspec.msgpack.encode({"type": "attach"}),
        msgspec.msgpack.encode({"type": "attach", "config": {}, "wait_s": float("nan")}),
        msgspec.msgpack.encode({"type": "attach", "config": {}, "wait_s": float("inf")}),
        msgspec.msgpack.encode({"type": "attach", "config": {}, "wait_s": -1.0}),
        msgspec.msgpack.encode({"type": "publish", "descriptors": -1}),
        msgspec.msgpack.encode({"type": "claim", "config": {}, "bytes": -1}),
        msgspec.msgpack.encode({"type": "progress", "done": "1", "total": 2}),
        msgspec.msgpack.encode({"type": "hello", "version": "1", "attempt": 1 << 40}),
        msgspec.msgpack.encode({"type": "hello", "version": "1", "slot": "x" * 900_000}),
        msgspec.msgpack.encode({"type": "quarantine", "generation": "a", "reason": ""}),
        msgspec.msgpack.encode({"type": "load", "argv": []}),
        b"\x82\xa4type\xa6attach\xa6config" + b"\x81\xa1a" * 100_000 + b"\x80",
        b"\x82\xa4type\xa6attach\xa6config" + b"\x91" * 100_000,
        b"\x82\xa4type\xa6attach\xa6config\xdf\x00\x98\x96\x80",
        b"\x82\xa4type\xa6attach\xa6config\xdd\xff\xff\xff\xff",
        b"\x81\xa4type\xa6\xff\xfe\xfd\xfc\xfb\xfa",
    ],
)
def test_a_body_that_is_no_request_is_refused(content: bytes) -> None:
    tracemalloc.start()
    with pytest.raises(ProtocolError) as refused:
        decode_request(content)
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()
    assert refused.value.reason == "protocol"


def test_fields_of_a_later_release_are_passed_over() -> None:
    content = msgspec.msgpack.encode({"type": "hello", "version": "9", "protocol": 1, "surprise": [1, {}]})
    assert decode_request(content) == messages.Hello(version="9")


def test_a_message_too_long_for_a_frame_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match="too long"):
        encode(messages.Explain(config={"model_path": "x" * (MAX_BODY + 1)}))


def test_descriptors_arrive_in_order_and_close_on_exec(pair: tuple[socket.socket, socket.socket]) -> None:
    files = [os.memfd_create(str(number)) for number in range(MAX_DESCRIPTORS)]
    frame = encode(messages.Publish(descriptors=len(files)))
    assert send_frame(pair[0], memoryview(frame), files) == len(frame)
    received: list[int] = []
    data = b""
    while len(data) < len(frame):
        data += receive_some(pair[1], 3, received)
    assert data == frame
    assert [os.stat(fd).st_ino for fd in received] == [os.stat(fd).st_ino for fd in files]
    assert not any(os.get_inheritable(fd) for fd in received)
    close_all(files + received)


def test_more_descriptors_than_a_message_carries_are_refused_on_both_sides(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    file = os.memfd_create("one")
    with pytest.raises(ResourceError, match="one message") as refused:
        send_frame(pair[0], memoryview(b"x"), [file] * (MAX_DESCRIPTORS + 1))
    assert refused.value.detail == "descriptors"
    before = descriptors()
    for _ in range(2):
        pair[0].sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file] * 200))])
    received: list[int] = []
    receive_some(pair[1], 1, received)
    with pytest.raises(ProtocolError, match="too many descriptors"):
        receive_some(pair[1], 1, received)
    close_all(received)
    assert descriptors() == before
    os.close(file)


def test_descriptors_that_find_no_room_are_a_lack_of_descriptors(pair: tuple[socket.socket, socket.socket]) -> None:
    files = [os.memfd_create(str(number)) for number in range(8)]
    send_frame(pair[0], memoryview(b"x"), files)
    before = descriptors()
    received: list[int] = []
    with few_descriptors(left=3), pytest.raises(ResourceError, match="too many open") as refused:
        receive_some(pair[1], 1, received)
    assert refused.value.detail == "descriptors"
    assert len(received) == 3
    close_all(received)
    assert descriptors() == before
    close_all(files)


def test_a_miss_survives_the_wire() -> None:
    differences = [{"field": "dtype", "expected": "bfloat16", "found": "float16"}]
    for reason in MISS_REASONS:
        sent = CacheMiss(
            reason, "why", detail="d", expected=1, found=["2"], remedy="do", differences=differences, pid=7
        )
        got = miss_from(decode_reply(body(missed_from(sent))))  # type: ignore[arg-type]
        assert (got.reason, got.message, got.detail, got.remedy) == (reason, "why", "d", "do")
        assert (got.expected, got.found) == ("1", "['2']")
        assert got.data == {"differences": differences, "pid": 7}


def test_a_reason_or_fact_that_nobody_knows_here_is_no_crash() -> None:
    stranger = miss_from(messages.Missed(reason="out_of_luck", message="sorry"))
    assert (stranger.reason, stranger.found) == ("protocol", "out_of_luck")
    sly = miss_from(messages.Missed(reason="absent", message="m", data={"reason": "x", "message": "y", "detail": 1}))
    assert (sly.reason, sly.message, sly.detail) == ("absent", "m", None)


_texts = st.text(max_size=8)
_plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | _texts | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_texts, inner, max_size=4),
    max_leaves=12,
)
_kinds = ("hello", "attach", "claim", "progress", "publish", "status", "explain", "release", "quarantine", "load")
_fields = ("version", "protocol", "config", "wait_s", "bytes", "replace", "done", "total", "descriptors", "generation")
_messages = st.dictionaries(st.sampled_from(_fields), _plain, max_size=6).flatmap(
    lambda fields: st.sampled_from(_kinds).map(lambda kind: {"type": kind, **fields})
)


@seed(20_261)
@settings(max_examples=800, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=200) | _plain.map(msgspec.msgpack.encode) | _messages.map(msgspec.msgpack.encode))
def test_any_body_is_a_message_or_a_protocol_error(content: bytes) -> None:
    for decode in (decode_request, decode_reply):
        try:
            message = decode(content)
        except ProtocolError:
            continue
        assert isinstance(message, msgspec.Struct)
        encode(message)


@seed(20_261)
@settings(max_examples=800, deadline=None, database=None)
@given(
    st.binary(min_size=8, max_size=8) | st.integers(0, 2**32 - 1).map(lambda size: struct.pack(">4sI", b"rdm1", size))
)
def test_any_header_is_a_length_within_the_cap_or_a_protocol_error(header: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        assert 0 <= body_length(header) <= MAX_BODY


REBUILDS = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "multiprocessing", "runpy"}
ROOM = Path(messages.__file__).parent
"""All of it but the engines' own side, and `preload`, which runs what its own command line names."""
FILES = [file for file in sorted(ROOM.rglob("*.py")) if file.parent.name != "integrations" and file.stem != "preload"]


@pytest.mark.parametrize("file", FILES, ids=lambda it: str(it.relative_to(ROOM)))
def test_nothing_rebuilds_objects_or_runs_code_that_a_peer_names(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            assert not REBUILDS & {alias.name.partition(".")[0] for alias in node.names}, f"line {node.lineno}"
        elif isinstance(node, ast.ImportFrom):
            assert str(node.module).partition(".")[0] not in REBUILDS, f"line {node.lineno}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("eval", "exec", "compile", "__import__"), f"line {node.lineno}"
