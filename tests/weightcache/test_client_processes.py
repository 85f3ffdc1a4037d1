"""Client processes: waiting for one another, starting their own daemon, killed in every part, short of memory."""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from socket import socket as Socket  # noqa: N812 - a type beside fixtures of that name

import pytest
import torch
from tests.weightcache import clients
from tests.weightcache.caches import Cache, KeptCache, descriptors, memory_files, wait_for
from tests.weightcache.models import Tiny, become, config, contents, fill
from tests.weightcache.publishing import packed, publish, spoil
from torch import nn

from weightcache import messages, protocol
from weightcache.attachment import Progress
from weightcache.client import attach
from weightcache.process import Process

GOOD = Tiny()
fill(GOOD)
GOOD_CONTENTS = contents(GOOD)


def test_two_that_start_at_once_load_once(served: Cache) -> None:
    """Both find nothing; the slower one waits for the quicker one's load."""
    with (
        clients.client(clients.load_slowly, served.socket, "tiny") as first,
        clients.client(clients.load_slowly, served.socket, "tiny") as second,
    ):
        for each in (first, second):
            assert each.hear() == "absent"  # neither has claimed yet
        for each in (first, second):
            each.go_on()
        answers = [each.hear() for each in (first, second)]
        assert len({generation for generation, _, _ in answers}) == 1
        assert sum(loads for _, loads, _ in answers) == 1
        assert all(found == GOOD_CONTENTS for _, _, found in answers)
        assert len(served.generations()) == 1
        assert served.leases() == 2


def test_who_comes_during_a_load_waits_for_it_with_progress(served: Cache) -> None:
    with clients.client(clients.stop_in, served.socket, "tiny", "publish", True) as loading:
        assert loading.hear() == "publish"
        with clients.client(clients.hold, served.socket, "tiny", "b", served.journal_path) as waiting:
            wait_for(served.lookups, "it to wait")
            assert served.status()["claims"][0]["done"] == 4
            loading.go_on()
            path, generation, found = waiting.hear()
    assert (path, found) == ("miss", GOOD_CONTENTS)
    assert generation is not None
    row = served.lookups()[0].attributes
    assert (row["reason"], row["policy"]) == ("daemon_loading", "wait")


def test_when_a_loader_is_killed_one_of_those_who_wait_loads(served: Cache) -> None:
    with clients.client(clients.stop_in, served.socket, "tiny", "publish", True) as loading:
        assert loading.hear() == "publish"
        with clients.client(clients.hold, served.socket, "tiny", "b", served.journal_path) as waiting:
            wait_for(served.lookups, "it to wait")
            loading.kill()
            path, generation, found = waiting.hear()
            assert (path, found) == ("miss", GOOD_CONTENTS)
            assert [each["generation"] for each in served.generations()] == [generation]
    assert len(served.lookups()) == 1


NAMESPACES = ["unshare", "--mount", "--pid", "--fork", "--mount-proc"]
ELSEWHERE = """
import subprocess
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "none", "/dev/shm"], check=True)
from tests.weightcache.models import config, skeleton
from weightcache.client import attach
print(attach(skeleton(), config()).path)
"""


def test_a_client_in_namespaces_of_its_own_maps_all_the_same(served: Cache) -> None:
    """Other pids, and no shared memory file system to speak of: descriptors need neither."""
    if os.getuid() != 0:
        pytest.skip("namespaces take root")
    publish(served, packed())
    elsewhere = served.run([*NAMESPACES, sys.executable, "-c", ELSEWHERE])
    said, _ = elsewhere.communicate(timeout=120)
    assert said.strip() == "hit", said


def test_weights_never_travel_by_value(served: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred MiB are published and mapped; what crosses the socket is counted."""
    crossed: list[int] = []
    send, receive = protocol.send_frame, protocol.receive_some

    def sending(connection: Socket, frame: memoryview, files: Sequence[int]) -> int:
        crossed.append(send(connection, frame, files))
        return crossed[-1]

    def receiving(connection: Socket, size: int, into: list[int]) -> bytes:
        data = receive(connection, size, into)
        crossed.append(len(data))
        return data

    monkeypatch.setattr(protocol, "send_frame", sending)
    monkeypatch.setattr(protocol, "receive_some", receiving)

    def make() -> nn.Module:
        module = nn.Module()
        module.register_parameter("large", nn.Parameter(torch.empty(100 << 20, dtype=torch.uint8), requires_grad=False))
        return module

    with torch.device("meta"):
        models = [make(), make()]
    for model, path in zip(models, ("miss", "hit"), strict=True):
        read = partial(_become_large, model, make)
        outcome = attach(model, config("large"), load=read, load_bytes=100 << 20, socket=served.socket)
        assert (outcome.path, outcome.bytes) == (path, 100 << 20)
    assert sum(crossed) < 1 << 20


def _become_large(model: nn.Module, make: Callable[[], nn.Module], _: Progress) -> None:
    become(model, make())


PARTS = ("connect", "match", "map", "verify", "bind", "buffers")


@pytest.mark.parametrize("part", [*PARTS, "half bound"])
def test_a_client_killed_in_any_part_of_a_hit_costs_nobody_anything(served: Cache, part: str) -> None:
    daemon = served.processes[0].pid
    generation = publish(served, packed())
    wait_for(lambda: served.leases() == 0)
    served.metric("weightcache_leases")
    before = descriptors(daemon), memory_files(daemon)
    if part == "half bound":
        killed = clients.Client(clients.stop_half_bound, served.socket, "tiny")
        assert killed.hear() == "half"
    else:
        killed = clients.Client(clients.stop_in, served.socket, "tiny", part, False)
        assert killed.hear() == part
    killed.kill()
    killed.close()
    wait_for(lambda: served.leases() == 0, "the lease to end")
    wait_for(lambda: (descriptors(daemon), memory_files(daemon)) == before, "descriptors to return")
    with clients.client(clients.hold, served.socket, "tiny") as honest:
        assert honest.hear() == ("hit", generation, GOOD_CONTENTS)


@pytest.mark.parametrize("part", ["read", "publish"])
def test_a_client_killed_while_it_loads_or_publishes_leaves_nothing(served: Cache, part: str) -> None:
    daemon = served.processes[0].pid
    served.metric("weightcache_leases")
    before = descriptors(daemon)
    killed = clients.Client(clients.stop_in, served.socket, "tiny", part, True)
    assert killed.hear() == part
    assert len(served.status()["claims"]) == 1
    killed.kill()
    killed.close()
    wait_for(lambda: not served.status()["claims"], "the claim to end")
    wait_for(lambda: descriptors(daemon) == before, "descriptors to return")
    assert served.generations() == []
    with clients.client(clients.hold, served.socket, "tiny") as honest:
        path, generation, found = honest.hear()
        assert (path, found) == ("miss", GOOD_CONTENTS)
        assert generation is not None


def test_two_hundred_killed_clients_leave_the_daemon_as_it_was(served: Cache) -> None:
    daemon = served.processes[0].pid
    publish(served, packed())
    wait_for(lambda: served.leases() == 0)
    before: tuple[int, int, list[str]] | None = None
    for number in range(201):
        killed = clients.Client(clients.hold, served.socket, "tiny")
        if number % 2:  # half of them in the middle of it
            killed.hear()
        killed.kill()
        killed.close()
        if before is None:
            wait_for(lambda: served.status()["connections"] == 1)
            served.metric("weightcache_leases")
            before = descriptors(daemon), memory_files(daemon), sorted(os.listdir(served.runtime_dir))
    wait_for(lambda: served.leases() == 0 and served.status()["connections"] == 1, "connections to end")
    wait_for(
        lambda: (descriptors(daemon), memory_files(daemon), sorted(os.listdir(served.runtime_dir))) == before,
        "descriptors, memory files and files to be as after the first",
    )


def test_a_daemon_killed_during_a_load_gets_the_weights_all_the_same(kept: KeptCache) -> None:
    """The claim dies with the daemon; the engine claims again from its successor."""
    with clients.client(clients.stop_in, kept.socket, "tiny", "publish", True) as loading:
        assert loading.hear() == "publish"
        kept.kill_daemon()
        loading.go_on()
        wait_for(kept.generations, "the weights to be published")
        with clients.client(clients.hold, kept.socket, "tiny") as other:
            path, _, found = other.hear()
    assert (path, found) == ("hit", GOOD_CONTENTS)


def test_a_daemon_killed_for_good_during_a_load_leaves_the_engine_serving(served: Cache) -> None:
    with clients.client(clients.load_slowly, served.socket, "tiny") as loading:
        assert loading.hear() == "absent"
        served.processes[0].kill()
        served.processes[0].wait()
        loading.go_on()
        generation, loads, found = loading.hear()
    assert (generation, loads, found) == (None, 1, GOOD_CONTENTS)


def test_a_daemon_that_dies_in_the_middle_of_an_answer(served: Cache) -> None:
    """The client asks a stopped daemon, which is then killed: its fault, by name, and a load from disk."""
    with clients.client(clients.stop_in, served.socket, "tiny", "match", True, served.journal_path) as asking:
        assert asking.hear() == "match"
        served.processes[0].send_signal(signal.SIGSTOP)
        asking.go_on()
        served.processes[0].kill()
        wait_for(served.lookups, "the miss")
    assert served.lookups()[0].attributes["reason"] == "daemon_died"


def test_mode_daemon_starts_one_has_it_load_and_takes_it_along(cache: Cache) -> None:
    with clients.client(clients.own_daemon, cache.socket, cache.journal_path, False) as engine:
        outcome, found = engine.hear()
        assert (outcome.path, outcome.mode, outcome.reason) == ("miss", "daemon", "absent")
        assert found == GOOD_CONTENTS
        daemon = cache.status()["pid"]
        assert [each["generation"] for each in cache.generations()] == [outcome.generation]
        with clients.client(clients.own_daemon, cache.socket, cache.journal_path, False) as second:
            other, found = second.hear()
            assert (other.path, other.generation, found) == ("hit", outcome.generation, GOOD_CONTENTS)
            assert cache.status()["pid"] == daemon
        engine.kill()
    wait_for(lambda: Process.open(daemon) is None or _is_zombie(daemon), "the daemon to end with its engine")
    rows = [event.attributes for event in cache.lookups() if event.name == "miss"]
    assert [(row["reason"], row["policy"]) for row in rows] == [("absent", "wait")]


def test_a_detached_daemon_outlives_its_engine(cache: Cache) -> None:
    with clients.client(clients.own_daemon, cache.socket, cache.journal_path, True) as engine:
        outcome, _ = engine.hear()
        daemon = cache.status()["pid"]
        engine.kill()
    try:
        wait_for(lambda: cache.leases() == 0, "the lease to end")
        assert cache.status()["pid"] == daemon
        assert [each["generation"] for each in cache.generations()] == [outcome.generation]
    finally:
        os.kill(daemon, signal.SIGTERM)
    wait_for(lambda: not cache.socket.exists(), "the daemon to end")


def test_what_a_daemon_has_loaded_is_loaded_where_the_engine_that_asks_is(cache: Cache) -> None:
    """Whoever started the daemon, and whatever GPUs that one could see."""
    origins = []
    try:
        for visible in ("0", "1", None):
            with clients.client(clients.own_daemon, cache.socket, cache.journal_path, True, visible) as engine:
                outcome, found = engine.hear()
                assert (outcome.path, found) == ("miss", GOOD_CONTENTS)
                origins += [each["publisher"]["origin"] for each in cache.generations()]
                cache.ask(messages.Release(force=True))
    finally:
        os.kill(cache.status()["pid"], signal.SIGTERM)
    assert origins == ["0", "1", config().model_path]
    wait_for(lambda: not cache.socket.exists(), "the daemon to end")


def test_mode_daemon_has_a_copy_loaded_for_its_own_gpu(served: Cache) -> None:
    here = publish(served, spoil(packed(), arena="cuda_vmm", device="GPU-1"))
    with clients.client(clients.own_daemon, served.socket, served.journal_path, False, None, "GPU-2") as engine:
        outcome, found = engine.hear()
        assert (outcome.path, outcome.reason, found) == ("miss", "device", GOOD_CONTENTS)
        assert {each["generation"] for each in served.generations()} == {here, outcome.generation}


def test_ranks_that_start_at_once_share_one_daemon(cache: Cache) -> None:
    engines = [clients.Client(clients.own_daemon, cache.socket, cache.journal_path, False) for _ in range(3)]
    try:
        answers = [engine.hear() for engine in engines]
        assert len({outcome.generation for outcome, _ in answers}) == 1
        assert all(found == GOOD_CONTENTS for _, found in answers)
    finally:
        for engine in engines:
            engine.close()


def test_mode_daemon_raises_on_any_other_miss(served: Cache) -> None:
    publish(served, packed(config(dtype="float16")))
    with clients.client(clients.own_daemon, served.socket, served.journal_path, False) as engine:
        assert engine.hear() == ("fingerprint", "dtype")
    row = served.lookups()[0].attributes
    assert (row["mode"], row["reason"], row["policy"]) == ("daemon", "fingerprint", "fail")


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A memory cgroup of our own (version 1), which takes root."""
    folder = Path(f"/sys/fs/cgroup/memory/weightcache-test-{os.getpid()}")
    if os.getuid() != 0 or not folder.parent.joinpath("memory.limit_in_bytes").exists():
        pytest.skip("a memory cgroup of version 1 that root may make is needed")
    folder.mkdir()
    yield folder
    wait_for(lambda: not (folder / "cgroup.procs").read_text().strip(), "its processes to end")
    folder.rmdir()


def test_in_a_small_cgroup_a_fallback_is_refused_and_nobody_is_killed(served: Cache, memory_group: Path) -> None:
    with clients.client(clients.load_in_a_cgroup, served.socket, memory_group, 600 << 20) as engine:
        facts = engine.hear()
        engine.process.join()
        assert engine.process.exitcode == 0
    assert (facts["reason"], facts["detail"]) == ("resource", "memory")
    assert facts["needed"] == 600 << 20
    assert facts["available"] < 600 << 20
    assert str(memory_group) in facts["expected"]
    assert "oom_kill 0" in (memory_group / "memory.oom_control").read_text()


def test_in_a_small_cgroup_what_cannot_be_published_stays_private(served: Cache, memory_group: Path) -> None:
    """Loading fits; the second copy that publishing takes for a while does not."""
    with clients.client(clients.load_in_a_cgroup, served.socket, memory_group, 200 << 20) as engine:
        outcome = engine.hear()
        engine.process.join()
        assert engine.process.exitcode == 0
    assert outcome.generation is None
    assert "second copy" in outcome.private_because
    assert served.generations() == []
    assert "oom_kill 0" in (memory_group / "memory.oom_control").read_text()


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
