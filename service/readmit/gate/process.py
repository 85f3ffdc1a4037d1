"""Engine processes: which one, whether it lives, and whether it is the one that listens. Sources: proc(5)."""

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from readmit.gate.tripwire import Tripwire
from weightcache.journal import boottime_ns
from weightcache.process import Process, Stat, tree

_LISTEN: Final = "0A"
"""TCP_LISTEN in /proc/net/tcp."""
_ANY: Final = {"0" * 8, "0" * 32}
_GONE: Final = (FileNotFoundError, ProcessLookupError)


class Engine(NamedTuple):
    """One process. A pid comes back, together with its start time (clock ticks since boot) it does not."""

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> "Engine | None":
        """The process that has this pid now, None if there is none or it has begun to exit."""
        stat = Stat.read(pid)
        return None if stat is None or stat.exiting else cls(pid, stat.start_ticks)

    @property
    def alive(self) -> bool:
        return Engine.of(self.pid) == self

    @property
    def age_s(self) -> float:
        """How long ago it was started."""
        return boottime_ns() / 1e9 - self.start_ticks / os.sysconf("SC_CLK_TCK")

    @property
    def stopped(self) -> bool:
        """Whether a signal holds it still."""
        stat = Stat.read(self.pid)
        return stat is not None and stat.start_ticks == self.start_ticks and stat.state == "T"

    @contextlib.contextmanager
    def watched(self, on_exit: Callable[[], None]) -> Iterator[None]:
        """Call back on the running event loop, once, as soon as the process begins to exit; at once if it has."""
        loop = asyncio.get_running_loop()
        process = Process.open(self.pid, self.start_ticks)
        if process is None:
            loop.call_soon(on_exit)
            yield
            return

        watching = True

        def exited() -> None:
            nonlocal watching
            if watching:
                watching = False
                loop.remove_reader(process)
                on_exit()

        def exits() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed meanwhile
                loop.call_soon_threadsafe(exited)

        loop.add_reader(process, exited)
        wire = Tripwire(self.pid, self.start_ticks, exits)
        try:
            yield
        finally:
            watching = False
            wire.cut()
            loop.remove_reader(process)
            process.close()

    async def gone(self) -> None:
        """Wait until the process has ended, and its memory and sockets are free."""
        if (process := Process.open(self.pid, self.start_ticks)) is None:
            return
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(process, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(process)
            process.close()

    def listens(self, host: str, port: int) -> bool | None:
        """Whether every socket that listens there belongs to this process or its descendants.

        None when that cannot be seen: the host is another one, or the kernel hides the process's descriptors.
        """
        inodes = listening_inodes(host, port)
        if not inodes:
            return None
        hidden = False
        for pid in tree(self.pid):
            try:
                inodes -= _socket_inodes(pid)
            except PermissionError:
                hidden = True
        if not inodes:
            return True
        return None if hidden else False


def listener(host: str, port: int) -> Engine | None:
    """The oldest process that holds a socket listening there, None when there is none to be seen."""
    inodes = listening_inodes(host, port)
    holders = []
    for entry in os.listdir("/proc") if inodes else ():
        if entry.isdecimal():
            with contextlib.suppress(PermissionError):
                if inodes & _socket_inodes(int(entry)):
                    holders.append(Engine.of(int(entry)))
    return min((it for it in holders if it is not None), default=None, key=lambda it: (it.start_ticks, it.pid))


def listening_inodes(host: str, port: int) -> set[int]:
    """The inodes of the TCP sockets of this network namespace that take connections to an address."""
    wanted = _hex_addresses(host) | _ANY
    inodes = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with contextlib.suppress(*_GONE), open(table) as lines:  # no tcp6 without IPv6
            next(lines)
            for line in lines:
                fields = line.split()
                address, _, at = fields[1].partition(":")
                if fields[3] == _LISTEN and int(at, 16) == port and address in wanted:
                    inodes.add(int(fields[9]))
    return inodes


def _hex_addresses(host: str) -> set[str]:
    """An address as /proc/net/tcp and tcp6 print it: 32-bit words, each in the machine's byte order."""
    found = set()
    for family, _, _, _, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
        packed = socket.inet_pton(family, str(address[0]).partition("%")[0])
        if family == socket.AF_INET:
            found |= {_words(packed), _words(bytes(10) + b"\xff\xff" + packed)}
        else:
            found.add(_words(packed))
    return found


def _words(packed: bytes) -> str:
    words = (packed[at : at + 4] for at in range(0, len(packed), 4))
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)


def _socket_inodes(pid: int) -> set[int]:
    """Raises PermissionError for a process whose descriptors we may not see; empty for one that is gone."""
    inodes = set()
    with contextlib.suppress(*_GONE):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(*_GONE):
                target = os.readlink(entry.path)
                if target.startswith("socket:["):
                    inodes.add(int(target[8:-1]))
    return inodes
