"""The keeper itself: it takes over what runs, keeps it until it is told to end, and tells and is told things.

Standard library only.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from weightcache.journal import boottime_ns
from weightcache.keeper.child import STORING_ROLES, Child
from weightcache.keeper.console import say
from weightcache.keeper.control import ControlServer, Later
from weightcache.keeper.fdstore import remove_dead_socket
from weightcache.keeper.handover import Handover
from weightcache.keeper.lives import Lives, facts_of
from weightcache.keeper.segment_watch import SegmentWatch
from weightcache.keeper.slot import ORDERED_CAUSES, Slot
from weightcache.keeper.spec import ChildSpec, KeeperSpec
from weightcache.keeper.succession import Succession
from weightcache.process import Process, reap_strangers
from weightcache.version import VERSION

TICK_S: Final = 5.0
ECHO_S: Final = 0.2
_SOON_S: Final = 0.001


class Keeper(Lives):
    """See the top of this module.

    Args:
        file: the spec.
        handover: what an earlier program in this process leaves, None for a keeper that starts.

    Raises:
        ConfigError: the spec, or the runtime or state folder, cannot be used; or the folder has a keeper already.
    """

    SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    """What ends it."""

    def __init__(self, file: Path, handover: Handover | None = None) -> None:
        super().__init__(KeeperSpec.load(file), handover)
        self.file = file
        self.succession: Succession | None = None
        self._handover = handover
        self._interrupts = 0
        self._segment_watch: SegmentWatch | None = None

    def run(self) -> int:
        """Keep the children until SIGTERM, SIGINT or SIGHUP; returns the exit status."""
        self.loop.on_signals(self.SIGNALS, self._on_signal)
        handover, self._handover = self._handover, None
        if handover is not None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self.SIGNALS)
        self._take_over(handover)
        self.control = ControlServer(
            self.loop, self.state.control_path, self._answer, handover.control if handover else None
        )
        if handover is not None:
            told = {"ok": True, "pid": os.getpid(), "release": VERSION, "previous": handover.release}
            self.control.answer(Later(handover.asker), told)
        self._manager.ready(f"{len(self.children)} processes", insists=False)  # a thread would not survive our forks
        self._repeat(TICK_S, self._tick)
        self._watch_segments()
        if self.spec.foreground:
            self._repeat(ECHO_S, self._echo)
        else:
            names = ", ".join(child.name for child in self.children)
            say(f"keeping {names}: readmit status shows them, readmit logs NAME what they print")
        self.loop.run()
        self._leave()
        return int(self._failed)

    # Taking over

    def _take_over(self, handover: Handover | None) -> None:
        about = {"process": "keeper", "pid": os.getpid(), "release": VERSION}
        if handover is not None:
            records = handover.records
            self._journal.append("process", "reexecuted", {**about, "previous": handover.release})
        else:
            predecessor, records = self.state.load()
            if predecessor is not None:
                self._journal.append("process", "exited", {"process": "keeper", "pid": predecessor})
            self._journal.append("process", "started", about)
        known = {child.name: child for child in self.children}
        retired = []
        # First all records, then deeds: whatever is saved meanwhile must be the whole truth for the next successor.
        for record in records:
            if record.name not in known and (record.pid is not None or record.state == "waiting"):
                known[record.name] = self._child(ChildSpec(record.name, record.role, ("true",)), handover)
                retired.append(known[record.name])
            if record.name in known:
                known[record.name].inherited = record
        self.children += retired
        for child in self.children:
            if not child.handed:
                child.ordered = child in retired
                if child.slot is not None:
                    child.slot.resume(child.inherited)
            if child in retired and child.inherited is not None and child.inherited.pid is None:
                child.inherited, child.state = None, "stopped"
            else:
                self._resume(child)
        for child in retired:
            if child.slot is not None:
                child.slot.stop()
            if child.process is not None:
                child.ordered = False
                self._end(child, resumes=False)
        for record in records:
            if record.name not in known and record.role == "engine":  # it has no process: given up, or stopped
                Slot(ChildSpec(record.name, record.role, ("true",)), self._journal).stop()
        if handover is not None:
            handover.let_go(handover.children.keys() - known.keys())
            self._save()

    def _resume(self, child: Child) -> None:
        """Go on with a child where the predecessor left it, or start it."""
        record, child.inherited = child.inherited, None
        if record is None or record.pid is None or record.start_ticks is None:
            if record is not None and record.state in ("failed", "stopped"):
                child.state = record.state
                return
            if child.next_start is not None:  # handed over in the middle of a pause
                self._start_after(child, max(_SOON_S, child.next_start - time.monotonic()))
                return
            if child.slot is not None:
                child.slot.first_start()
            self._start(child)
            return
        child.leader, child.since_ns = (record.pid, record.start_ticks), record.since_ns
        if child.output is None:
            child.open_output(self._output_dir)
        process = Process.open(record.pid, record.start_ticks)
        if process is None:
            self._ended(child, record.pid, record.start_ticks, boottime_ns())
            return
        self.loop.watch(process, lambda: self._on_exit(child))
        child.state = "running"
        if child.handed:
            child.process = process
            return
        child.began(process, record.since_ns)
        child.ready, child.adopted = record.ready, True
        if child.slot is not None:
            child.slot.spawned(process, "adopted")
        else:
            self._journal.append("process", "adopted", facts_of(child, process.pid, process.start_ticks))
        say(f"adopted {child.name}, pid {process.pid}", child.context)
        if child.role in STORING_ROLES:
            process.send_signal(signal.SIGHUP)

    # Leaving

    def _on_signal(self, number: int) -> None:
        self._interrupts += number == signal.SIGINT
        if self._stages is None:
            say(f"{signal.Signals(number).name}: stopping")
            self._stop()
        elif self._interrupts > 1:  # somebody at a terminal does not want to wait
            for child in self.children:
                if self._stages[:1] == [child.role]:
                    self._kill(child)

    def _stop(self) -> None:
        if self.succession is not None:
            self.succession.fail("it is stopping")
        super()._stop()

    def _leave(self) -> None:
        """Leave nothing behind."""
        self.control.close()
        if self._segment_watch is not None:
            self._segment_watch.close()
        listeners = [path for child in self.children for path in child.store.listening_at()]
        for child in self.children:
            child.close()
            if child.preloads_at is not None:
                child.preloads_at.unlink(missing_ok=True)
        for path in listeners:
            remove_dead_socket(path)
        about = {"process": "keeper", "pid": os.getpid(), "exit_code": int(self._failed), "signal": None}
        self._journal.append("process", "exited", about)
        self._journal.close()
        self.loop.close()
        self.state.remove()

    # Telling and being told

    def _answer(self, request: dict[str, Any]) -> dict[str, Any] | Later:
        match request:
            case {"status": True}:
                children = [child.facts() for child in self.children]
                return {"pid": os.getpid(), "release": VERSION, "node": self.spec.node, "children": children}
            case {"reexec": True}:
                return self._succeed(str(request.get("python", sys.executable)))
            case {"restart": str(name)}:
                return self._order(self._named(name), request)
            case {"stop": True}:
                self.loop.after(0, self._stop)
                return {"ok": True}
            case {"stop": str(name)}:
                child = self._named(name)
                if child.slot is not None:
                    child.slot.stop()
                self._end(child, resumes=False)
                return {"ok": True}
        raise ValueError('a request is {"status": true}, {"restart": NAME, "cause": CAUSE} or {"stop": NAME or true}')

    def _succeed(self, python: str) -> Later:
        """Go on as the program that is installed for an interpreter now."""
        if self._stages is not None or self.succession is not None:
            raise ValueError("the keeper is " + ("stopping" if self._stages is not None else "being replaced already"))
        later = Later()
        try:
            self.succession = Succession(self, later, python)
        except OSError as error:
            raise ValueError(f"the new program cannot be tried: {error}") from error
        return later

    def _order(self, child: Child, request: dict[str, Any]) -> dict[str, Any]:
        if self._stages is not None:
            raise ValueError("the keeper is stopping")
        if child.slot is not None:
            cause = request.get("cause")
            if cause not in ORDERED_CAUSES:
                raise ValueError(f"a restart needs a cause, one of {', '.join(ORDERED_CAUSES)}; found {cause!r}")
            fault = {key: request[key] for key in ("fault_ns", "fault_clock") if key in request}
            child.slot.order(cause, **fault)
        self._end(child, resumes=True, hangs=request.get("cause") == "hang")
        return {"ok": True, "episode": child.slot.episode if child.slot else None}

    def _named(self, name: str) -> Child:
        for child in self.children:
            if child.name == name:
                return child
        raise ValueError(f"there is no {name!r} here, only {', '.join(child.name for child in self.children)}")

    def _tick(self) -> None:
        self._manager.alive()
        self._journal.flush()
        for child in self.children:
            child.tick()
        if os.getpid() == 1 or self._residents:
            ours = [child.process.pid for child in self.children if child.process]
            reap_strangers([*ours, self.succession.trial.pid] if self.succession else ours)

    def _watch_segments(self) -> None:
        """Hear of engines' shared memory between the ticks: who is killed at once must not leave it behind."""
        if any(child.slot for child in self.children):
            try:
                self._segment_watch = SegmentWatch(self.loop, self._note_segments)
            except OSError as error:
                say(f"shared memory is noted every {TICK_S:g} s only, since nobody tells of it: {error}")

    def _note_segments(self) -> None:
        for child in self.children:
            child.note_segments()

    def _repeat(self, seconds: float, callback: Callable[[], None]) -> None:
        def again() -> None:
            callback()
            self.loop.after(seconds, again)

        self.loop.after(seconds, again)
