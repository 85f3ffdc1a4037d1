"""The lives of a keeper's children: how they start, what their ends lead to, the end of all. Standard library only."""

import os
import signal
import time
from typing import Any, Final

from weightcache.journal import Context, Journal, boottime_ns
from weightcache.keeper.child import STORING_ROLES, Child
from weightcache.keeper.console import say
from weightcache.keeper.handover import Handover, set_passing
from weightcache.keeper.launch import raise_descriptor_limit
from weightcache.keeper.loop import Loop
from weightcache.keeper.notify import NotifySocket
from weightcache.keeper.preloaded import become_subreaper, socket_of
from weightcache.keeper.session import SessionEnd
from weightcache.keeper.slot import Slot
from weightcache.keeper.spec import ChildSpec, KeeperSpec
from weightcache.keeper.state import KeeperState
from weightcache.paths import private_dir
from weightcache.process import Exit
from weightcache.sdnotify import Notifier

HOLD_S: Final = 1.0
"""How often a resident process that waits for recoveries to be over is asked about."""
STOPPED_LOOK_S: Final = 0.5
"""How often a child that is to end is asked about: stopped by a signal it would never hear that."""
STOP_ORDER: Final = ("gate", "other", "engine", "daemon")
ARENA: Final = "arena-"
"""How the daemon's names for descriptors of weights begin."""
LAST_LINES: Final = 20
"""Lines of output shown when an engine is given up."""


class Lives:
    """Children, and the loop that hears of them.

    Args:
        spec: what to run.
        handover: what an earlier program in this process leaves, None for a keeper that starts.

    Raises:
        ConfigError: the runtime or state folder cannot be used, or has a keeper already.
    """

    def __init__(self, spec: KeeperSpec, handover: Handover | None) -> None:
        if handover is not None:
            set_passing(handover.descriptors, False)
        self.spec = spec
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
        self.children = [self._child(child, handover) for child in spec.children]
        self._residents = self._arrange_residents()

    def _arrange_residents(self) -> dict[str, Child]:
        """The processes that engines are forked from, by name, for engines that have one."""
        engines = [child for child in self.children if child.spec.preload]
        if engines:
            become_subreaper()
        for child in engines:
            child.preloads_at = socket_of(self.spec.runtime_dir, child.spec.preload or "")
        names = {child.spec.preload for child in engines}
        return {child.name: child for child in self.children if child.name in names}

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
            self._journal.append("process", "spawned", facts_of(child, process.pid, process.start_ticks))
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
        if child.slot is not None and self.spec.closes_episodes and not child.ordered:  # else it says so once more
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
            about = {**facts_of(child, pid, ticks), "exit_code": status.code, "signal": status.signal}
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
            say(f"removed what {child.name} left behind: {', '.join(removed)}")
        if self._stages is not None:
            self._stop_next()

    def _next(self, child: Child, *, at_least_s: float = 0.0) -> None:
        """Decide what follows the end of a child: nothing, or another start after a pause."""
        slot = child.slot
        if self._stages is not None or (child.ordered and not child.resumes):
            child.state = "stopped"
            if slot is not None:
                slot.stop()  # once more: the gate may have found a fault while its engine was ending
        elif child.ordered:
            if slot is not None:
                slot.end("detect")
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

    def _end(self, child: Child, *, resumes: bool, hangs: bool = False) -> None:
        """Tell a child to end, and, if it resumes, start it again then. One that hangs is not waited for."""
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
        self._wait(child, 0 if hangs else child.spec.stop_s)

    def _wait(self, child: Child, left_s: float) -> None:
        """Let a child end by itself, but for one that cannot: a signal may stop it at any moment."""
        assert child.process is not None
        if left_s <= 0 or child.process.stopped:
            self._kill(child)
            return
        pause_s = min(left_s, STOPPED_LOOK_S)
        child.timer = self.loop.after(pause_s, lambda: self._wait(child, left_s - pause_s))

    def _kill(self, child: Child) -> None:
        if child.process is not None:
            say(f"{child.name} has not ended after SIGTERM and is killed", child.context)
            child.process.send_signal(signal.SIGKILL)

    def _stop(self) -> None:
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

    def _echo(self) -> None:
        for child in self.children:
            if child.slot is not None and child.output is not None:
                child.output.show(1)

    def _save(self) -> None:
        try:
            self.state.save(self.spec.node, [child.record() for child in self.children])
        except OSError as error:
            say(f"a successor would not know of the present children: {error}")


def facts_of(child: Child, pid: int, start_ticks: int) -> dict[str, Any]:
    return {"process": child.role, "pid": pid, "start_ticks": start_ticks}
