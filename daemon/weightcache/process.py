"""A process that cannot be mistaken for another one: its pid, its start time in the kernel, and a pidfd.

Sources: proc(5) for ``/proc/PID/stat``, pidfd_open(2), the kernel's cgroup-v1/memory.txt and cgroup-v2.txt for the
out-of-memory counters. Standard library only.
"""

import contextlib
import os
import signal
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final, NamedTuple

_PF_EXITING: Final = 0x4
"""In the kernel's flags of a task, from the moment that it begins to exit (include/linux/sched.h)."""


class Stat(NamedTuple):
    """What ``/proc/PID/stat`` says; ``start_ticks`` counts clock ticks since boot."""

    state: str
    session: int
    start_ticks: int
    flags: int

    @property
    def exiting(self) -> bool:
        """Whether it runs no more code of its own, though its memory and sockets may take seconds to go."""
        return self.state in "ZX" or bool(self.flags & _PF_EXITING)

    @classmethod
    def read(cls, pid: int) -> "Stat | None":
        """The state of a process, None when there is none."""
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                # The name in parentheses may hold anything, parentheses and blanks included.
                fields = file.read().rpartition(b")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        return cls(fields[0].decode(), int(fields[3]), int(fields[19]), int(fields[6]))


class Exit(NamedTuple):
    """How a process ended. Both are None for one that was not our child: only its parent learns the status."""

    code: int | None
    signal: int | None

    @property
    def known(self) -> bool:
        return self.code is not None or self.signal is not None

    def __str__(self) -> str:
        if self.signal is not None:
            try:
                return f"killed by {signal.Signals(self.signal).name}"
            except ValueError:  # the real-time signals between SIGRTMIN and SIGRTMAX have no names
                return f"killed by signal {self.signal}"
        return "with unknown status (it was adopted)" if self.code is None else f"with exit code {self.code}"


class Process:
    """A running process, held by pidfd. Close it when done."""

    def __init__(self, pid: int, start_ticks: int, pidfd: int) -> None:
        self.pid = pid
        self.start_ticks = start_ticks
        self._pidfd = pidfd

    @classmethod
    def open(cls, pid: int, start_ticks: int | None = None) -> "Process | None":
        """The process with this pid, if it also started at ``start_ticks``; None when it has been reaped.

        A zombie is still there: its pidfd is readable at once.
        """
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return None
        # Read after the pidfd is held: from here on the pid cannot pass to another process unseen.
        stat = Stat.read(pid)
        if stat is None or (start_ticks is not None and stat.start_ticks != start_ticks):
            os.close(pidfd)
            return None
        return cls(pid, stat.start_ticks, pidfd)

    def fileno(self) -> int:
        """The pidfd; it becomes readable when the process has ended."""
        return self._pidfd

    def send_signal(self, number: int) -> bool:
        """Send a signal; False when the process has ended."""
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            return False
        return True

    @property
    def stopped(self) -> bool:
        """Whether a signal holds it still: then it hears of nothing but SIGKILL and SIGCONT."""
        stat = Stat.read(self.pid)
        return stat is not None and stat.start_ticks == self.start_ticks and stat.state == "T"

    def terminate_group(self) -> None:
        """Send SIGTERM to its process group, which it leads, or to itself where it does not yet."""
        stat = Stat.read(self.pid)
        if stat is None or stat.start_ticks != self.start_ticks:
            return  # ended, and reaped by somebody else
        try:
            os.killpg(self.pid, signal.SIGTERM)
        except ProcessLookupError:
            self.send_signal(signal.SIGTERM)

    def reap(self) -> Exit:
        """Take the exit status of an ended child; unknown for a process that is not our child."""
        try:
            result = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            return Exit(None, None)
        if result is None:
            raise RuntimeError(f"process {self.pid} has not ended")
        if result.si_code == os.CLD_EXITED:
            return Exit(result.si_status, None)
        return Exit(None, result.si_status)

    def close(self) -> None:
        """Let go of the pidfd."""
        os.close(self._pidfd)


def session_members(leader: int, start_ticks: int) -> Iterator[Process]:
    """The living processes of a session, without its leader. The caller closes them.

    Args:
        leader: pid of the leader, which may have ended.
        start_ticks: when the leader started, so that a later session of the same number is left alone.
    """
    successor = Stat.read(leader)
    if successor is not None and successor.start_ticks != start_ticks:
        return  # the number is free for others only once the last member has gone
    for entry in os.listdir("/proc"):
        if not entry.isdecimal() or int(entry) == leader:
            continue
        stat = Stat.read(int(entry))
        if stat is None or stat.session != leader or stat.state in "ZX":
            continue
        member = Process.open(int(entry), stat.start_ticks)
        if member is not None:
            yield member


def reap_strangers(ours: Collection[int]) -> None:
    """As process 1 of a container, take the exit status of ended processes that others have left to us."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid in ours:  # whose pidfd will tell
            return
        os.waitpid(ended.si_pid, 0)


def oom_counter(pid: int) -> Path | None:
    """The file that counts the out-of-memory kills of a process's cgroup, None where there is no such file."""
    try:
        return counter_file(Path(f"/proc/{pid}/cgroup").read_text(), Path("/proc/self/mountinfo").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return None


def counter_file(cgroups: str, mounts: str) -> Path | None:
    """The counter's file by the texts of ``/proc/PID/cgroup`` and ``/proc/self/mountinfo``."""
    folders = {}
    for line in cgroups.splitlines():
        _, controllers, folder = line.split(":", 2)
        folders["memory" if "memory" in controllers.split(",") else controllers] = folder
    for fields in map(str.split, mounts.splitlines()):
        root, point = fields[3], fields[4]
        kind, options = fields[fields.index("-") + 1], fields[-1].split(",")
        if kind == "cgroup2" and "" in folders:
            file = _below(point, root, folders[""]) / "memory.events"
        elif kind == "cgroup" and "memory" in options and "memory" in folders:
            file = _below(point, root, folders["memory"]) / "memory.oom_control"
        else:
            continue
        if file.exists():  # on a host with both versions the memory controller is in one of them
            return file
    return None


def oom_kills(counter: Path | None) -> int | None:
    """How many processes of the cgroup the kernel has killed for memory so far; None when it cannot be read."""
    if counter is None:
        return None
    try:
        pairs = dict(line.split() for line in counter.read_text().splitlines())
    except OSError:  # the cgroup was removed with its last process
        return None
    kills = pairs.get("oom_kill")
    return int(kills) if kills is not None else None


def _below(mount_point: str, mount_root: str, folder: str) -> Path:
    # In a container the mount often shows only the container's own cgroup, while /proc names it from the host's root.
    relative = os.path.relpath(folder, mount_root)
    return Path(mount_point) if relative.startswith("..") else Path(mount_point, relative)


def tree(pid: int) -> Iterator[int]:
    """A process and its descendants."""
    yield pid
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                    yield from tree(int(child))
