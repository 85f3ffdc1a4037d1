"""The start of a child process: fork, stored descriptors from 3 on, exec. Standard library only.

Between fork and exec the child waits for a word from the keeper, which it gives once it has written down that the child
exists; a keeper that dies in between leaves no process that its successor does not know.
"""

import errno
import fcntl
import os
import resource
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NoReturn

from weightcache.keeper.fdstore import Stored
from weightcache.sdnotify import LISTEN_FDS_START

EXEC_FAILED: Final = 127
GO: Final = b"g"
_RESET: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ)


class Launch:
    """A child between fork and exec. `fileno` is readable when exec has succeeded or failed; call `outcome` then."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid = pid
        self._channel = channel

    def fileno(self) -> int:
        return self._channel.fileno()

    def go(self) -> None:
        """Let the child exec."""
        try:
            self._channel.send(GO)
        except BrokenPipeError:
            return  # killed meanwhile: its pidfd says so

    def outcome(self) -> OSError | None:
        """None when exec succeeded (or the child died on the way there), otherwise why it failed."""
        try:
            report = self._channel.recv(8)
        except ConnectionResetError:  # it was killed before it read our word
            return None
        return OSError(int(report), os.strerror(int(report))) if report else None

    def close(self) -> None:
        self._channel.close()


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open files to the hard one, for the store; returns the soft limit before."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft


def launch(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    cwd: str | None,
    stored: Sequence[Stored],
    output: int,
    open_files: int,
    dumps_core: bool,
    ignores_hangup: bool,
) -> Launch:
    """Fork a child in a session of its own that waits for `Launch.go`.

    Args:
        argv: the command, found by the ``PATH`` of ``env``.
        env: the whole environment; ``LISTEN_*`` are added.
        cwd: its working folder, or None for ours.
        stored: descriptors for 3, 4, ... in this order.
        output: descriptor for its standard output and error.
        open_files: its soft limit of open files; made larger if ``stored`` needs more.
        dumps_core: whether a crash may write a core file, which delays the notice of a death by seconds per GiB.
        ignores_hangup: start with SIGHUP ignored, until the program installs a handler.
    """
    ours, theirs = socket.socketpair()
    # A signal that arrives in the child before exec must not run the keeper's handlers there.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    pid = os.fork()
    if pid == 0:
        report = fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD_CLOEXEC, LISTEN_FDS_START + len(stored))
        try:
            ours.close()
            theirs.close()
            prepare_signals(ignores_hangup)
            os.setsid()
            if os.read(report, 1) == GO:
                _arrange_descriptors(stored, output, report)
                limit(open_files, LISTEN_FDS_START + len(stored), dumps_core)
                _become(argv, env, cwd, stored)
        except (OSError, ValueError) as error:  # ValueError: a null byte in argument or environment
            os.write(report, str(getattr(error, "errno", errno.EINVAL)).encode())
        finally:
            os._exit(EXEC_FAILED)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    return Launch(pid, ours)


def prepare_signals(ignores_hangup: bool) -> None:
    """Undo in a forked child what its parent does about signals."""
    signal.set_wakeup_fd(-1)
    for number in _RESET:
        signal.signal(number, signal.SIG_DFL)
    if ignores_hangup:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _arrange_descriptors(stored: Sequence[Stored], output: int, report: int) -> None:
    """Put standard streams and stored descriptors in their places and close everything else but ``report``."""
    end = LISTEN_FDS_START + len(stored)
    # First all out of the way: a source may have the number of another one's place.
    sources = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, end) for _, fd in stored]
    output = fcntl.fcntl(output, fcntl.F_DUPFD_CLOEXEC, end)
    os.dup2(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for place, source in enumerate(sources, LISTEN_FDS_START):
        os.dup2(source, place)
    # What the keeper's own parent leaked is not close-on-exec.
    os.closerange(end, report)
    os.closerange(report + 1, os.sysconf("SC_OPEN_MAX"))


def _become(argv: Sequence[str], env: Mapping[str, str], cwd: str | None, stored: Sequence[Stored]) -> NoReturn:
    if cwd is not None:
        os.chdir(cwd)
    environment = dict(env)
    if stored:
        environment["LISTEN_PID"] = str(os.getpid())
        environment["LISTEN_FDS"] = str(len(stored))
        environment["LISTEN_FDNAMES"] = ":".join(name for name, _ in stored)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.execvpe(argv[0], list(argv), environment)


def limit(open_files: int, handed: int, dumps_core: bool) -> None:
    """Set the limits of a child that was handed so many descriptors."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    needed = max(open_files, 2 * handed + 64)
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else min(needed, hard), hard))
    if not dumps_core:
        # A core_pattern that pipes to a program ignores a limit of 0, but takes 1 for "never" (fs/coredump.c).
        piped = Path("/proc/sys/kernel/core_pattern").read_text().startswith("|")
        resource.setrlimit(resource.RLIMIT_CORE, (1 if piped else 0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
