"""Each process of a node, SIGKILLed between any two of its writes to the journal: books balance, and nothing falls."""

import contextlib
import json
import select
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.fixtures import checkpoints
from tests.readmit.gate.harness import ScriptedEngine, ending, free_port, probe_file
from tests.weightcache.caches import Cache, wait_for
from tests.weightcache.models import config
from tests.weightcache.mortals import Mortals, mortals
from tests.weightcache.publishing import packed, publishing

from weightcache import messages
from weightcache.errors import CacheMiss
from weightcache.journal import Context, Journal, boottime_ns, new_episode_id
from weightcache.process import Process
from weightcache.telemetry import Telemetry

RESIDENTS = SimpleNamespace(capacity=None, resident_bytes=0, leases=0, generations={}, claims=[], refused={})
Samples = dict[tuple[str, ...], float]


def counters(text_or_telemetry: "str | Telemetry") -> Samples:
    """Every counter of a scrape but the process's own."""
    found = text_or_telemetry
    families = text_string_to_metric_families(found) if isinstance(found, str) else list(found._collector.collect())
    return {
        (sample.name, *(f"{key}={value}" for key, value in sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
        if sample.name.endswith(("_total", "_count", "_sum", "_bucket")) and not sample.name.startswith("process_")
    }


def falls(before: Samples, after: Samples) -> dict[tuple[str, ...], tuple[float, float | None]]:
    return {key: (value, after.get(key)) for key, value in before.items() if after.get(key, -1.0) < value}


class Auditor:
    """An exporter that runs through a sweep, and is replaced now and then as by a SIGKILL."""

    def __init__(self, journal: Path) -> None:
        self.journal = Journal(journal, Context("n"), checkpoints=True)
        self.telemetry = Telemetry(self.journal, RESIDENTS, environ={})
        self.seen: Samples = {}

    def audit(self) -> None:
        """Hold the books against themselves and against what was shown before."""
        self.telemetry.step()
        now = counters(self.telemetry)
        assert falls(self.seen, now) == {}
        self.seen = now
        replay = self.telemetry._books.replay
        assert replay.started == replay.closed + len(replay.open_episodes)
        for episode in replay.episodes:
            at_ns = replay.clock.now()
            assert sum(episode.phases_s(at_ns).values()) == pytest.approx(episode.age_s(at_ns))

    def close(self) -> None:
        """Hold what ran against a replay of everything, and against what the next daemon would make of it."""
        self.audit()
        again = Telemetry(self.journal, RESIDENTS, environ={})
        again.step()
        assert falls(self.seen, counters(again)) == {}
        assert again._books.snapshot().state == self.telemetry._books.snapshot().state
        for telemetry in (again, self.telemetry):
            telemetry.close()
        self.journal.close()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mortals]:
    with mortals(tmp_path_factory.mktemp("mortals") / "log") as source:
        yield source


def ended(process: Process) -> bool:
    return bool(select.select([process], [], [], 0)[0])


def recovery_of(journal: Journal, slot: str = "a") -> Context:
    """What a keeper writes before it forks an engine."""
    context = Context("n", slot, new_episode_id(), 1)
    about = {"cause": "crash", "fault_boottime_ns": boottime_ns(), "fault_clock": "exit"}
    journal.append("episode_open", "crash", about, context=context)
    journal.append("attempt_start", "", {"command": ["engine"]}, context=context)
    return context


@pytest.mark.parametrize("resident", [False, True], ids=["miss", "hit"])
def test_engine(served: Cache, source: Mortals, resident: bool) -> None:
    """A client in every part of an attach, and between the marks of its engine."""
    journal = Journal(served.journal_path, Context("n"))
    auditor = Auditor(served.journal_path)
    if resident:
        with publishing(served, packed(config("known"))):
            pass
    for writes in range(100):
        context = recovery_of(journal)
        name = "known" if resident else f"unknown-{writes}"
        environment = {**context.to_environment(), "READMIT_JOURNAL": str(served.journal_path)}
        client = source.start("client", writes, environment, str(served.socket), name)
        wait_for(lambda: ended(client), "the client to die")  # noqa: B023 - called at once
        marks = journal.query("WHERE episode = ? AND name = 'server_ready' ORDER BY id", context.episode)
        done = [mark.kind for mark in marks] == ["phase_begin", "phase_end"]
        about = {"process": "engine", "pid": client.pid, "signal": int(signal.SIGKILL)}
        journal.append("process", "exited", about, context=context)
        journal.append("attempt_end", "crashed", context=context)
        journal.append("episode_close", "abandoned", context=context)
        auditor.audit()
        if done:
            break
    assert 15 < writes < 99
    path = "hit" if resident else "miss"
    assert auditor.seen["readmit_recoveries_total", "outcome=abandoned", f"path={path}"] > 3
    assert auditor.seen["readmit_recoveries_total", "outcome=abandoned", "path=unknown"] > 3
    auditor.close()


def test_reference_engine(cache: Cache, source: Mortals) -> None:
    """Its own marks, from its first to the one that it is ready; those of an attach are `test_engine`'s."""
    model = checkpoints.with_tokenizer(checkpoints.plain(cache.folder / "model"))
    journal = Journal(cache.journal_path, Context("n"))
    auditor = Auditor(cache.journal_path)
    for writes in range(100):
        context = recovery_of(journal)
        environment = {**context.to_environment(), "READMIT_JOURNAL": str(cache.journal_path)}
        engine = source.start("engine", writes, environment, str(model), "--port", "0", "--weight-cache", "off")
        ready = "WHERE episode = ? AND kind = 'phase_end' AND name = 'server_ready'"
        wait_for(
            lambda: ended(engine) or journal.query(ready, context.episode),  # noqa: B023 - called at once
            "the engine to die or to be ready",
        )
        done = bool(journal.query(ready, context.episode))
        auditor.audit()
        engine.send_signal(signal.SIGKILL)
        wait_for(lambda: ended(engine), "the engine to end")  # noqa: B023
        about = {"process": "engine", "pid": engine.pid, "signal": int(signal.SIGKILL)}
        journal.append("process", "exited", about, context=context)
        journal.append("episode_close", "abandoned", context=context)
        auditor.audit()
        if done:
            break
    assert 10 < writes < 99
    (episode,) = auditor.telemetry._books.replay.episodes[-1:]
    named = {interval.name for interval in episode.intervals() if interval.end_ns is not None}
    assert named >= {"spawn", "import", "tokenizer_init", "load_weights", "kernel_warmup", "server_ready"}
    assert auditor.seen["readmit_recoveries_total", "outcome=abandoned", "path=off"] > 3
    auditor.close()


def test_daemon(cache: Cache, source: Mortals) -> None:
    """It publishes, leases, quarantines and releases; each is scraped, and none shows less than one before it."""
    shown: Samples = {}
    for writes in range(100):
        done = False
        daemon = source.start("daemon", writes, cache.environment, *cache.command[3:])
        with contextlib.suppress(CacheMiss, OSError):  # it died meanwhile
            wait_for(lambda: ended(daemon) or cache.pid(), "the daemon to answer")  # noqa: B023 - called at once
            with publishing(cache, packed(config(f"m{writes}"))) as (_, generation):
                cache.ask(messages.Quarantine(generation=generation, reason="a test"))
            wait_for(lambda: ended(daemon) or not cache.leases(), "the lease to end")  # noqa: B023
            cache.ask(messages.Release(generation=generation))
            done = True
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{cache.port}/metrics") as answer:
            now = counters(answer.read().decode())
            assert falls(shown, now) == {}
            shown = now
        survived = not ended(daemon)
        daemon.send_signal(signal.SIGKILL)
        wait_for(lambda: ended(daemon), "the daemon to end")  # noqa: B023
        if survived and done:
            break
    assert 5 < writes < 99
    assert shown["weightcache_publishes_total", "result=published"] > 3
    auditor = Auditor(cache.journal_path)
    auditor.close()
    assert falls(shown, auditor.seen) == {}


def test_keeper(cache: Cache, source: Mortals) -> None:
    """Its engine ends again and again; each keeper takes over where the one before was killed."""
    cache.runtime_dir.mkdir(mode=0o700)
    engine = {"name": "a", "role": "engine", "argv": ["sleep", "0.1"], "backoff_s": [0.0, 0.02], "limit": 0}
    facts = {"node": "n", "runtime_dir": cache.runtime_dir, "state_dir": cache.state_dir, "children": [engine]}
    spec = cache.folder / "spec.json"
    spec.write_text(json.dumps({**facts, "journal": cache.journal_path}, default=str))
    auditor = Auditor(cache.journal_path)
    for writes in range(24):
        keeper = source.start("keeper", writes, cache.environment, str(spec))
        wait_for(lambda: ended(keeper), "the keeper to die")  # noqa: B023 - called at once
        auditor.audit()
    keeper = source.start("keeper", 10**6, cache.environment, str(spec))
    begun = len(auditor.journal.query("WHERE kind = 'attempt_start'"))
    wait_for(lambda: len(auditor.journal.query("WHERE kind = 'attempt_start'")) > begun + 1, "two more attempts")
    keeper.send_signal(signal.SIGTERM)
    wait_for(lambda: ended(keeper), "the keeper to end")
    auditor.audit()
    assert auditor.telemetry._books.replay.open_episodes == []
    attempts = [event.attempt for event in auditor.journal.query("WHERE kind = 'attempt_start' ORDER BY id")]
    assert len(attempts) == len(set(attempts)), "one episode, and no attempt twice"
    auditor.close()


def test_gate(cache: Cache, source: Mortals) -> None:
    """It verifies an engine and closes its episode; killed before that, the next gate does."""
    probes = probe_file(cache.folder / "probes.json")
    journal = Journal(cache.journal_path, Context("n"))
    auditor = Auditor(cache.journal_path)
    engine = ScriptedEngine()
    options = ["--slot", f"a={engine.url}", "--probes", str(probes), "--journal", str(cache.journal_path)]
    with ending(engine):
        process = Process.open(engine.pid)
        assert process is not None
        about = {"process": "engine", "pid": process.pid, "start_ticks": process.start_ticks}
        closed = 0
        for writes in range(14):
            context = recovery_of(journal)
            journal.append("process", "spawned", about, context=context)
            listen = f"127.0.0.1:{free_port()}"
            gate = source.start("gate", writes, cache.environment, "--listen", listen, *options)
            closing = "WHERE kind = 'episode_close' AND episode = ?"
            wait_for(
                lambda: ended(gate) or journal.query(closing, context.episode),  # noqa: B023 - called at once
                "the gate to die or to close the episode",
            )
            closed += len(journal.query(closing, context.episode))
            auditor.audit()
            gate.send_signal(signal.SIGKILL)
            wait_for(lambda: ended(gate), "the gate to end")  # noqa: B023
            auditor.audit()
    assert 1 < closed < 12
    assert auditor.seen["readmit_recoveries_total", "outcome=ready", "path=unknown"] == closed
    auditor.close()
