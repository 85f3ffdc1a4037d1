"""A service's half of systemd's protocol: readiness, and descriptors that outlive the service.

The manager is systemd or our keeper; without one (no ``NOTIFY_SOCKET``) every call does nothing. The protocol is that
of sd_notify(3), sd_pid_notify_with_fds(3), sd_notify_barrier(3) and sd_listen_fds(3). Standard library only.
"""

import array
import contextlib
import math
import os
import select
import socket
import threading
import time
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Final

from weightcache.errors import ConfigError

LISTEN_FDS_START: Final = 3
FDS_PER_MESSAGE: Final = 253
"""SCM_MAX_FD of the kernel: it refuses a message with more descriptors."""
STORE_MAX: Final = 4096
"""Descriptors that our keeper stores for a child; the unit file sets FileDescriptorStoreMax to the same."""
SEND_LIMIT_S: Final = 5.0
"""How long a send waits for room in the manager's queue, which a stopped manager no longer empties."""
RETRY_S: Final = 0.5
_DEAD: Final = (ConnectionError, FileNotFoundError, TimeoutError)
"""What a send to a manager fails with that is dead or stopped."""


class Notifier:
    """Speaks to the service manager.

    Args:
        address: ``NOTIFY_SOCKET``'s value: a path, or ``@name`` in the abstract namespace; None for no manager.
        watchdog_s: after so many seconds of silence the manager takes the service for dead; None if it does not watch.

    What is sent returns whether it reached the manager's queue: False without a manager, or while it is dead. Nothing
    need be sent again: a keeper that comes back asks by SIGHUP for all descriptors, and `ready` sees to itself.

    Raises:
        ConfigError: ``notify_socket``, when the address is of a kind we do not speak.
    """

    def __init__(self, address: str | None, watchdog_s: float | None = None) -> None:
        if address and address[0] not in "/@":
            raise ConfigError(
                "notify_socket",
                "the service manager's address NOTIFY_SOCKET is of an unknown kind",
                expected="an absolute path, or @ and an abstract name",
                found=address,
                remedy="Unset NOTIFY_SOCKET to run without a service manager",
            )
        self._address = "\0" + address[1:] if address and address[0] == "@" else address
        self._watchdog_s = watchdog_s
        self._alive_at = -math.inf

    @classmethod
    def from_environment(cls, environ: MutableMapping[str, str] = os.environ) -> "Notifier":
        """The manager that ``NOTIFY_SOCKET`` names, or none."""
        watched = environ.get("WATCHDOG_PID") in (None, str(os.getpid()))
        silence_us = environ.get("WATCHDOG_USEC", "") if watched else ""
        return cls(environ.get("NOTIFY_SOCKET") or None, int(silence_us) / 1e6 if silence_us.isdecimal() else None)

    @property
    def active(self) -> bool:
        """Whether there is a manager at all."""
        return self._address is not None

    def ready(self, status: str = "", *, main_pid: int | None = None, insists: bool = True) -> bool:
        """Say that the service is up; ``main_pid`` where it is not the process that the manager started.

        It is said until a manager has taken it in, by a thread unless ``insists`` is false: one that dies takes along
        what waits in its queue, and nobody else would tell its successor.
        """
        fields = ["READY=1"]
        if status:
            fields.append(f"STATUS={_line(status)}")
        if main_pid is not None:
            fields.append(f"MAINPID={main_pid}")
        sent = self._send(*fields)
        if self.active and insists:
            threading.Thread(target=self._insist, args=fields, name="sdnotify", daemon=True).start()
        return sent

    def status(self, text: str) -> bool:
        """Give one line for people."""
        return self._send(f"STATUS={_line(text)}")

    def alive(self) -> bool:
        """Say that the service's loop turns, to a manager that watches; call it as often as you like."""
        now = time.monotonic()
        # Four times as often as must be: a moment without processor time is no death.
        if self._watchdog_s is None or now - self._alive_at < self._watchdog_s / 4:
            return False
        self._alive_at = now
        return self._send("WATCHDOG=1")

    def stopping(self) -> bool:
        """Say that the service is on its way down."""
        return self._send("STOPPING=1")

    def store(self, name: str, *fds: int, poll: bool = False) -> bool:
        """Leave duplicates of descriptors with the manager, which hands them to the next process of this service.

        Args:
            name: what `listen_fds` will call them: printable ASCII without colons, at most 255 characters.
            fds: any number of descriptors.
            poll: whether the manager drops one by itself once it reports hang-up or error, as a socket does whose
                peer has died. Memory must not be polled.
        """
        sent = True
        for start in range(0, len(fds), FDS_PER_MESSAGE):
            fields = ["FDSTORE=1", f"FDNAME={_name(name)}"]
            if not poll:
                fields.append("FDPOLL=0")
            sent = self._send(*fields, fds=fds[start : start + FDS_PER_MESSAGE]) and sent
        return sent

    def remove(self, name: str) -> bool:
        """Have the manager close every descriptor stored under a name."""
        return self._send("FDSTOREREMOVE=1", f"FDNAME={_name(name)}")

    def barrier(self, timeout_s: float = SEND_LIMIT_S) -> bool:
        """Wait until the manager has processed everything sent so far.

        Returns:
            Whether it did; False without a manager, or when it died or stayed silent for ``timeout_s`` seconds.
        """
        try:
            with self._manager() as manager:
                processed = _pass_barrier(manager, timeout_s)
            # A manager that dies with the message unread closes the pipe too: only a live one has processed it.
            with self._manager():
                return processed
        except _DEAD:
            return False

    def _insist(self, *fields: str) -> None:
        while True:
            with contextlib.suppress(*_DEAD), self._manager() as manager:
                _say(manager, fields)
                _pass_barrier(manager, None)
                _say(manager, fields)  # refused by one that has died meanwhile, perhaps before it read the first
                return
            time.sleep(RETRY_S)

    def _send(self, *fields: str, fds: Sequence[int] = ()) -> bool:
        try:
            with self._manager() as manager:
                _say(manager, fields, fds)
        except _DEAD:
            return False
        return True

    @contextlib.contextmanager
    def _manager(self) -> Iterator[socket.socket]:
        """A connection to the present manager; raises one of `_DEAD` where none is alive."""
        if self._address is None:
            raise FileNotFoundError("there is no service manager")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as manager:
            manager.settimeout(SEND_LIMIT_S)
            manager.connect(self._address)  # without it, waiting for room does not see the manager's queue
            yield manager


def _say(manager: socket.socket, fields: Sequence[str], fds: Sequence[int] = ()) -> None:
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    manager.sendmsg(["\n".join(fields).encode()], ancillary)


def _pass_barrier(manager: socket.socket, timeout_s: float | None) -> bool:
    """Wait until the manager has read everything so far, or has died; False if it did neither in time."""
    ours, theirs = os.pipe()
    try:
        try:
            _say(manager, ("BARRIER=1",), (theirs,))
        finally:
            os.close(theirs)
        poller = select.poll()
        poller.register(ours, 0)  # hang-up is always reported
        return bool(poller.poll(None if timeout_s is None else timeout_s * 1000))
    finally:
        os.close(ours)


def listen_fds(environ: MutableMapping[str, str] = os.environ) -> list[tuple[str, int]]:
    """The descriptors the manager handed to this process, as (name, descriptor) in the manager's order.

    The variables are removed and the descriptors made close-on-exec, so that no child takes them for its own.

    Raises:
        ConfigError: ``listen_fds``, when the variables contradict each other.
    """
    values = [environ.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")]
    pid, count_text, names_text = values
    if pid != str(os.getpid()):
        return []  # meant for another process, whose environment we inherited
    count = int(count_text) if count_text.isdecimal() else -1
    names = names_text.split(":") if names_text else ["unknown"] * count
    if count != len(names):
        raise ConfigError(
            "listen_fds",
            "the service manager's variables contradict each other",
            expected=f"{count_text or 'a number of'} names for LISTEN_FDS={count_text}",
            found=f"LISTEN_FDNAMES={names_text}",
            remedy="Unset LISTEN_PID, or pass as many names as descriptors",
        )
    handed = [(name, LISTEN_FDS_START + index) for index, name in enumerate(names)]
    for _, descriptor in handed:
        os.set_inheritable(descriptor, False)
    return handed


def _name(name: str) -> str:
    if not 0 < len(name) <= 255 or not (name.isascii() and name.isprintable()) or ":" in name:
        raise ValueError(f"{name!r} cannot name a descriptor: it takes 1 to 255 printable ASCII characters, no colon")
    return name


def _line(text: str) -> str:
    return " ".join(text.splitlines())
