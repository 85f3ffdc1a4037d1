"""A slot: the place where one engine runs, its episodes in the journal, and when to try again.

What is known of past attempts is read from the journal, where the gate writes too: it is the gate that closes an
episode, after correct answers. Standard library only.
"""

import os
import sqlite3
import time
from pathlib import Path
from typing import Any, Final

from weightcache.errors import ConfigError
from weightcache.journal import Context, Event, Journal, boot_id, boottime_ns, new_episode_id
from weightcache.keeper.console import say
from weightcache.keeper.spec import ChildSpec
from weightcache.keeper.state import ChildRecord
from weightcache.keeper.survey import survey
from weightcache.process import Exit, Process, oom_counter, oom_kills
from weightcache.vocabulary import CAUSES

ORDERED_CAUSES: Final = tuple(cause for cause in CAUSES if cause not in ("first_start", "oom_kill", "node_reboot"))
"""Causes that an operator or the gate may give for a restart; the others are found, not given."""
_SIGKILL: Final = 9


class OomWatch:
    """Proof, or not, that the kernel killed a process for memory: its cgroup's counter before and after."""

    def __init__(self) -> None:
        self._counter: Path | None = None
        self._before: int | None = None

    def watch(self, counter: Path | None) -> None:
        """Watch another process, by the counter of its cgroup."""
        self._counter = counter
        self.look()

    def hand_over(self) -> list[str | int | None]:
        """The counter's file, and what it was when it was noted; what `take_back` takes."""
        return [str(self._counter) if self._counter else None, self._before]

    def take_back(self, handed: list[Any]) -> None:
        """Go on with what an earlier program of this process watched."""
        self._counter, self._before = Path(handed[0]) if handed[0] else None, handed[1]

    def look(self) -> None:
        """Note the counter. Called often, so that kills of long ago prove nothing."""
        self._before = oom_kills(self._counter)

    def verdict(self, exit_: Exit) -> tuple[str, dict[str, Any]]:
        """The cause of a death and the evidence for it."""
        after = oom_kills(self._counter)
        if self._before is None or after is None or after <= self._before:
            return "crash", {}
        evidence = {"oom_kills_before": self._before, "oom_kills_after": after, "counter": str(self._counter)}
        # A kill in the cgroup without SIGKILL to this very process hit another one: a fact to show, not a proof.
        return "oom_kill" if exit_.signal == _SIGKILL else "crash", evidence


class Slot:
    """One engine's place.

    Args:
        spec: its child spec; ``limit``, ``window_s`` and ``backoff_s`` are its policy.
        journal: the keeper's journal.

    ``episode`` is the latest episode's id, None before the first; ``attempt`` the number of its latest attempt.
    """

    def __init__(self, spec: ChildSpec, journal: Journal) -> None:
        self.spec = spec
        self.episode: str | None = None
        self.attempt = 0
        self.oom = OomWatch()
        self.hopeless = False
        """The policy says to give up, or the engine itself: it exits with EX_CONFIG when trying again cannot help."""
        self._journal = journal
        self._faults: list[int] = []
        """Times, boottime in nanoseconds, of this episode's unplanned ends of the engine."""
        self._over = True
        self._opened_ns, self._opened_boot = 0, boot_id()
        self._opened_after = 0
        """An event id below all of the episode's: no recovery waits for a search through all before it."""

    @property
    def context(self) -> Context:
        """Where the events of the present attempt happen; also the engine's environment."""
        return Context(self._journal.context.node, self.spec.name, self.episode, self.attempt or None)

    @property
    def is_open(self) -> bool:
        """Whether the slot is in an episode; the gate may have closed the keeper's, or opened one of its own."""
        self._merge()
        opened = self._find("kind = 'episode_open'")
        if opened is not None and opened.boot_id == boot_id() and opened.boottime_ns > self._opened_ns:
            self._take_up(opened)
        if not self._over:
            self._over = (
                self._find("kind = 'episode_close' AND episode = ? AND id > ?", self.episode, self._opened_after)
                is not None
            )
        return not self._over

    def resume(self, record: ChildRecord | None = None) -> None:
        """Read where the slot stands from the journal, and from its predecessor's record what that may not have got."""
        self._merge()
        opened = self._find("kind = 'episode_open'")
        if opened is None:
            return
        self._take_up(opened)
        started = self._find("kind = 'attempt_start' AND episode = ? AND id > ?", self.episode, self._opened_after)
        told = record.attempt if record is not None and record.episode == self.episode else None
        self.attempt = max(started.attempt or 0 if started else 0, told or 0)
        fault = opened.attributes.get("fault_boottime_ns")
        if fault is not None and opened.attributes.get("cause") in ("crash", "oom_kill"):
            self._faults.append(fault)
        ended = "kind = 'attempt_end' AND episode = ? AND name = 'crashed' AND id > ?"
        ends = self._all(ended, self.episode, self._opened_after)
        self._faults += [event.boottime_ns for event in ends if event.boot_id == boot_id()]

    def hand_over(self) -> dict[str, Any]:
        """Where the slot stands, for another program in this process."""
        return {
            "episode": self.episode,
            "attempt": self.attempt,
            "hopeless": self.hopeless,
            "faults": self._faults,
            "over": self._over,
            "opened_ns": self._opened_ns,
            "opened_boot": self._opened_boot,
            "opened_after": self._opened_after,
            "oom": self.oom.hand_over(),
        }

    def take_back(self, handed: dict[str, Any]) -> None:
        """Stand where the earlier program of this process stood."""
        self.episode, self.attempt, self.hopeless = handed["episode"], handed["attempt"], handed["hopeless"]
        self._faults, self._over = handed["faults"], handed["over"]
        self._opened_ns, self._opened_boot = handed["opened_ns"], handed["opened_boot"]
        self._opened_after = handed.get("opened_after", 0)  # an earlier release does not hand it over
        self.oom.take_back(handed["oom"])

    def first_start(self) -> None:
        """The keeper starts and there is no engine: open an episode, unless one is open in this boot."""
        if self.is_open:
            if self._opened_boot == boot_id():
                self._end_attempt("crashed", reason="keeper_lost")
                return
            lost_ns, rebooted = self._end_with_boot(), True
        else:
            last = self._find("kind = 'process'")
            # Started in an earlier boot and never seen to end: what ended it was the end of that boot.
            rebooted = last is not None and last.boot_id != boot_id() and last.name not in ("exited", "stopped")
            lost_ns = self._boot_lost_ns() if rebooted else None
        if rebooted and lost_ns is not None:
            self._open("node_reboot", None, "last_event", fault_wall_ns=lost_ns)
        else:
            self._open("node_reboot" if rebooted else "first_start", boottime_ns(), "start")

    def order(self, cause: str, *, fault_ns: int | None = None, fault_clock: str = "command") -> None:
        """A restart was ordered: open an episode, or give up the attempt of the open one.

        Until the engine has ended, which `end` of ``detect`` says, nothing recovers yet.
        """
        at_ns = boottime_ns()
        if self.is_open:
            self._end_attempt("abandoned", reason=cause)
            self._faults = []
        else:
            at_ns = at_ns if fault_ns is None else fault_ns
            self._open(cause, at_ns, fault_clock)
        self.begin("detect", at_ns=at_ns)

    def exited(
        self, pid: int, start_ticks: int, exit_: Exit, at_ns: int, *, ordered: bool, error: str | None = None
    ) -> None:
        """The engine has ended.

        Args:
            pid: its process id.
            start_ticks: when it had started.
            exit_: how it ended.
            at_ns: boottime at which that was noticed.
            ordered: it was told to end; `order` or `abandon` has said why.
            error: why it never ran, when exec failed.
        """
        status = {"exit_code": exit_.code, "signal": exit_.signal}
        about = {"process": "engine", "pid": pid, "start_ticks": start_ticks, **status}
        if not exit_.known:
            about["status"] = "unknown: not a child of this keeper"
        if error:
            about["error"] = error
        if not self._told(pid, start_ticks):
            self._append("process", "exited", about, at_ns=at_ns)
        if ordered:
            return
        cause, evidence = self.oom.verdict(exit_)
        if not self.is_open:
            self._open(cause, at_ns, "exit", **evidence)
            self._count(at_ns)
        # A predecessor may have written down this death, and not lived to act on it.
        elif self._end_attempt("crashed", at_ns=at_ns, **status, **evidence) or not self._faults:
            self._count(at_ns)
        self.hopeless = self.hopeless or exit_.code == os.EX_CONFIG
        if not self.hopeless:
            self.begin("detect", at_ns=at_ns)

    def not_started(self, error: str) -> None:
        """The attempt that has begun got no process."""
        self._end_attempt("crashed", error=error)
        self._count(boottime_ns())

    def _count(self, fault_ns: int) -> None:
        oldest = fault_ns - self.spec.window_s * 1e9
        self._faults = [fault for fault in (*self._faults, fault_ns) if fault >= oldest]
        self.hopeless = 0 < self.spec.limit <= len(self._faults)

    def why_hopeless(self, exit_: Exit) -> str:
        """For people: why nobody tries again."""
        if exit_.code == os.EX_CONFIG:
            return "by its exit code, trying again cannot help"
        return f"it ended {len(self._faults)} times within {self.spec.window_s:g} s without becoming ready"

    def backoff_s(self) -> float:
        """Seconds to wait before the next attempt; the first after good service is at once."""
        pauses = self.spec.backoff_s
        return pauses[min(max(len(self._faults) - 1, 0), len(pauses) - 1)]

    def begin(self, phase: str, *, at_ns: int | None = None) -> None:
        """A phase begins of the attempt that comes next (or, for ``spawn``, that has begun)."""
        self._append("phase_begin", phase, at_ns=at_ns, attempt=self._number(phase))

    def end(self, phase: str) -> None:
        """A phase of the keeper's has ended."""
        self._append("phase_end", phase, attempt=self._number(phase))

    def start(self, resident: bool | None = None) -> None:
        """The next attempt begins; said before the fork.

        Args:
            resident: whether weights are held in memory, None where that is not known.
        """
        self.attempt += 1
        began_ns = boottime_ns()
        model = Path(self.spec.cwd or "", self.spec.model) if self.spec.model else None
        try:
            state = survey(model, {**os.environ, **self.spec.env}, resident=resident)
        except OSError as error:  # no room for another process: then the attempt itself will say so
            say(f"from what state attempt {self.attempt} starts is not known: {error}", self.context)
            state = None
        about = {"command": list(self.spec.argv), "starting_state": state}
        self._append("attempt_start", "", about, at_ns=began_ns)
        self.begin("spawn", at_ns=began_ns)

    def spawned(self, process: Process, name: str = "spawned", **how: str) -> None:
        """The engine's process exists (or, ``adopted``, is still there)."""
        about = {"process": "engine", "pid": process.pid, "start_ticks": process.start_ticks, **how}
        self._append("process", name, about)
        self.oom.watch(oom_counter(process.pid))

    def ready(self) -> None:
        """The engine says it is up and nobody will ask it questions: the episode ends, unverified."""
        if self.is_open:
            self._end_attempt("ready")
            self._close("ready", verified=False, generation=None)

    def abandon(self, reason: str) -> None:
        """Nobody will try again: end what is open."""
        if self.is_open:
            self._end_attempt("abandoned", reason=reason)
            self._close("abandoned", reason=reason)

    def stop(self) -> None:
        """The slot is stopped on purpose: end what is open, or say that it is meant no more where it was given up."""
        self.abandon("stopped")
        said = "(kind = 'episode_close' OR (kind = 'process' AND name = 'stopped'))"
        last = self._find(said)
        if last is not None and last.name == "abandoned" and last.attributes.get("reason") != "stopped":
            where = Context(self._journal.context.node, self.spec.name)
            self._journal.append("process", "stopped", {"process": "engine"}, context=where)

    def _take_up(self, opened: Event) -> None:
        self.episode, self.attempt = opened.episode, 0
        self._opened_ns, self._opened_boot = opened.boottime_ns, opened.boot_id
        self._opened_after = opened.id - 1
        self._faults, self._over = [], False

    def _end_with_boot(self) -> int | None:
        """End what an earlier boot left open, as of that boot's last sign of life; returns its Unix time."""
        lost_ns = self._boot_lost_ns()
        # By this boot's clock, which then is before 0.
        at_ns = None if lost_ns is None else lost_ns - (time.time_ns() - boottime_ns())
        self._end_attempt("crashed", at_ns=at_ns, reason="node_reboot")
        self._close("abandoned", at_ns=at_ns, reason="node_reboot")
        return lost_ns

    def _boot_lost_ns(self) -> int | None:
        """When an earlier boot was last heard of, in Unix time; None where none was."""
        try:
            last = self._journal.query("WHERE boot_id != ? ORDER BY id DESC LIMIT 1", boot_id())
        except sqlite3.Error as error:
            say(f"the journal cannot be read: {error}")
            return None
        return last[0].wall_ns if last else None

    def _open(self, cause: str, fault_ns: int | None, clock: str, **evidence: Any) -> None:
        previous, self.episode, self.attempt = self.episode, new_episode_id(), 0
        self._opened_ns, self._opened_boot = boottime_ns(), boot_id()
        self._opened_after = self._last_id()
        self._faults, self._over = [], False
        fault = {} if fault_ns is None else {"fault_boottime_ns": fault_ns}
        about = {"cause": cause, **fault, "fault_clock": clock, "previous": previous, **evidence}
        self._append("episode_open", cause, about, at_ns=self._opened_ns)

    def _close(self, outcome: str, *, at_ns: int | None = None, **about: Any) -> None:
        self._append("episode_close", outcome, about, at_ns=at_ns)
        self._over = True

    def _end_attempt(self, outcome: str, *, at_ns: int | None = None, **about: Any) -> bool:
        """End the present attempt; False if there is none, or somebody has ended it already."""
        condition = "kind = 'attempt_end' AND episode = ? AND attempt = ? AND id > ?"
        if not self.attempt or self._find(condition, self.episode, self.attempt, self._opened_after) is not None:
            return False
        self._append("attempt_end", outcome, about, at_ns=at_ns)
        return True

    def _told(self, pid: int, start_ticks: int) -> bool:
        """Whether the end of a process is in the journal already."""
        last = self._find("kind = 'process' AND name = 'exited'")
        return last is not None and (last.attributes.get("pid"), last.attributes.get("start_ticks")) == (
            pid,
            start_ticks,
        )

    def _number(self, phase: str) -> int:
        return self.attempt if phase == "spawn" else self.attempt + 1

    def _append(
        self,
        kind: str,
        name: str,
        attributes: dict[str, Any] | None = None,
        *,
        at_ns: int | None = None,
        attempt: int | None = None,
    ) -> None:
        number = self.attempt if attempt is None else attempt
        context = Context(self._journal.context.node, self.spec.name, self.episode, number or None)
        self._journal.append(kind, name, attributes, at_ns=at_ns, context=context)

    def _merge(self) -> None:
        """Have what a busy database sent to spools read as well: the gate may have closed the episode there."""
        try:
            self._journal.merge_spools()
        except (sqlite3.Error, OSError, ConfigError) as error:
            say(f"events wait outside the journal: {error}")

    def _last_id(self) -> int:
        try:
            return self._journal.last_id()
        except (sqlite3.Error, ConfigError) as error:
            say(f"the journal cannot be read: {error}")
            return 0

    def _find(self, condition: str, *values: object) -> Event | None:
        events = self._all(f"{condition} ORDER BY id DESC LIMIT 1", *values)
        return events[0] if events else None

    def _all(self, condition: str, *values: object) -> list[Event]:
        try:
            return self._journal.query(f"WHERE slot = ? AND {condition}", self.spec.name, *values)
        except sqlite3.Error as error:
            # A recovery does not wait for its own bookkeeping; replay tells a second end of an attempt from the first.
            say(f"the journal cannot be read: {error}")
            return []
