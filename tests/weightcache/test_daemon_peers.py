"""Clients that misbehave: silent, slow, greedy, deaf or hostile. All others are served meanwhile."""

import array
import contextlib
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from tests.weightcache.caches import PATIENCE_S, Cache, descriptors, wait_for
from tests.weightcache.models import config, skeleton

from weightcache import channel, messages
from weightcache.client import attach
from weightcache.errors import CacheMiss
from weightcache.frames import HEADER, MAX_BODY, body_length, decode_reply, encode
from weightcache.journal import Journal
from weightcache.memory import resident_bytes
from weightcache.protocol import Connection
from weightcache.server import MAX_CONNECTIONS
from weightcache.version import VERSION

HELLO = encode(messages.Hello(version=VERSION))


def answer(connection: socket.socket) -> messages.Reply | None:
    """The next reply on a bare connection, None if it ends instead."""
    try:
        header = connection.recv(HEADER.size, socket.MSG_WAITALL)
        if len(header) < HEADER.size:
            return None
        return decode_reply(connection.recv(body_length(header), socket.MSG_WAITALL))
    except ConnectionResetError:
        return None


def refusal(connection: socket.socket) -> messages.Missed:
    """The refusal that ends a connection."""
    reply = answer(connection)
    assert isinstance(reply, messages.Missed)
    assert answer(connection) is None
    return reply


def frame(body: bytes) -> bytes:
    return struct.pack(">4sI", b"rdm1", len(body)) + body


def test_a_message_in_pieces_and_several_in_one_piece(shared: Cache) -> None:
    status, explain = encode(messages.Status()), encode(messages.Explain(config=config().to_dict()))
    with shared.raw() as connection:
        for byte in HELLO:
            connection.sendall(bytes([byte]))
        assert isinstance(answer(connection), messages.Welcome)
        connection.sendall(status + explain + status[:5])
        assert all(isinstance(answer(connection), messages.Done) for _ in range(2))
        connection.sendall(status[5:])
        assert isinstance(answer(connection), messages.Done)


def test_a_request_before_the_greeting_and_a_second_greeting_are_refused(shared: Cache) -> None:
    with shared.raw() as connection:
        connection.sendall(encode(messages.Status()))
        assert "must be a greeting" in refusal(connection).message
    with shared.raw(greeted=True) as connection:
        connection.sendall(HELLO)
        assert "greets once" in refusal(connection).message


@pytest.mark.parametrize("protocol", [0, 2, 1 << 40])
def test_another_version_of_the_protocol_is_told_so(shared: Cache, protocol: int) -> None:
    with shared.raw() as connection:
        later = {"type": "hello", "version": "9.9", "protocol": protocol, "news": {"a": [1]}}
        connection.sendall(frame(msgspec.msgpack.encode(later)))
        refused = refusal(connection)
    assert (refused.reason, refused.expected, refused.found) == ("protocol_version", "1", str(protocol))


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "protocol"),
        (struct.pack(">4sI", b"rdm9", 4) + b"abcd", "protocol_version"),
        (struct.pack(">4sI", b"rdm1", MAX_BODY + 1), "protocol"),
        (struct.pack(">4sI", b"rdm1", 2**32 - 1), "protocol"),
        (frame(b"cposix\nsystem\n(S'touch marker'\ntR."), "protocol"),
        (frame(b"\x82\xa4type\xa6attach\xa6config" + b"\x81\xa1a" * 100_000 + b"\x80"), "protocol"),
        (frame(b"\x82\xa4type\xa6attach\xa6config\xdf\x00\x98\x96\x80"), "protocol"),
        (frame(msgspec.msgpack.encode({"type": "load"})), "protocol"),
        (frame(msgspec.msgpack.encode({"type": "attach", "config": {}, "wait_s": float("nan")})), "protocol"),
    ],
)
def test_what_is_no_message_ends_the_connection_with_a_reason(shared: Cache, sent: bytes, reason: str) -> None:
    daemon = shared.processes[0].pid
    before = resident_bytes(daemon)
    with shared.raw() as connection:
        connection.sendall(sent)
        assert refusal(connection).reason == reason
    assert resident_bytes(daemon) - before < 10 << 20
    assert not (shared.folder / "marker").exists()


def test_the_largest_message_costs_little_memory(shared: Cache) -> None:
    """The largest frame, of the smallest objects."""
    count = MAX_BODY - 40
    body = b"\x82\xa4type\xa7explain\xa6config\x81\xa1a\xdd" + struct.pack(">I", count) + b"\x90" * count
    daemon = shared.processes[0].pid
    with shared.raw(greeted=True) as connection:
        connection.sendall(frame(body))
        assert isinstance(answer(connection), messages.Done | messages.Missed)
    assert resident_bytes(daemon) < 256 << 20


@pytest.mark.parametrize("count", [1, 2, 200])
def test_descriptors_that_no_message_announced_are_closed(shared: Cache, count: int) -> None:
    daemon = shared.processes[0].pid
    shared.metric("weightcache_leases")
    before = descriptors(daemon)
    file = os.memfd_create("unasked")
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file] * count))]
    with shared.raw(greeted=True) as connection:
        connection.sendmsg([encode(messages.Status())], rights)
        assert "other descriptors than it says" in refusal(connection).message
    with shared.raw(greeted=True) as connection:
        for _ in range(4):  # half a frame, and far too many descriptors
            connection.sendmsg([b"r"], rights) if count == 200 else connection.sendall(b"r")
    os.close(file)
    wait_for(lambda: descriptors(daemon) == before, "the daemon to close what it got")


def test_announced_descriptors_that_do_not_come_are_missed(shared: Cache) -> None:
    with shared.raw(greeted=True) as connection:
        connection.sendall(encode(messages.Publish(descriptors=2)))
        refused = refusal(connection)
    assert (refused.reason, refused.expected, refused.found) == ("protocol", "2", "0")


def test_descriptors_that_the_daemon_has_no_room_for_are_a_lack_of_descriptors(served: Cache) -> None:
    daemon = served.processes[0].pid
    file = os.memfd_create("many")
    with served.raw(greeted=True) as connection:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        served.metric("weightcache_leases")
        before = descriptors(daemon)
        resource.prlimit(daemon, resource.RLIMIT_NOFILE, (before + 5, hard))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file] * 50))]
        connection.sendmsg([encode(messages.Publish(descriptors=50))], rights)
        refused = refusal(connection)
        resource.prlimit(daemon, resource.RLIMIT_NOFILE, (1000, hard))
    assert (refused.reason, refused.detail) == ("resource", "descriptors")
    os.close(file)
    wait_for(lambda: descriptors(daemon) == before - 1, "the daemon to close what it got")


def honest(cache: Cache) -> float:
    """How long an honest client takes to be answered twice."""
    began = time.monotonic()
    connection = cache.connect()
    with pytest.raises(CacheMiss, match="no weights of this model"):
        connection.ask(messages.Attach(config=config("nobody's").to_dict()), messages.Attached)
    connection.close()
    return time.monotonic() - began


def test_silent_slow_greedy_and_deaf_clients_are_dropped_and_delay_nobody(served: Cache) -> None:
    daemon = served.processes[0].pid
    served.metric("weightcache_leases")  # from its first scrape on it opens nothing more of its own
    before = descriptors(daemon), len(os.listdir(f"/proc/{daemon}/task"))
    connections = []

    def connect(first: bytes = b"") -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(PATIENCE_S)
        connection.connect(str(served.socket))
        connection.sendall(first)
        connections.append(connection)
        return connection

    for _ in range(25):
        connect()
        connect(HELLO)
    connect(HELLO + encode(messages.Status())[:9])
    connect(struct.pack(">4sI", b"rdm1", 2**32 - 1))
    dribbling, stop = connect(), threading.Event()

    def dribble() -> None:
        try:
            while not stop.wait(0.2):
                dribbling.sendall(b"r" if dribbling else b"")
        except OSError:
            stop.set()

    def deaf() -> None:
        connection = connect(HELLO)
        try:
            while True:  # asks and asks, and never takes an answer
                connection.sendall(encode(messages.Status()) * 100)
        except OSError:
            return

    threads = [threading.Thread(target=each) for each in (dribble, deaf)]
    for thread in threads:
        thread.start()
    with ThreadPoolExecutor(8) as pool:
        waited = list(pool.map(lambda _: honest(served), range(8)))
    assert len(waited) == 8
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "the daemon must let go of it"
    wait_for(lambda: served.status()["connections"] == 1, "all of them to be dropped")
    for connection in connections:
        connection.close()
    refused = served.status()["refused"]
    assert refused["timeout"] >= 52
    assert refused["protocol"] >= 1
    wait_for(lambda: descriptors(daemon) == before[0], "descriptors to return")
    assert len(os.listdir(f"/proc/{daemon}/task")) <= before[1] + 2
    assert channel.SILENCE_LIMIT_S <= 10


def test_one_connection_too_many_is_told_that_the_daemon_is_busy(served: Cache) -> None:
    crowd = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(MAX_CONNECTIONS)]
    for connection in crowd:
        connection.connect(str(served.socket))
    with pytest.raises(CacheMiss, match="busy") as busy:
        served.connect()
    assert busy.value.reason == "timeout"
    for connection in crowd:
        connection.close()
    wait_for(served.pid, "the crowd to be forgotten")


def test_a_client_that_asks_all_the_time_leaves_time_for_others(served: Cache) -> None:
    stop = threading.Event()

    def ask() -> None:
        connection = served.connect()
        while not stop.is_set():
            connection.ask(messages.Status(), messages.Done)
        connection.close()

    asking = [threading.Thread(target=ask) for _ in range(3)]
    for thread in asking:
        thread.start()
    try:
        assert honest(served) < PATIENCE_S
    finally:
        stop.set()
        for thread in asking:
            thread.join()


_anything = st.binary(max_size=300) | st.binary(max_size=100).map(frame)
_requests = st.sampled_from(
    [
        messages.Status(),
        messages.Publish(descriptors=0),
        messages.Progress(1, 2),
        messages.Release(),
        messages.Hello("1"),
    ]
).map(encode)


@seed(20_261)
@settings(max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(st.booleans(), st.lists(_anything | _requests, max_size=4))
def test_whatever_comes_is_answered_or_ended(shared: Cache, greeted: bool, sent: list[bytes]) -> None:
    with shared.raw(greeted=greeted) as connection:
        try:
            for each in sent:
                connection.sendall(each)
            connection.shutdown(socket.SHUT_WR)
        except OSError:
            return  # it hung up on us already
        while (reply := answer(connection)) is not None:
            assert isinstance(reply, messages.Missed | messages.Done | messages.Welcome)


def test_after_all_that_the_daemon_is_as_it_was(shared: Cache) -> None:
    """Runs last: everything above went to this daemon."""
    wait_for(lambda: shared.status()["connections"] == 1)
    status = shared.status()
    assert status["generations"] == status["claims"] == []
    assert status["descriptors"] < 40


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        (lambda peer: None, "protocol"),
        (lambda peer: peer.sendall(b"\x80\x04\x95 pickles"), "protocol"),
        (lambda peer: peer.sendall(struct.pack(">4sI", b"rdm1", 2**32 - 1)), "protocol"),
        (lambda peer: peer.sendall(struct.pack(">4sI", b"rdm0", 4) + b"abcd"), "protocol_version"),
        (lambda peer: peer.sendall(encode(messages.Welcome("9", "x", protocol=2))), "protocol_version"),
        (lambda peer: peer.sendall(encode(messages.Published("g"))), "protocol"),
        (lambda peer: peer.sendall(encode(messages.Missed("peer_refused", "not you"))), "peer_refused"),
        (lambda peer: peer.sendall(encode(messages.Missed("unheard_of", "news"))), "protocol"),
        (lambda peer: peer.sendall(encode(messages.Welcome("1", "x"))), "daemon_died"),
        (lambda peer: peer.sendall(encode(messages.Welcome("1", "x")) + b"rdm1\0\0"), "daemon_died"),
        (lambda peer: _welcome_and(peer, messages.Attached("g", 0)), "protocol"),
        (lambda peer: _welcome_and(peer, messages.Attached("g", 2)), "protocol"),
        (lambda peer: _welcome_and(peer, messages.Welcome("1", "x")), "protocol"),
        (lambda peer: _welcome_and(peer, messages.Loading(1), messages.Attached("g", 1)), "protocol"),
    ],
)
def test_a_fake_daemon_gets_a_typed_error_out_of_a_client(
    cache: Cache, says: Callable[[socket.socket], None], reason: str
) -> None:
    """It says something, then hangs up."""
    before = descriptors()
    cache.runtime_dir.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(cache.socket))
        server.listen()

        def play() -> None:
            peer, _ = server.accept()
            with peer, contextlib.suppress(ConnectionResetError):  # the client closed, and had not read it all
                says(peer)
                peer.shutdown(socket.SHUT_WR)
                while peer.recv(4096):
                    pass

        player = threading.Thread(target=play)
        player.start()
        model = skeleton()
        with pytest.raises(CacheMiss) as missed:
            attach(model, config(), socket=cache.socket, journal=Journal(None), policies={reason: "fail"})
        player.join()
    assert missed.value.reason == reason
    assert all(parameter.is_meta for parameter in model.parameters())
    del missed
    assert descriptors() == before


def _welcome_and(peer: socket.socket, *replies: messages.Reply) -> None:
    peer.sendall(encode(messages.Welcome("1", "x")) + b"".join(encode(reply) for reply in replies))


def test_a_full_backlog_is_waited_for_until_there_is_room_or_no_time_left(cache: Cache) -> None:
    cache.runtime_dir.mkdir(mode=0o700)
    crowd = []
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(cache.socket))
        server.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                connection = socket.socket(socket.AF_UNIX)
                connection.setblocking(False)
                connection.connect(str(cache.socket))
                crowd.append(connection)
        with pytest.raises(CacheMiss) as late:
            Connection(cache.socket, messages.Hello(version=VERSION), timeout_s=0.1)
        assert late.value.reason == "timeout"

        def make_room() -> None:
            for _ in crowd:
                server.accept()[0].close()
            with server.accept()[0] as peer:
                peer.sendall(encode(messages.Missed("peer_refused", "heard")))

        accepting = threading.Timer(0.2, make_room)
        accepting.start()
        with pytest.raises(CacheMiss, match="heard"):
            Connection(cache.socket, messages.Hello(version=VERSION), timeout_s=PATIENCE_S)
        accepting.join()
    for connection in crowd:
        connection.close()
