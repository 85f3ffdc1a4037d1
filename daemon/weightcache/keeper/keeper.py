"""The keeper itself: its children's lives, from taking over to leaving. Standard library only."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from weightcache.journal import Context, Journal, boottime_ns
from weightcache.keeper.child import STORING_ROLES, Child
from weightcache.keeper.console import say
from weightcache.keeper.control import ControlServer, Later
from weightcache.keeper.fdstore import remove_dead_socket
from weightcache.keeper.handover import Handover
from weightcache.keeper.launch import raise_descriptor_limit
from weightcache.keeper.loop import Loop
from weightcache.keeper.notify import NotifySocket
from weightcache.keeper.preloaded import become_subreaper, socket_of
from weightcache.keeper.session import SessionEnd
from weightcache.keeper.slot import ORDERED_CAUSES, Slot
from weightcache.keeper.spec import ChildSpec, KeeperSpec
from weightcache.keeper.state import KeeperState
from weightcache.keeper.succession import Succession
from weightcache.paths import private_dir
from weightcache.process import Exit, Process, reap_strangers
from weightcache.sdnotify import Notifier
from weightcache.version import VERSION

TICK_S: Final = 5.0
HOLD_S: Final = 1.0
"""How often a resident process that waits for recoveries to be over is asked about."""
ECHO_S: Final = 0.2
STOP_ORDER: Final = ("gate", "other", "engine", "daemon")
ARENA: Final = "arena-"
"""How the daemon's names for descriptors of weights begin."""
_SOON_S: Final = 0.001
LAST_LINES: Final = 20
"""Lines of output shown when an engine is given up."""


class Keeper:
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
        self.file = file
        self.spec = spec = KeeperSpec.load(file)
        self._handover = handover
        self._output_dir = private_dir(private_dir(spec.state_dir) / "output")
        lock = handover.lock if handover else None
        self.state = KeeperState(spec.runtime_dir, [child.name for child in spec.children], lock)
        limit = raise_descriptor_limit()
        self.open_files = handover.open_files if handover else limit
        self.loop = Loop()
        self._journal = Journal(spec.journal, Context(spec.node))
        self._manager = Notifier.from_environment()
        self._stages: list[str] | None = None
        self._failed = False
        self._interrupts = 0
        self.succession: Succession | None = None
        self.children = [self._child(child, handover) for child in spec.children]
        self._residents = self._arrange_residents()

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
        self._manager.ready(f"{len(self.children)} processes")
        self._repeat(TICK_S, self._tick)
        if self.spec.foreground:
            self._repeat(ECHO_S, self._echo)
        self.loop.run()
        self._leave()
        return int(self._failed)

    def _arrange_residents(self) -> dict[str, Child]:
        """The processes that engines are forked from, by name, for engines that have one."""
        engines = [child for child in self.children if child.spec.preload]
        if engines:
            become_subreaper()
        for child in engines:
            child.preloads_at = socket_of(self.spec.runtime_dir, child.spec.preload or "")
        names = {child.spec.preload for child in engines}
        return {child.name: child for child in self.children if child.name in names}

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
            if record.name not in known and record.pid is not None:
                known[record.name] = self._child(ChildSpec(record.name, record.role, ("true",)), handover)
                retired.append(known[record.name])
            if record.name in known:
                known[record.name].inherited = record
        self.children += retired
        for child in self.children:
            if not child.handed:
                child.ordered = child in retired
                if child.slot is not None:
                    child.slot.resume()
            self._resume(child)
        for child in retired:
            if child.slot is not None:
                child.slot.abandon("stopped")
            if child.process is not None:
                child.ordered = False
                self._end(child, resumes=False)
        if handover is not None:
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
            self._journal.append("process", "adopted", _about(child, process.pid, process.start_ticks))
        say(f"adopted {child.name}, pid {process.pid}", child.context)
        if child.role in STORING_ROLES:
            process.send_signal(signal.SIGHUP)

    def _child(self, spec: ChildSpec, handover: Handover | None) -> Child:
        slot = Slot(spec, self._journal) if spec.role == "engine" else None
        handed = handover.children.get(spec.name) if handover else None
        socket = NotifySocket(self.state.notify_path(spec.name), handed["notify"] if handed else None)
        child = Child(spec, self.loop, socket, slot)
        if handed is not None:
            child.take_back(handed)
        child.listen(self._on_ready)
        return child

    # Starting

    def _start(self, child: Child) -> None:
        child.cancel_timer()
        if child.name in self._residents and any(it.slot.is_open for it in self.children if it.slot):
            # Its imports would compete with a start that somebody waits for.
            child.state, child.timer = "waiting", self.loop.after(HOLD_S, lambda: self._start(child))
            return
        child.state, child.starts, child.adopted, child.ordered = "starting", child.starts + 1, False, False
        if child.slot is not None:
            child.slot.start(self._holds_weights())
        try:
            context = child.slot.context if child.slot else self._journal.context
            environment = self.spec.environment(child.spec, context, self.state.notify_path(child.name))
            process = child.fork(environment, self._output_dir, self.open_files)
        except OSError as error:  # no room for another process, descriptor or file
            child.error = f"cannot start: {error}"
            say(f"{child.name} {child.error}", child.context)
            if child.slot is not None:
                child.slot.not_started(child.error)
            self._next(child, at_least_s=1.0)
            return
        self._save()
        if child.slot is not None:
            child.slot.spawned(process, **child.how)
        else:
            self._journal.append("process", "spawned", _about(child, process.pid, process.start_ticks))
        assert child.launch is not None
        self.loop.watch(child.launch, lambda: self._on_exec(child))
        self.loop.watch(process, lambda: self._on_exit(child))
        child.launch.go()

    def _holds_weights(self) -> bool | None:
        """Whether weights are in keeping here; None where no weight cache is this keeper's child."""
        daemons = [child for child in self.children if child.role == "daemon"]
        return any(child.store.holds(ARENA) for child in daemons) if daemons else None

    def _on_exec(self, child: Child) -> None:
        assert child.launch is not None
        failure = child.launch.outcome()
        self.loop.unwatch(child.launch)
        child.launch.close()
        child.launch = None
        if failure is not None:
            child.error = f"cannot execute {child.spec.argv[0]}: {failure.strerror}"
            return
        if child.slot is not None:
            child.slot.end("spawn")
        if child.state == "starting":
            child.state = "running"

    def _on_ready(self, child: Child) -> None:
        first, child.ready = not child.ready, True
        if child.slot is not None and self.spec.closes_episodes:
            child.slot.ready()
        if first and child.adopted and child.role in STORING_ROLES and child.process is not None:
            child.process.send_signal(signal.SIGHUP)  # the one at adoption came before it could hear
        self._save()

    # Ending

    def _on_exit(self, child: Child) -> None:
        at_ns = boottime_ns()
        process = child.process
        assert process is not None
        self.loop.unwatch(process)
        child.hear()  # what it stored before it died
        if child.launch is not None:
            self._on_exec(child)
        self._ended(child, process.pid, process.start_ticks, at_ns)

    def _ended(self, child: Child, pid: int, ticks: int, at_ns: int) -> None:
        """A child's process has ended; the rest of its session must follow before another can start."""
        child.state = "ending"
        child.cancel_timer()
        if child.slot is not None:
            child.litter.note(pid)
        SessionEnd(self.loop, pid, ticks, lambda stuck: self._cleared(child, stuck))
        status = child.process.reap() if child.process else Exit(None, None)
        child.last_exit = status
        if child.process is not None:
            child.process.close()
            child.process = None
        say(f"{child.name}, pid {pid}, ended {child.error or status}", child.context)
        if child.slot is not None:
            ordered = child.ordered or self._stages is not None
            child.slot.exited(pid, ticks, status, at_ns, ordered=ordered, error=child.error)
        else:
            about = {**_about(child, pid, ticks), "exit_code": status.code, "signal": status.signal}
            self._journal.append("process", "exited", about, at_ns=at_ns)
        if child.output is not None:
            child.output.keep_tail()

    def _cleared(self, child: Child, stuck: int) -> None:
        child.leader = None
        if stuck:
            say(f"{child.name}: {stuck} of its processes do not die; going on without waiting for them", child.context)
        if self.spec.foreground:
            self._echo()
        self._next(child)
        if removed := child.litter.clear():  # not before the start that somebody waits for
            say(f"removed shared memory that {child.name} left behind: {', '.join(removed)}")
        if self._stages is not None:
            self._stop_next()

    def _next(self, child: Child, *, at_least_s: float = 0.0) -> None:
        """Decide what follows the end of a child: nothing, or another start after a pause."""
        slot = child.slot
        if self._stages is not None or (child.ordered and not child.resumes):
            child.state = "stopped"
        elif child.ordered:
            self._start(child)
        elif slot is None:
            self._start_after(child, max(at_least_s, child.pause_s()))
        elif slot.hopeless:
            self._give_up(child)
        else:
            slot.end("detect")
            pause = max(at_least_s, slot.backoff_s())
            if pause:
                slot.begin("backoff")
            self._start_after(child, pause)
        self._save()

    def _start_after(self, child: Child, seconds: float) -> None:
        if not seconds:
            self._start(child)
            return
        child.state = "waiting"
        child.next_start = time.monotonic() + seconds

        def due() -> None:
            if child.slot is not None:
                child.slot.end("backoff")
            self._start(child)

        child.timer = self.loop.after(seconds, due)

    def _give_up(self, child: Child) -> None:
        slot = child.slot
        assert slot is not None
        child.state = "failed"
        lines = b"".join(child.output.tail(LAST_LINES) if child.output else []).decode(errors="replace").rstrip()
        last = f"; the last lines of {child.output.path if child.output else ''}:\n{lines}" if lines else " in silence"
        why = f"{slot.why_hopeless(child.last_exit)}. It ended {child.error or child.last_exit}"
        say(f"{child.name} is given up: {why}{last}", child.context)
        slot.abandon("restarts_exhausted" if child.last_exit.code != os.EX_CONFIG else "configuration")
        if self.spec.foreground:
            self._failed = True
            self._stop()

    def _end(self, child: Child, *, resumes: bool) -> None:
        """Tell a child to end, and, if it resumes, start it again then."""
        told, child.ordered, child.resumes = child.ordered, True, resumes
        if child.process is None:
            child.cancel_timer()
            if child.state != "ending":
                self._next(child)
            return
        if told:
            return
        child.state = "ending"
        child.process.terminate_group()
        child.timer = self.loop.after(child.spec.stop_s, lambda: self._kill(child))

    def _kill(self, child: Child) -> None:
        if child.process is not None:
            say(f"{child.name} has not ended after SIGTERM and is killed", child.context)
            child.process.send_signal(signal.SIGKILL)

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
        self._manager.stopping()
        for child in self.children:
            if child.slot is not None:
                child.slot.abandon("stopped")
        self._stages = list(STOP_ORDER)
        self._stop_next()

    def _stop_next(self) -> None:
        """End the children stage by stage; called again whenever one has ended."""
        while self._stages:
            stage = [child for child in self.children if child.role == self._stages[0] and not child.at_rest]
            for child in stage:
                self._end(child, resumes=False)
            if any(not child.at_rest for child in stage):
                return
            self._stages.pop(0)
        self.loop.stop()

    def _leave(self) -> None:
        """Leave nothing behind."""
        self.control.close()
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
                    child.slot.abandon("stopped")
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
        self._end(child, resumes=True)
        return {"ok": True, "episode": child.slot.episode if child.slot else None}

    def _named(self, name: str) -> Child:
        for child in self.children:
            if child.name == name:
                return child
        raise ValueError(f"there is no {name!r} here, only {', '.join(child.name for child in self.children)}")

    def _tick(self) -> None:
        self._manager.alive()
        for child in self.children:
            child.tick()
        if os.getpid() == 1 or self._residents:
            ours = [child.process.pid for child in self.children if child.process]
            reap_strangers([*ours, self.succession.trial.pid] if self.succession else ours)

    def _echo(self) -> None:
        for child in self.children:
            if child.slot is not None and child.output is not None:
                child.output.show(1)

    def _repeat(self, seconds: float, callback: Callable[[], None]) -> None:
        def again() -> None:
            callback()
            self.loop.after(seconds, again)

        self.loop.after(seconds, again)

    def _save(self) -> None:
        try:
            self.state.save(self.spec.node, [child.record() for child in self.children])
        except OSError as error:
            say(f"a successor would not know of the present children: {error}")


def _about(child: Child, pid: int, start_ticks: int) -> dict[str, Any]:
    return {"process": child.role, "pid": pid, "start_ticks": start_ticks}
