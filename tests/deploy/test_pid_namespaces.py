"""The node layout's cache: in a process namespace of its own it knows its engines by their connections alone."""

import subprocess
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from tests.deploy.machine import inner, why_no_namespaces
from tests.weightcache import clients
from tests.weightcache.caches import KeptCache, wait_for

from weightcache.keeper.control import ask

OBSTACLE = why_no_namespaces()


class Apart(KeptCache):
    """A cache whose keeper is process 1 of a namespace."""

    def run(self, command: list[str], **options: Any) -> "subprocess.Popen[str]":
        return super().run(["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *command], **options)

    def kill_daemon(self) -> int:
        keeper = inner(self.processes[0].pid)
        before = self.status()["pid"]
        subprocess.run(["nsenter", "--target", str(keeper), "--pid", "--mount", "kill", "-9", str(before)], check=True)
        wait_for(lambda: self.pid() not in (None, before), "the daemon's successor")
        return int(self.status()["pid"])

    def close(self) -> None:
        self.processes[0].kill()  # and all in the namespace with it
        self.processes[0].wait()
        super().close()


@pytest.fixture
def cache() -> Iterator[Apart]:
    cache = Apart()
    cache.start_keeper()
    yield cache
    cache.close()


def test_an_engine_of_another_namespace_is_known_by_its_lease(cache: Apart) -> None:
    with clients.client(clients.hold, cache.socket, "tiny", "a", cache.journal_path) as first:
        _, generation, _ = first.hear()
        with clients.client(clients.hold, cache.socket, "tiny", "b", cache.journal_path) as second:
            assert second.hear()[:2] == ("hit", generation)
            leases = cache.generations()[0]["leases"]
            assert {(lease["slot"], lease["pid"]) for lease in leases} == {("a", 0), ("b", 0)}, "nobody's number here"
            cache.kill_daemon()
            assert ask(cache.runtime_dir, {"reexec": True}, timeout_s=120)["pid"] == 1, (
                "also as process 1 of a container"
            )
            cache.kill_daemon()
            assert {lease["slot"] for lease in cache.generations()[0]["leases"]} == {"a", "b"}
            first.kill()
            wait_for(lambda: cache.leases() == 1, "the lease to end with its engine")
        wait_for(lambda: cache.leases() == 0, "the other one too")
    with clients.client(clients.hold, cache.socket, "tiny", "a", cache.journal_path) as third:
        assert third.hear()[:2] == ("hit", generation)


if OBSTACLE is not None:  # a container, as a rule
    warnings.warn(f"no process namespace was tried: {OBSTACLE}", stacklevel=1)
    del test_an_engine_of_another_namespace_is_known_by_its_lease
