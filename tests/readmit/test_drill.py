"""``readmit drill`` on real nodes: what it does to them, what it says, and that the journal says the same."""

import json
import sqlite3
from contextlib import closing
from typing import Any

import pytest
from tests.fixtures import http
from tests.readmit.forked import ATTACHING
from tests.readmit.gate.harness import SCRIPTED
from tests.readmit.nodes import Node, wait_for

from readmit.commands.drill import Asked, traffic
from readmit.drill_report import Spread
from readmit.report import build
from weightcache.journal import Context, Journal

COUNTED = """
SELECT episode,
       (SELECT name FROM events AS e WHERE e.episode = events.episode AND e.kind = 'lookup' ORDER BY id DESC LIMIT 1),
       (SELECT name FROM events AS e WHERE e.episode = events.episode AND e.kind = 'episode_close')
FROM events WHERE kind = 'episode_open' AND json_extract(attributes, '$.cause') = 'drill' ORDER BY id
"""

# Every one of them starts several nodes' worth of processes.
pytestmark = pytest.mark.timeout(900)


def attaching(node: Node, mode: str) -> None:
    """Have the node's engine take its weights from the cache."""
    scripted, words = f'["python3", "{SCRIPTED}", "{{port}}"]', [*node.forking(ATTACHING, "a"), "{port}", mode]
    file = node.folder / "readmit.toml"
    file.write_text(file.read_text().replace(scripted, f'{json.dumps(words)}\npreload = "{ATTACHING}"'))


def drill(node: Node, *options: str) -> dict[str, Any]:
    result = node.readmit("drill", "--pause", "0", "--json", *options)
    assert result.returncode in (0, 1), result.stderr
    facts: dict[str, Any] = json.loads(result.stdout)
    assert (result.returncode == 0) == facts["passed"], result.stderr
    return facts


def refusal(node: Node, *options: str) -> str:
    result = node.readmit("drill", *options)
    assert result.returncode == 2, result.stdout
    return result.stderr


def served(node: Node) -> None:
    node.start("up")
    wait_for(node.ready, "the gate lets traffic in")
    wait_for(lambda: node.replay().episodes and not node.replay().open_episodes, "the start is closed")


def test_hits_then_misses_agree_with_the_journal(node: Node) -> None:
    attaching(node, "client")
    served(node)
    hits, misses = drill(node, "--kills", "3"), drill(node, "--path", "miss")
    both = drill(node, "--fault", "both")
    assert [it["path"] for it in hits["recoveries"]] == ["hit"] * 3
    assert hits["passed"]
    assert hits["outcomes"] == {"ready": 3}
    assert [(it["path"], it["reason"]) for it in misses["recoveries"]] == [("miss", "absent")]
    assert misses["passed"]
    assert [it["path"] for it in both["recoveries"]] == ["hit"], "what the miss published is resident again"
    assert both["daemons"][0]["generations_kept"] == both["daemons"][0]["generations"] == 1
    assert both["daemons"][0]["leases"] == 0, "the only engine died with its daemon, and its lease with it"
    assert both["passed"]
    cold = drill(node, "--fault", "both", "--path", "miss")
    assert cold["passed"]
    assert [it["path"] for it in cold["recoveries"]] == ["miss"]

    first, *drilled = node.replay().episodes
    told = [it for each in (hits, misses, both, cold) for it in each["recoveries"]]
    assert first.cause == "first_start"
    assert [(it.id, it.cause, it.path, it.outcome, it.verified) for it in drilled] == [
        (it["episode"], "drill", it["path"], it["outcome"], True) for it in told
    ]
    for episode, it in zip(drilled, told, strict=True):
        assert episode.total_s == pytest.approx(it["total_s"])
        assert sum(it["phases_s"].values()) == pytest.approx(it["total_s"])
        assert it["phases_s"]["detect"] > 0
        assert 0 < it["outage_s"] <= it["total_s"], "there was no other slot"
    report = build(Journal(node.state_dir / "journal.sqlite3", Context("n")))
    assert {it.path: it.closed for it in report.paths} == {"hit": 4, "miss": 3}
    with closing(sqlite3.connect(node.state_dir / "journal.sqlite3")) as database:
        found = database.execute(COUNTED).fetchall()
    assert found == [(it["episode"], it["path"], it["outcome"]) for it in told], "and so says plain SQL"


def test_what_nobody_knows_is_no_hit(node: Node) -> None:
    served(node)
    facts = drill(node, "--fault", "sigabrt")
    assert [it["path"] for it in facts["recoveries"]] == ["unknown"]
    assert (facts["astray"], facts["passed"]) == (1, False)


def test_a_stopped_engine_is_found_by_the_gate_and_recovers(node: Node) -> None:
    node.configure(drain_notice_s="hang_limit_s = 3\nprobe_limit_s = 3\ndrain_notice_s")
    served(node)
    before = node.children()["a"]["pid"]
    (recovery,) = drill(node, "--fault", "sigstop")["recoveries"]
    assert (recovery["cause"], recovery["outcome"], recovery["verified"]) == ("drill", "ready", True)
    assert node.children()["a"]["pid"] != before
    assert recovery["phases_s"]["detect"] > 2, "the gate's patience is no verification, and nobody waits for stop_s"
    assert len(node.replay().episodes) == 2, "the gate opened none of its own for the same fault"


def test_the_daemon_dies_and_nobody_notices(node: Node) -> None:
    attaching(node, "client")
    served(node)
    before = node.children()
    facts = drill(node, "--fault", "daemon", "--kills", "2")
    assert [(it["generations_kept"], it["leases_kept"], it["engine_kept"]) for it in facts["daemons"]] == [
        (1, 1, True)
    ] * 2
    assert facts["recoveries"] == []
    after = node.children()
    assert after["daemon"]["pid"] != before["daemon"]["pid"]
    assert after["a"]["pid"] == before["a"]["pid"]
    killed = Journal(node.state_dir / "journal.sqlite3").query("WHERE kind = 'process' AND name = 'killed'")
    assert [event.attributes["cause"] for event in killed] == ["drill"] * 2


def test_a_node_with_clients_is_left_alone(node: Node) -> None:
    attaching(node, "off")
    served(node)
    before = node.children()["a"]["pid"]
    assert traffic(Asked(node.gate)).quiet
    http.post(f"http://{node.gate}/v1/completions", json={"prompt": "Hello"}, timeout=120)
    assert not traffic(Asked(node.gate)).quiet
    assert "found a request" in refusal(node, "--path", "off")
    assert node.children()["a"]["pid"] == before
    facts = drill(node, "--path", "off", "--yes-really")
    assert facts["passed"]
    assert drill(node, "--fault", "daemon", "--yes-really")["passed"], "it has no path that would have to be off"
    assert [it["path"] for it in facts["recoveries"]] == ["off"]


def test_what_cannot_be_is_refused(node: Node) -> None:
    assert "no keeper answers" in refusal(node)
    attaching(node, "client")
    served(node)
    assert "no such slot" in refusal(node, "--slot", "z")
    assert "does not lead to path off" in refusal(node, "--path", "off")
    assert "no other slot stands by" in refusal(node, "--path", "standby")
    for path in ("miss", "standby"):
        assert "a daemon's death begins no recovery" in refusal(node, "--fault", "daemon", "--path", path)
    assert len(node.replay().episodes) == 1, "a refusal hurts nobody"


def test_who_cannot_be_asked_is_not_quiet() -> None:
    assert not traffic(Asked(None)).quiet
    assert not traffic(Asked("127.0.0.1:1")).quiet


def test_a_quantile_of_too_few_is_not_invented() -> None:
    few = Spread.of([1.0] * 298)
    assert few.quantiles["p99"] == "insufficient data (n=298, need 299)"
    assert Spread.of([float(n) for n in range(1, 300)]).quantiles == {"p50": 150.0, "p95": 285.0, "p99": 297.0}
