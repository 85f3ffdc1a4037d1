"""What a daemon or a publisher must not offer, and that nothing of it is kept."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.weightcache.attaching import fresh, load
from tests.weightcache.caches import Cache, wait_for
from tests.weightcache.models import become, config, contents, skeleton
from tests.weightcache.publishing import flipped, packed, publish

from weightcache import messages
from weightcache.arena.memfd import MemfdMapping
from weightcache.arena.seals import sealed_file
from weightcache.attachment import Attachment
from weightcache.binding import Binding
from weightcache.client import attach
from weightcache.errors import CacheMiss, ImportRejected
from weightcache.frames import encode, send_frame
from weightcache.journal import Journal
from weightcache.manifest import generation_of

pytestmark = pytest.mark.usefixtures("own_state")


class FakeDaemon:
    """Greets, and answers an attach with a generation of its own making."""

    def __init__(self, cache: Cache, *answers: Callable[[socket.socket], None]) -> None:
        cache.runtime_dir.mkdir(mode=0o700)
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(str(cache.socket))
        self.server.listen()
        self.greeting = encode(messages.Welcome("1", "fake"))
        self.answers = answers
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        for answer in self.answers:
            peer, _ = self.server.accept()
            with peer:
                peer.recv(65536)
                peer.sendall(self.greeting)
                peer.recv(65536)
                answer(peer)
                while True:
                    try:
                        if not peer.recv(65536):
                            break
                    except ConnectionError:
                        break

    def close(self) -> None:
        self.thread.join()
        self.server.close()


def offering(*files: int, generation: str) -> Callable[[socket.socket], None]:
    """An answer that hands over these descriptors."""

    def answer(peer: socket.socket) -> None:
        attached = messages.Attached(generation=generation, descriptors=len(files))
        send_frame(peer, memoryview(encode(attached)), files)
        peer.shutdown(socket.SHUT_WR)

    return answer


@contextmanager
def unsealed(size: int) -> Iterator[int]:
    descriptor = os.memfd_create("arena", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    yield descriptor
    os.close(descriptor)


def test_what_a_daemon_must_not_offer_is_refused(cache: Cache) -> None:
    """An arena without seals, of another size, in pieces or not there; a manifest of another name or identity."""
    good, other = packed(), packed(config(dtype="float16"))
    manifest, arena = good.descriptors
    name, others_name = generation_of(good.manifest.encode()), generation_of(other.manifest.encode())
    short = sealed_file("short", bytes(good.manifest.size - 1))
    with unsealed(good.manifest.size) as writable:
        offers = {
            "manifest_invalid": [
                offering(manifest, writable, generation=name),
                offering(manifest, short, generation=name),
                offering(manifest, arena, arena, generation=name),
                offering(manifest, generation=name),
                offering(manifest, arena, generation=others_name),
                offering(arena, manifest, generation=name),
                offering(writable, arena, generation=name),
            ],
            "import_mismatch": [offering(other.descriptors[0], arena, generation=others_name)],
        }
        fake = FakeDaemon(cache, *(answer for each in offers.values() for answer in each))
        for reason, answers in offers.items():
            for _ in answers:
                model = skeleton()
                with pytest.raises(ImportRejected) as refused:
                    attach(model, config(), socket=cache.socket, journal=Journal(None))
                assert refused.value.reason == reason
                assert all(parameter.is_meta for parameter in model.parameters())
        fake.close()
    os.close(short)
    good.close()
    other.close()


def test_bytes_of_a_rogue_publisher_are_caught_and_kept_from_all(served: Cache) -> None:
    bad = publish(served, flipped(packed()))
    model, outcome = load(served, verify=1.0)
    assert outcome.reason == "integrity"
    assert contents(model) == contents(fresh())
    states = {each["generation"]: each["quarantined"] for each in served.generations()}
    assert "are not what was published: seen" in states[bad]
    assert outcome.generation in states
    assert states[outcome.generation or ""] is None
    _, next_one = load(served, verify=1.0)
    assert (next_one.path, next_one.generation) == ("hit", outcome.generation)
    wait_for(lambda: served.metric("weightcache_quarantines_total") == 1, "the quarantine to be counted")
    reasons = served.events("WHERE kind = 'quarantine'")
    assert [event.slot for event in reasons] == ["a"]


def test_a_lease_on_what_was_refused_is_given_back(served: Cache) -> None:
    publish(served, flipped(packed()))
    wait_for(lambda: served.leases() == 0)
    with pytest.raises(CacheMiss):
        load(served, verify=1.0, policies={"integrity": "fail"})
    wait_for(lambda: served.leases() == 0, "the lease to be given back")
    served.ask(messages.Release())


def arenas() -> set[str]:
    """The arenas that this process has mapped, by inode; other tests' models may still be waiting for collection."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:weightcache-arena" in line}


def test_a_fallback_drops_what_it_had_mapped_first(served: Cache) -> None:
    """While it verifies, the refused arena is mapped; when the loader runs, it is not any more."""
    publish(served, flipped(packed()))
    model = skeleton()
    before = arenas()
    seen: list[set[str]] = []

    def loading(progress: Callable[[int, int], None]) -> None:
        seen.append(arenas() - before)
        become(model, fresh())

    attach(model, config(), load=loading, load_bytes=1, socket=served.socket, verify=1.0, journal=Journal(None))
    assert seen == [set()]
    assert len(arenas() - before) == 1


@pytest.mark.parametrize("broken", [TypeError, AttributeError, KeyError, ZeroDivisionError])
def test_a_programming_error_is_not_turned_into_a_fallback(
    served: Cache, monkeypatch: pytest.MonkeyPatch, broken: type[Exception]
) -> None:
    publish(served, packed())
    wait_for(lambda: served.leases() == 0)

    def fail(*_: object) -> None:
        raise broken("ours")

    for owner, name in ((MemfdMapping, "views"), (Binding, "place_parameters"), (Attachment, "_bind")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            with pytest.raises(broken):
                load(served)
    wait_for(lambda: served.leases() == 0, "leases to be given back")
