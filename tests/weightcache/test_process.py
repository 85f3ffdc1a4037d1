"""Processes, their sessions, and the kernel's counters of out-of-memory kills."""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from weightcache.process import Exit, Process, Stat, counter_file, oom_counter, oom_kills, session_members

MINE = os.getpid()


def start(*command: str, **options: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, **options)  # type: ignore[call-overload, no-any-return]


def ended(process: Process) -> bool:
    return bool(select.select([process], [], [], 60)[0])


def test_a_process_is_its_pid_and_its_start() -> None:
    stat = Stat.read(MINE)
    assert stat is not None
    assert stat.session == os.getsid(0)
    same = Process.open(MINE, stat.start_ticks)
    assert same is not None
    same.close()
    assert Process.open(MINE, stat.start_ticks - 1) is None


def test_a_name_with_parentheses_and_blanks_misleads_nobody(tmp_path: Path) -> None:
    program = tmp_path / "a) R 1 1 (b"
    program.symlink_to("/bin/sleep")
    child = start(str(program), "1000")
    stat = Stat.read(child.pid)
    assert stat is not None
    assert stat.session == os.getsid(0)
    child.kill()
    child.wait()
    assert Stat.read(child.pid) is None


@pytest.mark.parametrize(
    ("program", "expected", "text"),
    [
        ("raise SystemExit(3)", Exit(3, None), "with exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", Exit(None, 9), "killed by SIGKILL"),
        ("import os; os.kill(os.getpid(), 40)", Exit(None, 40), "killed by signal 40"),
    ],
)
def test_the_exit_of_a_child_is_known(program: str, expected: Exit, text: str) -> None:
    pid = os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, "-c", program])
    process = Process.open(pid)
    assert process is not None
    assert ended(process)
    assert process.reap() == expected
    assert str(expected) == text
    assert not process.send_signal(signal.SIGTERM)
    process.close()


def test_the_exit_of_somebody_elses_child_is_unknown() -> None:
    shell = start("sh", "-c", "sleep 1000 & echo $!; wait", stdout=subprocess.PIPE)
    assert shell.stdout is not None
    process = Process.open(int(shell.stdout.readline()))
    assert process is not None
    process.send_signal(signal.SIGKILL)
    assert ended(process)
    found = process.reap()
    assert (found, found.known) == (Exit(None, None), False)
    process.close()
    shell.communicate()


def test_session_members_are_found_without_their_leader_and_not_for_a_later_leader() -> None:
    leader = start("sh", "-c", "sleep 1000 & sleep 1000 & echo; wait", stdout=subprocess.PIPE, start_new_session=True)
    assert leader.stdout is not None
    leader.stdout.readline()
    stat = Stat.read(leader.pid)
    assert stat is not None
    assert list(session_members(leader.pid, stat.start_ticks + 1)) == []
    leader.kill()
    leader.wait()
    members = list(session_members(leader.pid, stat.start_ticks))
    assert len(members) == 2
    for member in members:
        member.send_signal(signal.SIGKILL)
        assert ended(member)
        member.close()
    deadline = time.monotonic() + 60
    while list(session_members(leader.pid, stat.start_ticks)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert list(session_members(leader.pid, stat.start_ticks)) == []


V2_MOUNT = "30 24 0:26 {root} {point} rw - cgroup2 cgroup2 rw"
V1_MOUNT = "31 24 0:27 {root} {point} rw - cgroup cgroup rw,memory"


@pytest.mark.parametrize(
    ("cgroups", "mount", "root", "expected"),
    [
        ("0::/system.slice/engine.service", V2_MOUNT, "/", "system.slice/engine.service/memory.events"),
        ("0::/", V2_MOUNT, "/", "memory.events"),
        ("0::/docker/1234", V2_MOUNT, "/docker/1234", "memory.events"),
        # Seen from a container, the mount is the container's cgroup and /proc names it from the host's root.
        ("0::/../5678", V2_MOUNT, "/docker/1234", "memory.events"),
        ("4:cpu,memory:/jobs/7\n0::/", V1_MOUNT, "/", "jobs/7/memory.oom_control"),
    ],
)
def test_the_counter_is_found_for_both_versions(
    tmp_path: Path, cgroups: str, mount: str, root: str, expected: str
) -> None:
    file = tmp_path / expected
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 5\n")
    assert counter_file(cgroups, mount.format(root=root, point=tmp_path)) == file
    assert oom_kills(file) == 5


def test_on_a_host_with_both_versions_the_one_with_the_memory_controller_counts(tmp_path: Path) -> None:
    unified, memory = tmp_path / "unified", tmp_path / "memory"
    unified.mkdir()
    memory.mkdir()
    (memory / "memory.oom_control").write_text("oom_kill 1\n")
    mounts = [V2_MOUNT.format(root="/", point=unified), V1_MOUNT.format(root="/", point=memory)]
    assert counter_file("4:memory:/\n0::/", "\n".join(mounts)) == memory / "memory.oom_control"


def test_this_process_has_a_counter_or_the_kernel_shows_none() -> None:
    counter = oom_counter(MINE)
    kills = oom_kills(counter)
    assert (counter is None) == (kills is None)
    assert kills is None or kills >= 0


def test_a_counter_that_went_with_its_cgroup_counts_nothing(tmp_path: Path) -> None:
    assert oom_kills(tmp_path / "gone") is None
    assert oom_kills(None) is None
