"""The books: restored from a snapshot, or rebuilt from what pruning left, they are what replaying everything gives."""

import json
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.fixtures.story import SECOND
from tests.weightcache.models import config

from weightcache.clock import Clock
from weightcache.episodes import Attempt
from weightcache.fingerprint import CacheConfig
from weightcache.journal import Event, Journal
from weightcache.journal.database import INSERT, connect
from weightcache.journal.snapshots import Snapshot
from weightcache.slo import Objectives
from weightcache.telemetry import Telemetry
from weightcache.telemetry.books import Books
from weightcache.vocabulary import CAUSES

RESIDENTS = SimpleNamespace(capacity=None, resident_bytes=0, leases=0, generations={}, claims=[], refused={})
FIELDS = config(tp_size=2, device_capability="sm_90").to_dict()
GPUS = {"g1": "GPU-1", "g2": "GPU-2"}
"""Where generations are, which have one identity."""
WARM = {"page_cache": "warm", "compile_cache": "warm", "kernel_cache": "warm"}
NO_STATE = ("_objectives", "_registry", "_state", "_step", "_wanted", "verdicts", "learned", "_closed_phases")


def everything(thing: object) -> Any:
    """All that an object holds, to any depth: a field that a snapshot forgets differs here."""
    if isinstance(thing, dict):
        return [(everything(key), everything(value)) for key, value in thing.items()]
    if isinstance(thing, str | int | float | None):
        return thing
    if isinstance(thing, set):
        return sorted(thing)
    if isinstance(thing, CacheConfig):
        return everything(thing.to_dict())
    if hasattr(thing, "__dict__"):
        skipped = (*NO_STATE, "episode") if isinstance(thing, Attempt) else NO_STATE
        return type(thing).__name__, [(k, everything(v)) for k, v in vars(thing).items() if k not in skipped]
    return [everything(item) for item in thing]  # type: ignore[attr-defined]


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Where two results of `everything` differ."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        pairs = zip(one, other, strict=True)
        return [it for place, pair in enumerate(pairs) for it in differences(*pair, f"{where}/{_label(one, place)}")]
    return [] if one == other else [f"{where}: {one} or {other}"]


def _label(of: Any, place: int) -> str:
    return of[place][0] if isinstance(of[place], tuple) and isinstance(of[place][0], str) else str(place)


def restored(books: Books) -> Books:
    """Through the text of a snapshot."""
    fresh = Books(Objectives())
    position, state = books.snapshot()
    fresh.restore(Snapshot(position, json.loads(json.dumps(state))))
    return fresh


def row(event: Event) -> tuple[Any, ...]:
    return (*event[1:-1], json.dumps(event.attributes))


class Histories(RuleBasedStateMachine):
    """A node's history, written to a real journal, with daemons that are killed, snapshots and pruning in between."""

    now = 0

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="books-"))
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(Clock, "now", lambda clock: self.now)
        self.patch.setattr(Clock, "to_wall", lambda clock, at_ns: at_ns)
        self.journal = Journal(self.folder / "journal.sqlite3", checkpoints=True)
        self.connection = connect(self.folder / "journal.sqlite3")
        self.boot, self.began, self.now = 1, 1_700_000_000 * SECOND, 1_700_000_000 * SECOND
        self.past: list[Event] = []
        self.late: list[Event] = []
        self.open: dict[str, str] = {}
        self.number = 0
        self.replayed, self.fed, self.closed = Books(Objectives()), 0, set[str]()
        self.highest: dict[Any, float] = {}
        self.start()

    def start(self) -> None:
        self.telemetry = Telemetry(self.journal, RESIDENTS, kept_days=0, environ={})

    def teardown(self) -> None:
        self.compare_everything()
        self.telemetry.close()
        self.connection.close()
        self.journal.close()
        self.patch.undo()
        shutil.rmtree(self.folder)

    def say(self, kind: str, name: str = "", *, slot: str | None = None, late: bool = False, **facts: Any) -> None:
        attempt, rank = facts.pop("attempt", None), facts.pop("rank", None)
        boottime, episode = self.now - self.began, self.open.get(slot or "")
        where = ("node", slot, episode, attempt, rank)
        event = Event(0, f"boot-{self.boot}", boottime, self.now, *where, kind, name, facts)
        if late:
            self.late.append(event)
        else:
            self.write(event)

    def write(self, event: Event) -> None:
        id_ = self.connection.execute(INSERT, row(event)).lastrowid
        assert id_ is not None
        self.past.append(event._replace(id=id_))

    slots = st.sampled_from("ab")

    @rule(seconds=st.floats(0.01, 90))
    def time_passes(self, seconds: float) -> None:
        self.now += round(seconds * SECOND)

    @rule(slot=slots, cause=st.sampled_from(CAUSES), before=st.integers(0, 20))
    def open_episode(self, slot: str, cause: str, before: int) -> None:
        self.number += 1
        previous, self.open[slot] = self.open.get(slot), f"{self.number:032x}"
        fault = self.now - self.began - before * SECOND
        self.say("episode_open", cause, slot=slot, cause=cause, fault_boottime_ns=fault, previous=previous)
        self.say("attempt_start", "", slot=slot, attempt=1, starting_state=WARM)

    @rule(
        slot=slots,
        result=st.sampled_from(["hit", "miss", "off"]),
        rank=st.integers(0, 1),
        gpu=st.sampled_from([None, "GPU-1"]),
        late=st.booleans(),
    )
    def look_up(self, slot: str, result: str, rank: int, gpu: str | None, late: bool) -> None:
        facts = {"reason": "fingerprint", "detail": "dtype"} if result == "miss" else {}
        facts |= {"device": gpu} if gpu else {}
        self.say("phase_begin", "load_weights", slot=slot, attempt=1, rank=rank, late=late)
        self.say("lookup", result, slot=slot, attempt=1, rank=rank, config=FIELDS, late=late, **facts)

    @rule(slot=slots, reason=st.sampled_from([None, None, "restarts_exhausted", "stopped"]))
    def close_episode(self, slot: str, reason: str | None) -> None:
        self.say("phase_end", "load_weights", slot=slot, attempt=1, rank=0)
        facts = {"reason": reason} if reason else {"verified": True}
        self.say("episode_close", "abandoned" if reason else "ready", slot=slot, attempt=1, **facts)

    @rule(slot=slots, late=st.booleans())
    def engine_ends(self, slot: str, late: bool) -> None:
        self.say("process", "exited", slot=slot, attempt=1, process="engine", pid=self.number, late=late)

    @rule(slot=slots, result=st.sampled_from(["correct", "wrong"]))
    def probe(self, slot: str, result: str) -> None:
        self.say("probe", result, slot=slot)

    @rule(name=st.sampled_from(["g1", "g2"]), kind=st.sampled_from(["publish", "release", "quarantine", "lease"]))
    def weights_come_and_go(self, name: str, kind: str) -> None:
        match kind:
            case "publish":
                facts = {"generation": name, "bytes": 1000, "config": FIELDS, "device": GPUS[name]}
                self.say("publish", "published", slot="a", **facts)
            case "release":
                self.say("release", "evicted", generation=name)
            case "quarantine":
                self.say("quarantine", "set", generation=name, reason="wrong answers")
            case _:
                self.say("lease_open", "", slot="a", generation=name, lease=f"lease-{name}-{self.number}")

    @rule(seconds=st.integers(1, 100))
    def reboot(self, seconds: int) -> None:
        self.now += seconds * SECOND
        self.boot, self.began = self.boot + 1, self.now
        self.now += SECOND
        self.say("process", "started", process="daemon", generations=[])

    @precondition(lambda self: self.late)
    @rule()
    def spools_are_merged(self) -> None:
        for event in self.late:
            self.write(event)
        self.late = []

    @rule()
    def step(self) -> None:
        self.telemetry.step()

    @rule(doubt=st.booleans())
    def daemon_is_killed(self, doubt: bool) -> None:
        """What it had not written is gone; in doubt of the snapshot it rebuilds the books."""
        if doubt and self.journal.snapshot("latest"):
            self.connection.execute("UPDATE snapshots SET digest = 'x' WHERE name = 'latest'")
        self.telemetry._journal.close()
        self.telemetry._shown.close()
        self.start()
        self.books_are_what_replay_gives()
        self.compare_everything()

    @rule()
    def take_snapshot(self) -> None:
        self.telemetry.step()
        self.telemetry._take_snapshot()

    @rule()
    def prune(self) -> None:
        self.telemetry.step()
        self.telemetry._prune()

    def compare_everything(self) -> None:
        self.telemetry.step()
        books = self.telemetry._books
        assert differences(everything(books), everything(self.replayed)) == []
        assert differences(everything(restored(books)), everything(books)) == []

    @invariant()
    def books_are_what_replay_gives(self) -> None:
        self.telemetry.step()
        books = self.telemetry._books
        for event in self.past[self.fed :]:
            if (change := self.replayed.feed(event)).closed is not None:
                self.closed.add(change.closed.id)
        self.fed = len(self.past)
        assert books.snapshot() == self.replayed.snapshot()
        replay = books.replay
        assert replay.started == replay.closed + len(replay.open_episodes)
        for episode in replay.episodes:
            assert sum(episode.phases_s(self.now).values()) == pytest.approx(episode.age_s(self.now))
        path = self.folder / "spans.jsonl"
        assert {line.split('"traceId":"')[1][:32] for line in path.open()} == self.closed if self.closed else True

    @invariant()
    def no_counter_falls(self) -> None:
        samples = [
            sample
            for family in self.telemetry._collector.collect()
            for sample in family.samples
            if sample.name.endswith(("_total", "_count", "_sum", "_bucket"))
        ]
        found = {(sample.name, *sorted(sample.labels.items())): sample.value for sample in samples}
        assert {key: value for key, value in found.items() if value < self.highest.get(key, 0)} == {}
        assert self.highest.keys() <= found.keys()
        self.highest = found


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=12,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # making a failure smaller takes longer than a test may
)
