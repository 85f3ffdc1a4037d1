"""What a keeper hands to the program that takes its place in the same process, and how that is found fit for it.

``execve`` keeps the pid, the children and every descriptor that may be inherited; the rest travels as JSON in a memory
file. The new program reads it once as a trial, in a process of its own, while the old one still keeps everything: a
release that cannot even be imported replaces nobody. Standard library only.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from weightcache.errors import ConfigError
from weightcache.keeper.loop import Loop
from weightcache.keeper.state import ChildRecord
from weightcache.process import Process

FORMAT: Final = 1
"""Raised when an older reader would misread it. Members may be added without."""
TRIAL_LIMIT_S: Final = 60.0
"""How long the new program may take to say that it can go on from here."""
TRIAL: Final = "--trial"
_SHOWN_BYTES: Final = 2000


class Handover(NamedTuple):
    """Everything but what the spec says.

    ``open_files`` is the soft limit that children start with, ``lock`` the descriptor that owns the runtime folder,
    ``asker`` that of the client who waits for the answer, ``control`` what `ControlServer.hand_over` gives, and
    ``children`` what `Child.hand_over` gives, by name.
    """

    release: str
    open_files: int
    lock: int
    asker: int | None
    control: dict[str, Any]
    children: dict[str, dict[str, Any]]
    format: int = FORMAT

    @property
    def records(self) -> list[ChildRecord]:
        """The children as a successor's state file would have them."""
        return [ChildRecord(**facts["record"]) for facts in self.children.values()]

    @property
    def descriptors(self) -> Iterator[int]:
        """All that must pass to the next program."""
        yield self.lock
        yield self.control["listener"]
        yield from (client for client, _ in self.control["clients"])
        for facts in self.children.values():
            yield from _of_child(facts)

    def let_go(self, children: Iterable[str]) -> None:
        """Close what was kept for children that nobody has any more."""
        for name in children:
            for descriptor in _of_child(self.children[name]):
                os.close(descriptor)

    def write(self) -> int:
        """A memory file that the next program inherits."""
        descriptor = os.memfd_create("keeper-handover", 0)
        content = json.dumps(self._asdict()).encode()
        while content:
            content = content[os.write(descriptor, content) :]
        return descriptor

    @classmethod
    def read(cls, descriptor: int) -> "Handover":
        """What a memory file holds; closes it.

        Raises:
            ConfigError: ``handover``: it is none, or of another format.
        """
        try:
            with open(descriptor, "rb") as file:
                file.seek(0)
                data = json.load(file)
            if data["format"] != FORMAT:
                raise ValueError(f"it has format {data['format']}, and this release reads format {FORMAT}")
            handover = cls(**{name: data[name] for name in cls._fields})
            _ = handover.records
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                "handover",
                f"this release cannot go on where the running keeper is: {type(error).__name__}: {error}",
                remedy="End the keeper by SIGKILL and start another one: it adopts what runs",
            ) from error
        return handover


def _of_child(facts: dict[str, Any]) -> Iterator[int]:
    yield facts["notify"]
    yield from (fd for _, fd, _ in facts["stored"])


def set_passing(descriptors: Iterable[int], passing: bool) -> None:
    """Let descriptors pass to the next program of this process, or no longer."""
    for descriptor in descriptors:
        os.set_inheritable(descriptor, passing)


def command(python: str, spec: Path, handover: int, *words: str) -> list[str]:
    """The command that goes on from a handover: what is installed for an interpreter, run as the present program is."""
    options = [word for word in ("-OO", "-O") if sys.flags.optimize == len(word) - 1]
    return [python, *options, "-m", "weightcache.keeper", *words, str(spec), str(handover)]


class Trial:
    """The new program, run to say whether it could take over.

    Args:
        loop: the keeper's.
        python: the interpreter that it is installed for.
        spec: the keeper's.
        handover: what it would go on from.
        done: called from the loop with None, or with why it could not.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self, loop: Loop, python: str, spec: Path, handover: Handover, done: Callable[[str | None], None]
    ) -> None:
        self._loop = loop
        self._done = done
        self._said = os.memfd_create("keeper-trial")
        given = handover.write()
        try:
            argv = command(python, spec, given, TRIAL)
            actions = [(os.POSIX_SPAWN_DUP2, self._said, 1), (os.POSIX_SPAWN_DUP2, self._said, 2)]
            self.pid = os.posix_spawn(argv[0], argv, os.environ, file_actions=actions, setsigmask=())
        except OSError:
            os.close(self._said)
            raise
        finally:
            os.close(given)
        process = Process.open(self.pid)
        assert process is not None, "a child that was not reaped cannot be gone"
        self._process = process
        self._limit = loop.after(TRIAL_LIMIT_S, self._kill)
        loop.watch(process, self._ended)

    def _kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)

    def _ended(self) -> None:
        self._limit.cancel()
        self._loop.unwatch(self._process)
        status = self._process.reap()
        self._process.close()
        size = os.fstat(self._said).st_size
        said = os.pread(self._said, _SHOWN_BYTES, max(0, size - _SHOWN_BYTES)).decode(errors="replace").strip()
        os.close(self._said)
        why = said.splitlines()[-1] if said else "it said nothing"
        self._done(None if status.code == 0 else f"the new program ended {status} on trial: {why}")
