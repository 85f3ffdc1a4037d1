"""The drill: real faults on a live node, on purpose, each recovery waited for and read from the journal.

An engine's fault is journaled as an episode of cause ``drill`` before the signal is sent; everything after that is done
by those who do it always. What makes a recovery fast or slow is untouched, so its numbers are those of a real fault.
"""

import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, NamedTuple

from readmit.daemon import ask_daemon
from readmit.drill_report import DaemonRecovery, DrillReport, account
from readmit.where import Where
from weightcache import messages
from weightcache.episodes import Episode, Replay
from weightcache.errors import CacheMiss, ConfigError
from weightcache.journal import Context, Journal, boottime_ns, new_episode_id
from weightcache.keeper.control import ask
from weightcache.process import Process

SIGNALS: Final = {"sigkill": signal.SIGKILL, "sigabrt": signal.SIGABRT, "sigstop": signal.SIGSTOP}
LIMIT_S: Final = 1800.0
"""How long a recovery is waited for: three times the slowest published cold start."""
QUIET_S: Final = 300.0
"""Traffic less than this ago is production traffic."""
TAKEOVER_LIMIT_S: Final = 60.0
"""How long after the engine's recovery a takeover is looked for, which as a rule was written down before."""
_LOOK_S: Final = 0.05


class Fault(StrEnum):
    """What happens: a signal to the engine, SIGKILL to the daemon, or to both at once."""

    SIGKILL = "sigkill"
    SIGABRT = "sigabrt"
    SIGSTOP = "sigstop"
    DAEMON = "daemon"
    BOTH = "both"


class DrillPath(StrEnum):
    """How recoveries are meant to get their weights."""

    HIT = "hit"
    MISS = "miss"
    OFF = "off"
    STANDBY = "standby"


class Order(NamedTuple):
    """What is to be done, to which slot: the one that serves, if None. Times are in seconds."""

    kills: int
    fault: Fault
    path: DrillPath
    slot: str | None = None
    pause_s: float = 1.0
    limit_s: float = LIMIT_S


@dataclass(frozen=True)
class Traffic:
    """What the gate says of its clients, and which slot serves them; ``problem`` is why it does not say."""

    last_request_s: float | None = None
    problem: str | None = None
    serving: str | None = None

    @property
    def quiet(self) -> bool:
        """Whether it is known that nobody would be hurt."""
        return self.problem is None and (self.last_request_s is None or self.last_request_s > QUIET_S)

    def __str__(self) -> str:
        if self.problem is not None:
            return self.problem
        return "none" if self.last_request_s is None else f"a request {self.last_request_s:.0f} s ago"


class Drill:
    """One drill on one node.

    Args:
        where: the node's folders.
        cache_socket: its weight cache's socket.
        order: what is to be done.
        traffic: says what traffic there is now.
        tell: told what goes on.

    Raises:
        ConfigError: ``drill``, when this node cannot have this drill; ``no_keeper``.
    """

    def __init__(
        self,
        where: Where,
        cache_socket: Path,
        order: Order,
        traffic: Callable[[], Traffic],
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.order = order
        self._where = where
        self._socket = cache_socket
        self._traffic = traffic
        self._tell = tell
        keeper = ask(where.runtime_dir, {"status": True})
        self._journal = Journal(where.journal, Context(keeper["node"]))
        self._replay = Replay()
        self._replay.catch_up(self._journal)
        self.slot = self._check(keeper["children"])

    def run(self, *, yes_really: bool = False) -> DrillReport:
        """All of its faults; returns early, with what was measured, when a recovery fails or traffic begins.

        Raises:
            ConfigError: ``drill_traffic``, unless ``yes_really``; the node has changed meanwhile.
        """
        episodes: list[str] = []
        daemons: list[DaemonRecovery] = []
        stopped, first = "", self.slot
        for number in range(1, self.order.kills + 1):
            traffic = self._traffic()
            if not (traffic.quiet or yes_really):
                if number == 1:
                    raise _refused_for(traffic)
                stopped = f"traffic has begun: {traffic}"
                break
            if number > 1:
                time.sleep(self.order.pause_s)
            self._tell(f"{number} of {self.order.kills}: {deed(self.order.fault, self.slot)}")
            stopped = self._once(episodes, daemons)
            if stopped:
                break
        return account(self._journal, self.order._asdict(), first, episodes, daemons, stopped)

    def _once(self, episodes: list[str], daemons: list[DaemonRecovery]) -> str:
        """One fault and its recovery; returns why no other may follow, empty when one may."""
        children = self._children()
        daemon = children.get("daemon")
        if self.order.path == "miss":
            self._release()
        before = self._resident() if self.order.fault in ("daemon", "both") else {}
        killed_ns = boottime_ns()
        with _held(children[self.slot]) as engine:
            if self.order.fault == "daemon":
                assert daemon is not None
                self._kill_daemon(daemon)
            else:
                episodes.append(self._fail(engine))
                if self.order.fault == "both":
                    assert daemon is not None
                    self._kill_daemon(daemon)
            if before:
                daemons.append(self._readopted(before, children[self.slot]["pid"], killed_ns))
                self._tell(f"the daemon serves again after {daemons[-1].seconds:.3f} s")
            if self.order.fault == "daemon":
                return "" if daemons[-1].whole else "the daemon did not come back whole"
            try:
                bad = self._recovered(episodes[-1], engine)
            finally:
                engine.send_signal(signal.SIGCONT)  # if nobody has killed it, it must not stay stopped
            return bad or (self._taken_over(episodes) if self.order.path == "standby" else "")

    # Faults

    def _fail(self, engine: Process) -> str:
        """Open an episode, then do to the engine what it says; returns its id."""
        episode, fault_ns = new_episode_id(), boottime_ns()
        last = self._replay.slots[self.slot].last
        where = Context(self._journal.context.node, self.slot, episode)
        facts = {"cause": "drill", "fault_boottime_ns": fault_ns, "fault_clock": "command"}
        facts |= {"previous": last.id if last else None, "fault": self.order.fault}
        self._journal.append("episode_open", "drill", facts, at_ns=fault_ns, context=where)
        self._journal.append("phase_begin", "detect", at_ns=fault_ns, context=where._replace(attempt=1))
        engine.send_signal(SIGNALS.get(self.order.fault, signal.SIGKILL))
        return episode

    def _kill_daemon(self, child: dict[str, Any]) -> None:
        with _held(child) as daemon:
            about = {"process": "daemon", "pid": daemon.pid, "start_ticks": daemon.start_ticks, "cause": "drill"}
            self._journal.append("process", "killed", {**about, "signal": int(signal.SIGKILL)})
            daemon.send_signal(signal.SIGKILL)

    def _release(self) -> None:
        """Give up what the engine maps: its next start finds nothing, and publishes again."""
        leased = [it["generation"] for it in self._resident()["generations"] if self.slot in _leased_by(it)]
        for generation in leased:
            self._ask_daemon(messages.Release(generation=generation, force=True))

    # Recoveries

    def _recovered(self, episode_id: str, engine: Process) -> str:
        """Wait until an episode is over; returns what forbids going on."""
        deadline = time.monotonic() + self.order.limit_s
        told: str | None = None
        died = False
        while time.monotonic() < deadline:
            if died:
                time.sleep(_LOOK_S)
            elif select.select([engine], [], [], _LOOK_S)[0]:
                died = True
                where = Context(self._journal.context.node, self.slot, episode_id, 1)
                self._journal.append("phase_end", "detect", context=where)
            if self._journal.last_id() > self._replay.position:
                self._replay.catch_up(self._journal)
            episode = self._replay.episode(episode_id)
            if episode is None:
                continue
            if not episode.is_open:
                return self._judged(episode)
            phase = episode.phase.name if episode.phase else None
            if phase not in (None, told):
                told = phase
                self._tell(f"  {phase}, {episode.age_s(self._replay.clock.now()):.1f} s")
        return f"no correct answer within {self.order.limit_s:g} s of episode {episode_id}"

    def _taken_over(self, episodes: list[str]) -> str:
        """See which slot took over from the one that failed, and go on with that; returns what forbids going on."""
        failed = episodes[-1]
        deadline = time.monotonic() + TAKEOVER_LIMIT_S
        while time.monotonic() < deadline:
            self._replay.catch_up(self._journal)
            for event in self._journal.query("WHERE kind = 'episode_open' AND slot != ? ORDER BY id DESC", self.slot):
                if event.episode and event.attributes.get("instead_of", {}).get("episode") == failed:
                    episodes.append(event.episode)
                    taken = self._replay.episode(event.episode)
                    self._tell(f"{event.slot} took over" + (f" after {taken.total_s:.2f} s" if taken else ""))
                    self.slot = event.slot or self.slot
                    return ""
            time.sleep(_LOOK_S)
        return f"no slot took over from {self.slot} in episode {failed}"

    def _judged(self, episode: Episode) -> str:
        why = f", {episode.reason}" if episode.reason else ""
        self._tell(f"{episode.outcome} after {episode.total_s:.2f} s ({episode.path}{why})")
        return "" if episode.outcome == "ready" else f"episode {episode.id} ended {episode.outcome}"

    def _readopted(self, before: dict[str, Any], engine_pid: int, killed_ns: int) -> DaemonRecovery:
        """Wait until another daemon process serves what the killed one did."""
        deadline = time.monotonic() + self.order.limit_s
        after = before
        while time.monotonic() < deadline:
            try:
                after = self._resident()
            except CacheMiss:  # nobody listens yet, or the connection fell into the old one's death
                time.sleep(_LOOK_S / 10)
                continue
            if after["pid"] != before["pid"]:
                break
        seconds = (boottime_ns() - killed_ns) / 1e9
        found = after["generations"] if after["pid"] != before["pid"] else []
        generations = {it["generation"] for it in before["generations"]}
        # The lease of an engine that was killed with its daemon is not the daemon's to keep.
        dead = self.slot if self.order.fault == "both" else None
        leases = {
            it["name"] for generation in before["generations"] for it in generation["leases"] if it["slot"] != dead
        }
        return DaemonRecovery(
            seconds=seconds,
            generations=len(generations),
            generations_kept=len(generations & {it["generation"] for it in found}),
            leases=len(leases),
            leases_kept=len(leases & {it["name"] for generation in found for it in generation["leases"]}),
            engine_kept=self._children()[self.slot]["pid"] == engine_pid,
        )

    # The node

    def _check(self, children: list[dict[str, Any]]) -> str:
        engines = [child["name"] for child in children if child["role"] == "engine"]
        roles = {child["role"] for child in children}
        order = self.order
        slot = order.slot or (self._serving(engines) if len(engines) > 1 else next(iter(engines), None))
        if order.path == "standby" and order.slot and order.kills > 1:
            raise _impossible("after the first fault another slot serves", "--kills 1, or no --slot", order.slot)
        if slot is None or slot not in engines:
            raise _impossible("there is no such slot" if order.slot else "which slot is not clear", engines, slot)
        known = self._replay.slots.get(slot)
        if known is None or known.attempt is None:
            raise _impossible(f"slot {slot} has not run yet", "an engine that answers", "none")
        if known.episode is not None:
            raise _impossible(f"slot {slot} is recovering", "an engine that answers", f"episode {known.episode.id}")
        if order.fault in ("daemon", "both") and "daemon" not in roles:
            raise _impossible("there is no weight cache daemon here to kill", "a node with [cache] enabled", "none")
        if order.fault == "sigstop" and "gate" not in roles and self._traffic().problem is not None:
            raise _impossible("nobody would notice a stopped engine", "a gate, which finds hanging engines", "none")
        if order.fault == "daemon":
            if order.path in ("miss", "standby"):
                raise _impossible("a daemon's death begins no recovery that had a path", "no --path", order.path)
            return slot
        if order.path == "miss":
            self._check_daemon()
        took = known.attempt.path
        if order.path != "standby" and (order.path == "off") != (took == "off"):
            wanted = "with the weight cache off" if order.path == "off" else "with the weight cache"
            raise _impossible(f"the command of slot {slot} does not lead to path {order.path}", wanted, took)
        if order.path == "standby":
            ready = [name for name in engines if name != slot and self._state(name) == "ready"]
            if not ready:
                raise _impossible("no other slot stands by", "two slots that are ready", f"only {slot}")
        return slot

    def _check_daemon(self) -> None:
        """A daemon answers, here or in a container beside this one."""
        try:
            self._resident()
        except CacheMiss as miss:
            raise _impossible("nothing is resident that could be missed", "a weight cache daemon", miss) from miss

    def _serving(self, engines: list[str]) -> str | None:
        """The slot that the gate sends requests to; the first that is ready, where the gate does not say."""
        return self._traffic().serving or next((name for name in engines if self._state(name) == "ready"), None)

    def _state(self, slot: str) -> str | None:
        known = self._replay.slots.get(slot)
        return known.state if known else None

    def _children(self) -> dict[str, dict[str, Any]]:
        return {child["name"]: child for child in ask(self._where.runtime_dir, {"status": True})["children"]}

    def _resident(self) -> dict[str, Any]:
        return self._ask_daemon(messages.Status())

    def _ask_daemon(self, request: messages.Request) -> dict[str, Any]:
        return ask_daemon(self._socket, request, self._journal.context.node)


def deed(fault: str, slot: str) -> str:
    """What is done to whom."""
    victim = {"daemon": "the daemon", "both": f"{slot} and the daemon"}.get(fault, f"slot {slot}")
    return f"{'SIGKILL' if fault in ('daemon', 'both') else fault.upper()} to {victim}"


@contextmanager
def _held(child: dict[str, Any]) -> Iterator[Process]:
    """A child's process, held by pidfd so that a signal hits it or nobody."""
    process = Process.open(child["pid"], child["start_ticks"]) if child["pid"] else None
    if process is None:
        raise _impossible(f"{child['name']} does not run", "a process", child["state"])
    try:
        yield process
    finally:
        process.close()


def _leased_by(generation: dict[str, Any]) -> Iterator[str | None]:
    return (lease["slot"] for lease in generation["leases"])


def _refused_for(traffic: Traffic) -> ConfigError:
    return ConfigError(
        "drill_traffic",
        "this node may have clients, and a drill kills what serves them",
        expected=f"a gate without a request for {QUIET_S:.0f} s",
        found=str(traffic),
        remedy="Take the node out of the load balancer and wait, or say --yes-really",
    )


def _impossible(problem: str, expected: object, found: object) -> ConfigError:
    wanted = ", ".join(expected) if isinstance(expected, list) else str(expected)
    return ConfigError(
        "drill",
        f"this drill cannot be held: {problem}",
        expected=wanted or "an engine",
        found=str(found),
        remedy="readmit status shows what runs here; --slot names one",
    )
