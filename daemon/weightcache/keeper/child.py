"""One child of the keeper: process, notify socket, stored descriptors, output. Standard library only."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from weightcache.journal import Context, boottime_ns
from weightcache.keeper.console import say
from weightcache.keeper.fdstore import DescriptorStore
from weightcache.keeper.launch import Launch, launch
from weightcache.keeper.litter import Litter
from weightcache.keeper.loop import Loop, Timer
from weightcache.keeper.notify import Message, NotifySocket
from weightcache.keeper.output import Output, prune
from weightcache.keeper.preloaded import Refused, launch_preloaded
from weightcache.keeper.slot import Slot
from weightcache.keeper.spec import ChildSpec
from weightcache.keeper.state import ChildRecord
from weightcache.process import Exit, Process

QUICK_S: Final = 10.0
"""A daemon or gate that lived shorter than this died quickly."""
QUICK_PAUSES_S: Final = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Pauses before its restart after so many quick deaths in a row, the last one for all further ones."""

STORING_ROLES: Final = ("daemon", "gate")
"""Who stores descriptors, and does it again on SIGHUP."""
_UNNAMED: Final = "stored"
"""systemd's name for what was stored without one."""
STATES: Final = ("stopped", "waiting", "starting", "running", "ending", "failed")
"""``waiting`` for a backoff; ``starting`` until exec; ``ending`` while it is told to end or its session is cleared;
``failed`` when its slot gave up."""


class Child:
    """See the top of this module. ``slot`` is None for all but engines."""

    def __init__(self, spec: ChildSpec, loop: Loop, notify: NotifySocket, slot: Slot | None) -> None:
        self.spec = spec
        self.slot = slot
        self.state = "waiting"
        self.process: Process | None = None
        self.leader: tuple[int, int] | None = None
        """pid and start time of the process, until nothing of its session is left."""
        self.inherited: ChildRecord | None = None
        """What the predecessor left, until it is taken over."""
        self.handed = False
        """The predecessor was another program in this same process, and left everything."""
        self.launch: Launch | None = None
        self.output: Output | None = None
        self.timer: Timer | None = None
        self.store = DescriptorStore()
        self.ready = False
        self.preloads_at: Path | None = None
        """Where the resident process listens that it is forked from."""
        self.litter = Litter()
        self.how: dict[str, str] = {}
        """How its present process was started, where there are several ways."""
        self.adopted = False
        self.ordered = False
        """It was told to end; its end is no fault."""
        self.resumes = False
        """It starts again once it has ended."""
        self.status = ""
        self.error: str | None = None
        self.starts = 0
        self.since_ns = 0
        self.next_start: float | None = None
        self.last_exit = Exit(None, None)
        self._quick_deaths = 0
        self._loop = loop
        self._notify = notify
        loop.watch(self.store, self._drop_hung_up)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def role(self) -> str:
        return self.spec.role

    @property
    def context(self) -> Context | None:
        """Where what is said of it belongs: its slot's recovery."""
        return self.slot.context if self.slot else None

    def listen(self, on_ready: Callable[["Child"], None]) -> None:
        """Hear the child, and call back when it says that it is up."""
        self._on_ready = on_ready
        self._loop.watch(self._notify, self.hear)

    def hear(self) -> None:
        """Process every message that waits."""
        while (message := self._notify.receive()) is not None:
            try:
                # NotifyAccess=main: workers inherit the address, but speak for nobody.
                if self.process is not None and message.pid == self.process.pid:
                    self._obey(message)
            finally:
                message.close()

    def _obey(self, message: Message) -> None:
        if "BARRIER=1" in message.fields:
            return  # its pipe closes with the message, after all that came before it
        if "FDSTORE=1" in message.fields:
            self._keep(message)
        if "FDSTOREREMOVE=1" in message.fields:
            self.store.remove(message.value("FDNAME") or _UNNAMED)
        if (status := message.value("STATUS")) is not None:
            self.status = status
        if "READY=1" in message.fields:
            self._on_ready(self)

    def _keep(self, message: Message) -> None:
        name, poll = message.value("FDNAME") or _UNNAMED, "FDPOLL=0" not in message.fields
        refused = 0
        while message.fds:
            refused += not self.store.add(name, message.fds.pop(0), poll=poll)
        if refused or message.cut:
            say(f"{self.name}: descriptors {name} could not all be stored: a limit is reached, and they die with it")

    def tick(self) -> None:
        """What is done every few seconds."""
        if self.output is not None:
            self.output.trim()
        if self.slot is not None and self.process is not None:
            self.slot.oom.look()
        self.note_segments()

    def note_segments(self) -> None:
        """Note what shared memory an engine has, to remove it once all its processes are dead."""
        if self.slot is not None and self.process is not None:
            self.litter.note(self.process.pid)

    def record(self) -> ChildRecord:
        """What a successor needs to know."""
        if self.inherited is not None:
            return self.inherited
        (pid, ticks), place = self.leader or (None, None), self.context
        episode, attempt = (place.episode, place.attempt) if place else (None, None)
        return ChildRecord(self.name, self.role, self.state, pid, ticks, self.ready, self.since_ns, episode, attempt)

    def hand_over(self) -> dict[str, Any]:
        """Everything, for another program in this process; descriptors by number."""
        return {
            "record": self.record()._asdict(),
            "notify": self._notify.fileno(),
            "stored": self.store.hand_over(),
            "output": [str(self.output.path), self.output.shown] if self.output else None,
            "litter": sorted(self.litter.noted),
            "how": self.how,
            "adopted": self.adopted,
            "ordered": self.ordered,
            "status": self.status,
            "error": self.error,
            "starts": self.starts,
            "next_start": self.next_start,
            "last_exit": self.last_exit,
            "quick_deaths": self._quick_deaths,
            "slot": self.slot.hand_over() if self.slot else None,
        }

    def take_back(self, handed: dict[str, Any]) -> None:
        """Be what `hand_over` gave, except for the process itself."""
        self.handed, self.inherited = True, ChildRecord(**handed["record"])
        self.state, self.ready, self.since_ns = self.inherited.state, self.inherited.ready, self.inherited.since_ns
        for name, fd, poll in handed["stored"]:
            self.store.add(name, fd, poll=poll)
        if handed["output"] is not None:
            path, shown = handed["output"]
            self.output = Output(Path(path), shown)
        self.litter.noted = {(name, inode) for name, inode in handed["litter"]}
        self.how, self.adopted, self.ordered = handed["how"], handed["adopted"], handed["ordered"]
        self.status, self.error, self.starts = handed["status"], handed["error"], handed["starts"]
        self.next_start, self.last_exit = handed["next_start"], Exit(*handed["last_exit"])
        self._quick_deaths = handed["quick_deaths"]
        if self.slot is not None and handed["slot"] is not None:
            self.slot.take_back(handed["slot"])

    @property
    def at_rest(self) -> bool:
        """Whether nothing runs and nothing will by itself."""
        return self.state in ("stopped", "failed")

    def fork(self, environment: dict[str, str], output_dir: Path, open_files: int) -> Process:
        """Start a process that waits for `Launch.go`, with the stored descriptors.

        Raises:
            OSError: there is no room for another process, descriptor or file.
        """
        output = self.open_output(output_dir)
        if self.slot is not None:
            prune(output_dir, self.name)
        started = self._fork_preloaded(environment, output.fileno(), open_files) or launch(
            self.spec.argv,
            environment,
            cwd=self.spec.cwd,
            stored=self.store.entries(),
            output=output.fileno(),
            open_files=open_files,
            dumps_core=self.slot is None,
            ignores_hangup=self.role in STORING_ROLES,
        )
        try:
            process = Process.open(started.pid)
        except OSError:
            started.close()  # which the child takes for our death
            os.waitpid(started.pid, 0)
            raise
        assert process is not None, "a child that was not reaped cannot be gone"
        self.launch = started
        self.began(process, boottime_ns())
        return process

    def _fork_preloaded(self, environment: dict[str, str], output: int, open_files: int) -> Launch | None:
        """A start by fork from a resident process, None where there is none or it refuses."""
        if self.preloads_at is None:
            return None
        try:
            started = launch_preloaded(
                self.preloads_at,
                self.spec.argv,
                environment,
                cwd=self.spec.cwd,
                output=output,
                open_files=open_files,
            )
        except Refused as refusal:
            self.how = {"preload": "refused", "preload_reason": str(refusal)}
            return None
        self.how = {"preload": "forked"}
        return started

    def began(self, process: Process, since_ns: int) -> None:
        """A process of this child exists."""
        self.process, self.leader, self.since_ns = process, (process.pid, process.start_ticks), since_ns
        self.ready, self.error, self.status = False, None, ""

    def open_output(self, folder: Path) -> Output:
        """Open the file of the present attempt's output."""
        if self.output is not None:
            self.output.close()
            self.output = None
        attempt = f"-{(self.slot.episode or '')[:8]}-{self.slot.attempt}" if self.slot else ""
        self.output = Output(folder / f"{self.name}{attempt}.log")
        return self.output

    def pause_s(self) -> float:
        """Seconds until the next start of a child that is no engine, which has just died."""
        lived_s = (boottime_ns() - self.since_ns) / 1e9
        self._quick_deaths = self._quick_deaths + 1 if lived_s < QUICK_S else 0
        return QUICK_PAUSES_S[min(max(self._quick_deaths - 1, 0), len(QUICK_PAUSES_S) - 1)]

    def cancel_timer(self) -> None:
        """Forget what was planned."""
        if self.timer is not None:
            self.timer.cancel()
        self.timer, self.next_start = None, None

    def facts(self) -> dict[str, object]:
        """What people may want to know now."""
        slot = self.slot
        return {
            **self.record()._asdict(),
            "pid": self.process.pid if self.process else None,
            "status": self.status,
            "uptime_s": round((boottime_ns() - self.since_ns) / 1e9, 3) if self.process else None,
            "starts": self.starts,
            "stored": len(self.store),
            "segments": len(self.litter.noted),
            "episode_open": slot.is_open if slot else None,
            "next_start_s": round(max(0.0, self.next_start - time.monotonic()), 3) if self.next_start else None,
            "output": str(self.output.path) if self.output else None,
        }

    def close(self) -> None:
        """Let go of everything."""
        self._loop.unwatch(self.store)
        self._loop.unwatch(self._notify)
        self.store.close()
        self._notify.close()
        if self.output is not None:
            self.output.close()

    def _drop_hung_up(self) -> None:
        self.store.drop_hung_up()
