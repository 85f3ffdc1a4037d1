"""The descriptor store, without processes."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from weightcache.keeper import fdstore
from weightcache.keeper.fdstore import DescriptorStore, remove_dead_socket


@pytest.fixture
def store() -> Iterator[DescriptorStore]:
    store = DescriptorStore()
    yield store
    store.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_the_same_open_file_is_stored_once_under_one_name(store: DescriptorStore) -> None:
    memory = os.memfd_create("x")
    before = descriptors()
    for _ in range(3):
        assert store.add("arena", os.dup(memory), poll=False)
    assert store.add("other", os.dup(memory), poll=False)
    assert [entry.name for entry in store.entries()] == ["arena", "other"]
    assert descriptors() == before + 2
    # Another opening of the same file is another descriptor, with rights of its own.
    assert store.add("arena", os.open(f"/proc/self/fd/{memory}", os.O_RDONLY), poll=False)
    assert [entry.name for entry in store.entries()] == ["arena", "other", "arena"]
    os.close(memory)


@pytest.mark.parametrize("platform_knows", [True, False])
def test_equal_files_are_told_on_kernels_without_the_query(
    store: DescriptorStore, monkeypatch: pytest.MonkeyPatch, platform_knows: bool
) -> None:
    monkeypatch.setattr(fdstore, "_F_DUPFD_QUERY", 0x7FFF)  # answered EINVAL, as by Linux before 6.10
    if not platform_knows:
        monkeypatch.setattr(fdstore, "_SYS_KCMP", {})
    memory = os.memfd_create("x")
    store.add("arena", os.dup(memory), poll=False)
    store.add("arena", memory, poll=False)
    assert len(store) == (1 if platform_knows else 2)


def test_removing_a_name_closes_all_of_it_and_nothing_else(store: DescriptorStore) -> None:
    before = descriptors()
    for name in ("a", "b", "a"):
        store.add(name, os.memfd_create(name), poll=False)
    assert store.remove("a") == 2
    assert store.remove("a") == 0
    assert [entry.name for entry in store.entries()] == ["b"]
    assert descriptors() == before + 1


def test_a_full_store_refuses_and_closes(store: DescriptorStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fdstore, "STORE_MAX", 2)
    before = descriptors()
    taken = [store.add(str(place), os.memfd_create("x"), poll=False) for place in range(3)]
    assert taken == [True, True, False]
    assert descriptors() == before + 2


def test_only_polled_connections_go_and_only_when_the_peer_is_gone(store: DescriptorStore) -> None:
    pairs = {name: socket.socketpair() for name in ("polled", "speaks", "unpolled")}
    for name, (ours, _) in pairs.items():
        store.add(name, os.dup(ours.fileno()), poll=name != "unpolled")
    store.add("memory", os.memfd_create("x"), poll=True)  # a file cannot hang up
    pairs["speaks"][1].sendall(b"x")
    assert store.drop_hung_up() == []
    for name in ("polled", "unpolled"):
        pairs[name][1].close()
    assert store.drop_hung_up() == ["polled"]
    # Its duplicate is still open here, and must not be reported again.
    assert store.drop_hung_up() == []
    assert [entry.name for entry in store.entries()] == ["speaks", "unpolled", "memory"]
    for ends in pairs.values():
        for end in ends:
            end.close()


def test_sockets_that_nobody_listens_on_are_removed_and_living_ones_not(store: DescriptorStore, tmp_path: Path) -> None:
    kept, dead = tmp_path / "kept", tmp_path / "dead"
    for path in (kept, dead):
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen()
            store.add(path.name, os.dup(listener.fileno()), poll=False)
    with socket.socket(socket.AF_INET) as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        store.add("tcp", os.dup(other.fileno()), poll=False)
    assert store.listening_at() == [kept, dead]
    store.remove("dead")
    for path in (kept, dead, tmp_path / "never"):
        remove_dead_socket(path)
    assert kept.exists()
    assert not dead.exists()
