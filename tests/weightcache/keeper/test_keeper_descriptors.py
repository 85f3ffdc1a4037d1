"""Descriptors outlive the process that stored them: in order, with names and contents."""

import socket
from pathlib import Path

from tests.weightcache.keeper.harness import Node, alive, wait_for

STORED = [["listen", "not a file"], ["arena-1-0", "first"], ["arena-1-1", "second"], ["manifest-1", "map"]]


def stored(node: Node, name: str = "daemon") -> int:
    return int(node.child(name).get("stored", 0))


def test_a_killed_child_comes_back_with_its_descriptors(node: Node) -> None:
    node.add("daemon", "d", "stores", role="daemon")
    keeper = node.start()
    first = node.report("d")
    assert first["handed"] == []
    wait_for(lambda: stored(node) == 4)
    for count in (2, 3):
        node.kill(node.child("daemon")["pid"])
        again = node.report("d", count)
        assert again["handed"] == STORED
        assert again["open"][:7] == [0, 1, 2, 3, 4, 5, 6]
        assert again["environment"]["NOTIFY_SOCKET"] == first["environment"]["NOTIFY_SOCKET"]
        # A child that stores again what it was handed does not make the store larger.
        wait_for(lambda: node.child("daemon").get("ready"))
    assert node.stop(keeper)[0] == 0
    assert not (node.runtime_dir / "cache.sock").exists()


def test_what_was_sent_before_a_barrier_survives_a_kill_right_after_it(node: Node) -> None:
    node.add("daemon", "d", "stores-many", role="daemon")
    node.start()
    node.report("d")  # written after the barrier
    node.kill(node.child("daemon")["pid"])
    again = node.report("d", 2)
    assert again["handed"] == [["many", str(place)] for place in range(300)]


def test_clients_that_call_while_the_daemon_is_dead_wait_in_the_kept_listener(node: Node) -> None:
    node.add("daemon", "d", "stores", role="daemon")
    node.start()
    wait_for(lambda: stored(node) == 4)
    node.kill(node.child("daemon")["pid"])
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(node.runtime_dir / "cache.sock"))


def test_a_lease_goes_from_the_store_when_its_client_dies_and_not_when_it_speaks(node: Node) -> None:
    node.add("daemon", "d", "accepts-lease", role="daemon")
    node.start()
    node.report("d")
    path = node.reports / "lease.sock"
    with socket.socket(socket.AF_UNIX) as client:
        wait_for(lambda: path.exists() and not client.connect_ex(str(path)))
        wait_for(lambda: stored(node) == 1)
        client.sendall(b"never read")
        node.kill(node.child("daemon")["pid"])
        assert node.report("d", 2)["handed"] == [["lease-1-1", "not a file"]]
        assert stored(node) == 1
    wait_for(lambda: stored(node) == 0)


def test_a_worker_cannot_speak_for_its_parent(node: Node) -> None:
    node.add("a", "a", "impostor", "silent")
    node.options["closes_episodes"] = True
    node.start()
    wait_for((node.reports / "a-spoke").exists)
    assert node.child("a")["ready"] is False
    assert node.child("a")["status"] == ""


def test_a_successor_adopts_the_children_and_asks_for_their_descriptors(node: Node) -> None:
    node.add("daemon", "d", "stores", role="daemon")
    node.add("a", "a")
    first = node.start()
    wait_for(lambda: stored(node) == 4 and node.child("a").get("ready"))
    before = {name: node.child(name)["pid"] for name in ("daemon", "a")}
    first.kill()
    first.wait()
    assert all(alive(pid) for pid in before.values())
    node.start()
    assert {name: node.child(name)["pid"] for name in before} == before
    wait_for(lambda: stored(node) == 4, "the daemon stores everything again")
    node.kill(before["daemon"])
    assert node.report("d", 2)["handed"] == STORED
    adopted = node.events("WHERE kind = 'process' AND name = 'adopted'")
    assert {event.attributes["pid"] for event in adopted} == set(before.values())
    assert alive(before["a"])


def test_a_child_that_cannot_hear_yet_is_asked_again_when_it_is_ready(node: Node) -> None:
    node.add("daemon", "d", "slow-start", role="daemon")
    first = node.start()
    pid = node.report("d")["pid"]
    first.kill()
    first.wait()
    node.start()
    assert node.child("daemon")["pid"] == pid, "SIGHUP must not kill what has no handler yet"
    Path(node.reports, "d-go").touch()
    wait_for((node.reports / "d-stored-again").exists)
    assert node.child("daemon")["pid"] == pid
