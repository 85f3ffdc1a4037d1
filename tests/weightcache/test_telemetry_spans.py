"""Spans: what they tell, and that they arrive."""

import http.server
import json
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
from google.protobuf.json_format import Parse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.trace import StatusCode
from tests.fixtures.collector import Collector
from tests.fixtures.story import BOOT_WALL, SECOND, Story, recovery
from tests.readmit.nodes import wait_for

from weightcache.episodes import Replay
from weightcache.journal import Context, Journal
from weightcache.telemetry import Telemetry
from weightcache.telemetry.exporter import sinks
from weightcache.telemetry.health import Health
from weightcache.telemetry.otlp_json import encode
from weightcache.telemetry.spans import attempt_id, root_id, spans_of

RESIDENTS = SimpleNamespace(capacity=None, resident_bytes=0, leases=0, generations={}, claims=[], refused={})


def episodes(*stories):
    replay = Replay()
    for id_, event in enumerate((event for story in stories for event in story.events), 1):
        replay.feed(event._replace(id=id_))
    return replay.episodes


def by_name(spans):
    return {span.name: span for span in spans}


class TestTree:
    def test_recovery_attempt_phase_part(self):
        (episode,) = episodes(recovery())
        spans = by_name(spans_of(episode))
        assert list(spans)[:2] == ["recovery", "attempt"]
        root, attempt, load = spans["recovery"], spans["attempt"], spans["load_weights"]
        assert root.parent is None
        assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {episode.id}
        parents = {name: span.parent and span.parent.span_id for name, span in spans.items()}
        assert parents["attempt"] == parents["detect"] == parents["backoff"] == root.context.span_id
        assert parents["spawn"] == parents["load_weights"] == attempt.context.span_id
        assert parents["load_weights.map"] == load.context.span_id

    def test_times_are_those_of_the_journal(self):
        (episode,) = episodes(recovery())
        spans = by_name(spans_of(episode))
        assert spans["recovery"].start_time == BOOT_WALL + 100 * SECOND
        assert spans["recovery"].end_time == BOOT_WALL + 110 * SECOND
        part = spans["load_weights.map"]
        assert (part.start_time, part.end_time) == (BOOT_WALL + 106.2 * SECOND, BOOT_WALL + 107 * SECOND)

    def test_ids_are_the_same_whenever_they_are_derived(self):
        first, second = (spans_of(episodes(recovery())[0]) for _ in range(2))
        ids = [span.context.span_id for span in first]
        assert ids == [span.context.span_id for span in second]
        assert len(set(ids)) == len(ids)

    def test_an_engine_s_own_spans_hang_below_its_attempt(self):
        traceparent = Context("node", "a", "ab" * 16, 2).traceparent()
        assert traceparent == f"00-{'ab' * 16}-{attempt_id('ab' * 16, 2)}-01"

    def test_ranks_have_spans_of_their_own(self):
        story = Story().open(0).say(0, "attempt_start", attempt=1)
        for rank in range(3):
            story.phase("load_weights", 1, 2 + rank, rank=rank).phase("load_weights.map", 1, 1.5, rank=rank)
        (episode,) = episodes(story.close(9))
        spans = [span for span in spans_of(episode) if span.name == "load_weights"]
        parts = [span for span in spans_of(episode) if span.name == "load_weights.map"]
        assert [span.attributes["readmit.rank"] for span in spans] == [0, 1, 2]
        assert [part.parent.span_id for part in parts] == [span.context.span_id for span in spans]


class TestMeaning:
    def test_a_miss_names_every_field_and_both_values_and_is_no_error(self):
        differences = [
            {"field": "torch_version", "expected": "2.13.0", "found": "2.12.0"},
            {"field": "engine", "expected": "vllm", "found": "sglang"},
        ]
        story = Story().open(0).say(0, "attempt_start", attempt=1).phase("load_weights", 1, 5, rank=0)
        story.lookup(2, "miss", reason="fingerprint", detail="torch_version", differences=differences)
        (episode,) = episodes(story.close(9))
        spans = by_name(spans_of(episode))
        for name in ("recovery", "load_weights"):
            attributes = spans[name].attributes
            assert attributes["readmit.miss.reason"] == "fingerprint"
            assert attributes["readmit.miss.fields"] == ["torch_version", "engine"]
            assert "2.12.0" in attributes["readmit.miss.differences"][0]
            assert spans[name].status.status_code is StatusCode.UNSET

    def test_a_killed_process_has_ended_spans_with_an_error(self):
        story = Story().open(0).say(0, "attempt_start", attempt=1).phase("load_weights", 1, rank=0)
        story.say(4, "process", "exited", attempt=1, process="engine", signal=9)
        story.say(5, "attempt_start", attempt=2).say(9, "attempt_end", "ready", attempt=2)
        (episode,) = episodes(story.close(9))
        spans = spans_of(episode)
        load = by_name(spans)["load_weights"]
        attempts = [span for span in spans if span.name == "attempt"]
        assert load.end_time == BOOT_WALL + 4 * SECOND
        assert (load.status.status_code, load.attributes["error.type"]) == (StatusCode.ERROR, "process_lost")
        assert load.attributes["readmit.unfinished"] is True
        assert [span.status.status_code for span in attempts] == [StatusCode.ERROR, StatusCode.UNSET]
        assert attempts[0].attributes["process.exit.signal"] == 9

    def test_a_recovery_links_to_the_run_that_was_lost(self):
        first, second = episodes(
            recovery(episode="1" * 32), Story(episode="2" * 32).open(200, previous="1" * 32).close(210)
        )
        (link,) = spans_of(second, first)[0].links
        assert f"{link.context.span_id:016x}" == attempt_id(first.id, 1)
        (link,) = spans_of(second)[0].links
        assert f"{link.context.span_id:016x}" == root_id(first.id)


class TestFile:
    @pytest.fixture
    def journal(self, tmp_path):
        journal = Journal(tmp_path / "journal.sqlite3", checkpoints=True)
        yield journal
        journal.close()

    def run(self, journal):
        telemetry = Telemetry(journal, RESIDENTS, environ={})
        telemetry.step()
        telemetry.close()

    def traces(self, journal):
        lines = journal.path.with_name("spans.jsonl").read_text().splitlines()
        return [json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["traceId"] for line in lines]

    def test_each_line_is_an_export_request(self):
        (episode,) = episodes(recovery())
        line = encode(spans_of(episode))
        request = Parse(line, ExportTraceServiceRequest())
        spans = request.resource_spans[0].scope_spans[0].spans
        assert [span.name for span in spans] == [span.name for span in spans_of(episode)]
        assert spans[0].start_time_unix_nano == episode.fault_ns
        assert json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["traceId"] == episode.id

    def test_every_episode_once_over_restarts(self, journal):
        for number in range(1, 4):
            recovery(episode=f"{number:032x}").tell(journal)
            self.run(journal)
        assert self.traces(journal) == [f"{number:032x}" for number in range(1, 4)]

    def test_killed_before_its_place_was_kept_it_exports_again_under_the_same_ids(self, journal):
        recovery().tell(journal)
        self.run(journal)
        journal.path.with_name("spans.jsonl.position").unlink()
        self.run(journal)
        first, second = journal.path.with_name("spans.jsonl").read_text().splitlines()
        assert first == second

    def test_a_line_cut_off_by_death_is_not_glued_to_the_next(self, journal):
        recovery(episode="1" * 32).tell(journal)
        self.run(journal)
        with journal.path.with_name("spans.jsonl").open("a") as file:
            file.write('{"resourceSpans":[{"res')
        recovery(episode="2" * 32).tell(journal)
        self.run(journal)
        assert self.traces(journal) == ["1" * 32, "2" * 32]


def understood(spans):
    """Spans of OTLP-JSON without what is not said of them, and without how a link's flags are written."""
    kept = [{key: value for key, value in span.items() if value not in ("", 0, [], {})} for span in spans]
    for span in kept:
        span["attributes"] = {it["key"]: it["value"] for it in span["attributes"]}
        span["status"] = {key: value for key, value in span.get("status", {}).items() if value}
        span["links"] = [(link["traceId"], link["spanId"]) for link in span.get("links", ())]
        span.pop("flags", None)
    return sorted(kept, key=lambda span: span["spanId"])


class TestCollector:
    def test_gets_each_recovery_and_none_of_the_past(self, tmp_path, monkeypatch):
        """What it has understood is what the file says, span by span: ids, times, attributes, links, errors."""
        collector = Collector()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        journal = Journal(tmp_path / "journal.sqlite3", checkpoints=True)
        recovery(episode="1" * 32).tell(journal)
        telemetry = Telemetry(journal, RESIDENTS)
        telemetry.step()
        lost = Story(episode="2" * 32).open(0, previous="1" * 32).say(0, "attempt_start", attempt=1)
        lost.lookup(1, "miss", reason="fingerprint", detail="engine", differences=[{"field": "engine"}])
        lost.phase("load_weights", 1, rank=0).say(4, "process", "exited", attempt=1, process="engine", signal=9)
        for story in (lost.close(9, "abandoned"), recovery(episode="3" * 32)):
            story.tell(journal)
        telemetry.step()
        place = tmp_path / "spans.jsonl.otlp-position"
        wait_for(lambda: place.exists() and int(place.read_text()) == journal.last_id(), "both recoveries are sent")
        telemetry.close()
        _, *lines = (tmp_path / "spans.jsonl").read_text().splitlines()
        written = [json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"] for line in lines]
        wait_for(lambda: sum(map(len, collector.traces().values())) >= sum(map(len, written)), "they have arrived")
        arrived = collector.traces()
        collector.close()
        assert list(arrived) == ["2" * 32, "3" * 32]
        assert list(map(understood, arrived.values())) == list(map(understood, written))

    @pytest.mark.parametrize(
        ("variables", "names"),
        [
            ({}, ["file", "otlp"]),
            ({"OTEL_SDK_DISABLED": "True"}, ["file"]),
            ({"OTEL_TRACES_EXPORTER": "none"}, ["file"]),
            ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, ["file"]),
        ],
    )
    def test_is_sent_nothing_where_the_environment_says_so(self, tmp_path, variables, names):
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", **variables}
        found = sinks(tmp_path / "spans.jsonl", 0, Health(), environ)
        assert [sink.name for sink in found] == names
        for sink in found:
            sink.close()

    @pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "http://name-that-does-not-resolve.invalid:4318", None])
    def test_one_that_is_dead_or_mute_delays_nothing_and_loses_nothing(self, tmp_path, endpoint):
        """The process ends by itself, with its own exit status, and the next one would send again."""
        script = """
            import sys, types, logging
            from pathlib import Path
            from weightcache.journal import Journal
            from weightcache.telemetry import Telemetry
            from tests.fixtures.story import recovery
            empty = {"generations": {}, "claims": [], "refused": {}}
            residents = types.SimpleNamespace(capacity=None, resident_bytes=0, leases=0, **empty)
            journal = Journal(Path(sys.argv[1]), checkpoints=True)
            telemetry = Telemetry(journal, residents)
            telemetry.step()
            for number in range(1, 4):
                recovery(episode=f"{number:032x}").tell(journal)
            telemetry.step()
            position = telemetry._sinks[0].position
            telemetry.close()
            print(position == journal.last_id(), Path(sys.argv[1] + "/../spans.jsonl.otlp-position").exists())
        """
        mute = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)  # accepts, never answers
        endpoint = endpoint or f"http://127.0.0.1:{mute.server_port}"
        command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "journal.sqlite3")]
        environment = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": endpoint, "PATH": "/usr/bin", "PYTHONPATH": "."}
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)
        mute.server_close()
        assert (result.returncode, result.stdout) == (0, "True False\n"), result.stderr
