"""What a real daemon exports of its connections, and what an engine's own telemetry keeps to itself."""

import os
import signal
import subprocess
import sys
import textwrap

from tests.weightcache.caches import Cache, wait_for
from tests.weightcache.models import config
from tests.weightcache.publishing import packed, publish

from weightcache import messages

REFUSED = "weightcache_connections_refused_total"


def test_connections_that_the_daemon_ended_are_counted_over_restarts(served: Cache) -> None:
    with served.raw() as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(1 << 16)
    with served.raw(greeted=True) as connection:
        connection.sendall(b"\xff" * 64)
        wait_for(lambda: served.metric(REFUSED) == 2, "both to be counted")
    assert served.metric(REFUSED, reason="protocol") == 2
    (daemon,) = served.processes
    os.kill(daemon.pid, signal.SIGKILL)
    daemon.wait()
    served.start()
    assert served.metric(REFUSED, reason="protocol") == 2
    assert served.metric(REFUSED, reason="peer_refused") == 0


def test_a_client_s_place_in_the_world_comes_with_its_greeting(served: Cache) -> None:
    """What the daemon journals of an attach belongs to the trace of the recovery that attaches."""
    publish(served, packed(config("known")))
    connection = served.connect(slot="b", episode="ab" * 16, attempt=3, rank=1)
    connection.ask(messages.Attach(config=config("known").to_dict()), messages.Attached)
    connection.close()
    wait_for(lambda: not served.leases(), "the lease to end")
    rows = served.events("WHERE slot = 'b' ORDER BY id")
    assert [row.kind for row in rows] == ["lease_open", "lease_close"]
    assert {(row.episode, row.attempt, row.rank) for row in rows} == {("ab" * 16, 3, 1)}


def test_a_set_up_of_the_user_s_own_is_left_alone() -> None:
    """An engine that has its own tracer provider, and a process that exports for readmit, share nothing."""
    script = """
        import tempfile, types
        from pathlib import Path
        from opentelemetry import metrics, propagate, trace
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
        from tests.fixtures.story import recovery
        from weightcache.journal import Journal
        from weightcache.telemetry import Telemetry
        mine, kept = TracerProvider(), InMemorySpanExporter()
        mine.add_span_processor(SimpleSpanProcessor(kept))
        trace.set_tracer_provider(mine)
        before = metrics.get_meter_provider(), propagate.get_global_textmap()
        journal = Journal(Path(tempfile.mkdtemp()) / "journal.sqlite3", checkpoints=True)
        recovery().tell(journal)
        facts = {"generations": {}, "claims": [], "refused": {}}
        residents = types.SimpleNamespace(capacity=None, resident_bytes=0, leases=0, **facts)
        telemetry = Telemetry(journal, residents, environ={})
        telemetry.step()
        telemetry.close()
        assert trace.get_tracer_provider() is mine
        assert (metrics.get_meter_provider(), propagate.get_global_textmap()) == before
        with trace.get_tracer("mine").start_as_current_span("my span"):
            pass
        print([span.name for span in kept.get_finished_spans()], journal.path.with_name("spans.jsonl").exists())
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": "."})
    assert result.stdout == "['my span'] True\n"
