"""The daemon under a real keeper: killed at any moment, it comes back with every generation, lease and verdict."""

import os
import signal
import sqlite3
import threading
from pathlib import Path

import pytest
from tests.weightcache import clients
from tests.weightcache.caches import Cache, KeptCache, memory_files, wait_for
from tests.weightcache.models import config
from tests.weightcache.publishing import attach, packed, publish, publishing

from weightcache import messages
from weightcache.errors import CacheMiss
from weightcache.frames import close_all


def test_weights_survive_the_death_of_their_daemon(kept: KeptCache) -> None:
    generation = publish(kept, packed())
    assert kept.generations()[0]["stored"] is True
    for _ in range(3):
        kept.kill_daemon()
        found = kept.generations()
        assert [(each["generation"], each["stored"]) for each in found] == [(generation, True)]
    with clients.client(clients.hold, kept.socket, "tiny") as client:
        assert client.hear()[:2] == ("hit", generation)
    starts = kept.events("WHERE kind = 'process' AND name = 'readopted'")
    assert [event.attributes["generations"] for event in starts] == [[generation]] * 3


def test_leases_survive_too_with_their_slots_and_end_with_their_clients(kept: KeptCache) -> None:
    publish(kept, packed())
    wait_for(lambda: kept.leases() == 0)
    with clients.client(clients.hold, kept.socket, "tiny", "a", kept.journal_path) as client:
        _, generation, before = client.hear()
        for _ in range(2):
            kept.kill_daemon()
            assert [lease["slot"] for lease in kept.generations()[0]["leases"]] == ["a"]
            with pytest.raises(CacheMiss, match="in use"):
                kept.ask(messages.Release(generation=generation))
        client.go_on()
        assert client.hear() == before
        client.kill()
        wait_for(lambda: kept.leases() == 0, "the lease to end with its client")
    closed = kept.events("WHERE kind = 'lease_close' AND slot = 'a'")
    assert len(closed) == 1
    kept.kill_daemon()
    assert kept.leases() == 0


def test_a_client_that_dies_while_there_is_no_daemon_is_not_missed_for_long(kept: KeptCache) -> None:
    publish(kept, packed())
    wait_for(lambda: kept.leases() == 0)
    with clients.client(clients.hold, kept.socket, "tiny", "a", kept.journal_path) as client:
        client.hear()
        daemon = kept.status()["pid"]
        os.kill(daemon, signal.SIGSTOP)
        client.kill()
        os.kill(daemon, signal.SIGKILL)
        wait_for(lambda: kept.pid() not in (None, daemon), "the daemon's successor")
        wait_for(lambda: kept.leases() == 0, "the lease to end")


def test_an_orderly_end_of_the_daemon_keeps_leases_as_well(kept: KeptCache) -> None:
    publish(kept, packed())
    wait_for(lambda: kept.leases() == 0)
    with clients.client(clients.hold, kept.socket, "tiny", "a", kept.journal_path) as client:
        client.hear()
        daemon = kept.status()["pid"]
        os.kill(daemon, signal.SIGTERM)
        wait_for(lambda: kept.pid() not in (None, daemon), "the daemon's successor")
        assert [lease["slot"] for lease in kept.generations()[0]["leases"]] == ["a"]
        assert kept.events("WHERE kind = 'lease_close' AND slot = 'a'") == []


def test_quarantine_survives_and_so_does_its_end(kept: KeptCache) -> None:
    generation = publish(kept, packed())
    kept.ask(messages.Quarantine(generation=generation, reason="wrong answers"))
    kept.kill_daemon()
    assert kept.generations()[0]["quarantined"] == "wrong answers"
    with pytest.raises(CacheMiss) as refused:
        attach(kept)
    assert refused.value.reason == "quarantined"
    kept.ask(messages.Quarantine(generation=generation, reason="lifted", lift=True))
    kept.kill_daemon()
    assert kept.generations()[0]["quarantined"] is None


def test_what_was_released_does_not_come_back(kept: KeptCache) -> None:
    gone, stays = publish(kept, packed(config("gone"))), publish(kept, packed(config("stays")))
    wait_for(lambda: kept.leases() == 0)
    kept.ask(messages.Release(generation=gone))
    kept.kill_daemon()
    assert [each["generation"] for each in kept.generations()] == [stays]
    with pytest.raises(CacheMiss) as absent:
        attach(kept, config("gone"))
    assert absent.value.reason == "absent"


def test_released_memory_returns_from_the_keeper_before_the_answer(kept: KeptCache) -> None:
    keeper = kept.processes[0].pid
    generation = publish(kept, packed())
    wait_for(lambda: kept.leases() == 0)
    assert memory_files(keeper) == 2
    kept.ask(messages.Release(generation=generation))
    assert memory_files(keeper) == 0


def test_clients_that_call_while_there_is_no_daemon_are_served_by_the_next(kept: KeptCache) -> None:
    generation = publish(kept, packed())
    os.kill(kept.status()["pid"], signal.SIGKILL)
    got: list[str] = []

    def call() -> None:
        connection, found, received = attach(kept)
        close_all(received)
        connection.close()
        got.append(found)

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert got == [generation] * 4


def test_weights_survive_the_death_of_their_keeper(kept: KeptCache) -> None:
    """And then, under the next keeper, of their daemon."""
    generation = publish(kept, packed())
    wait_for(lambda: kept.leases() == 0)
    daemon = kept.status()["pid"]
    kept.processes[0].kill()
    kept.processes[0].wait()
    assert kept.status()["pid"] == daemon
    with publishing(kept, packed(config("second"))) as (_, second):
        assert {each["generation"]: each["stored"] for each in kept.generations()} == {generation: True, second: False}
        keeper = kept.start_keeper()
        wait_for(lambda: all(each["stored"] for each in kept.generations()), "the next keeper to store everything")
        assert kept.status()["pid"] == daemon
        assert memory_files(keeper.pid) == 4
        kept.kill_daemon()
        assert {each["generation"] for each in kept.generations()} == {generation, second}
        assert kept.leases() == 1


def test_a_stopped_keeper_stops_no_engine(kept: KeptCache) -> None:
    publish(kept, packed())
    wait_for(lambda: kept.leases() == 0)
    keeper = kept.processes[0]
    keeper.send_signal(signal.SIGSTOP)
    try:
        for _ in range(10):  # each time the daemon waits for it in vain
            connection, _, received = attach(kept)
            close_all(received)
            connection.close()
        assert kept.status()["pid"]
    finally:
        keeper.send_signal(signal.SIGCONT)
    wait_for(lambda: kept.leases() == 0, "leases to end")


def test_weights_that_died_with_their_holders_are_lost_and_not_absent(served: Cache) -> None:
    """No keeper holds them, and engines cannot give them back."""
    with publishing(served, packed()):
        served.processes[0].kill()
        served.processes[0].wait()
        served.start()
        with pytest.raises(CacheMiss) as lost:
            attach(served)
        assert (lost.value.reason, lost.value.detail) == ("residency_lost", "keeper_lost")
        assert len(served.status()["losses"]) == 1
    publish(served, packed(seed=0))
    assert served.status()["losses"] == []
    connection, _, received = attach(served)
    close_all(received)
    connection.close()


def test_what_was_resident_before_a_reboot_is_told_so(served: Cache) -> None:
    publish(served, packed())
    served.processes[0].kill()
    served.processes[0].wait()
    with sqlite3.connect(served.journal_path) as database:
        database.execute("UPDATE events SET boot_id = 'another boot'")
    database.close()
    served.start()
    with pytest.raises(CacheMiss) as lost:
        attach(served)
    assert (lost.value.reason, lost.value.detail) == ("residency_lost", "node_reboot")


def test_a_damaged_journal_keeps_no_weights_from_their_engines(kept: KeptCache) -> None:
    generation = publish(kept, packed())
    daemon = kept.status()["pid"]
    os.kill(daemon, signal.SIGSTOP)
    for path in kept.state_dir.glob("journal.sqlite3*"):
        if path.is_file():
            path.write_bytes(b"damage" * 1000)
    os.kill(daemon, signal.SIGKILL)
    wait_for(lambda: kept.pid() not in (None, daemon), "the daemon's successor")
    connection, found, received = attach(kept)
    assert found == generation
    close_all(received)
    connection.close()


def test_a_socket_whose_file_was_removed_is_made_anew(kept: KeptCache) -> None:
    generation = publish(kept, packed())
    daemon = kept.status()["pid"]
    Path(kept.socket).unlink()
    os.kill(daemon, signal.SIGKILL)
    wait_for(lambda: kept.socket.exists() and kept.pid() not in (None, daemon), "the daemon's successor")
    assert [each["generation"] for each in kept.generations()] == [generation]
    kept.kill_daemon()
    assert [each["generation"] for each in kept.generations()] == [generation]
