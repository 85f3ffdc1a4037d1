"""What an ordered restart cost, in GPU-hours: the published cold start, and the recovery that resident weights gave."""

import json
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from readmit.commands import logs, report, status
from readmit.recovered import account, wait
from readmit.where import Where
from weightcache.episodes.state import resumed
from weightcache.errors import ConfigError
from weightcache.journal import Context, Journal, boottime_ns
from weightcache.journal.database import connect
from weightcache.registry import Registry
from weightcache.slo import Objectives
from weightcache.starting_state import COMPARED
from weightcache.telemetry import Telemetry

CONFIG = {
    "model_path": "/models/ling",
    "checkpoint_digest": "d",
    "dtype": "bfloat16",
    "quant_method": "fp8",
    "tp_size": 8,
    "pp_size": 1,
    "device_capability": "9.0",
    "engine": "vllm",
}


def recovery(
    journal: Journal, episode: str, path: str, began_s: float, seconds: float, previous: str | None = None
) -> None:
    """A recovery of eight GPUs that has ended."""
    at_ns, where = round(began_s * 1e9), Context("n", "a", episode)
    facts = {"cause": "upgrade", "fault_boottime_ns": at_ns, "fault_clock": "command", "previous": previous}
    journal.append("episode_open", "upgrade", facts, at_ns=at_ns, context=where)
    inside = where._replace(attempt=1)
    state = {"starting_state": dict.fromkeys(COMPARED, "warm")}
    journal.append("attempt_start", "", state, at_ns=at_ns, context=inside)
    for rank in range(8):
        journal.append("lookup", path, {"config": CONFIG}, at_ns=at_ns + 1, context=inside._replace(rank=rank))
    end_ns = at_ns + round(seconds * 1e9)
    journal.append("attempt_end", "ready", at_ns=end_ns, context=inside)
    journal.append("episode_close", "ready", {"verified": True, "generation": "g"}, at_ns=end_ns, context=where)


def test_eight_gpus_that_wait_are_counted_and_compared(tmp_path: Path) -> None:
    where = Where(tmp_path, tmp_path, tmp_path / "journal.sqlite3", Objectives())
    journal, now = Journal(where.journal, Context("n")), boottime_ns() / 1e9
    recovery(journal, "1" * 32, "hit", now, 32)
    alone = wait(where, "1" * 32)
    assert (alone.ready, alone.gpus, alone.saved) == (True, 8, None)
    assert alone.lost == pytest.approx(32 * 8 / 3600)
    assert str(alone).endswith("(hit); 8 GPUs waited, 0.0711 GPU-hours: nothing to compare with")

    recovery(journal, "2" * 32, "miss", now + 100, 527)
    recovery(journal, "3" * 32, "hit", now + 1000, 32)
    compared = wait(where, "3" * 32)
    assert compared.saved == pytest.approx((527 - 32) * 8 / 3600)
    assert str(compared) == (
        "a is ready after 32.00 s (hit); 8 GPUs waited, 0.0711 GPU-hours, 1.1000 saved against a cold start"
    )
    assert account([alone, compared]) == (
        "2 engines in 64.00 s of recoveries (2 hit): 0.1422 GPU-hours, 1.1000 saved against cold starts"
    )


def test_of_a_long_past_only_what_a_snapshot_does_not_tell_is_read(tmp_path: Path) -> None:
    where = Where(tmp_path, tmp_path, tmp_path / "journal.sqlite3", Objectives())
    journal, now = Journal(where.journal, Context("n"), checkpoints=True), boottime_ns() / 1e9
    recovery(journal, "1" * 32, "miss", now, 527)
    telemetry = Telemetry(journal, Registry(), environ={})
    telemetry.step()
    telemetry.close()
    connection = connect(where.journal)
    connection.execute("DELETE FROM events")
    connection.close()
    recovery(journal, "2" * 32, "hit", now + 1000, 32)
    (saved,) = {wait(where, "2" * 32).saved for _ in range(2)}
    assert saved == pytest.approx((527 - 32) * 8 / 3600)
    last = resumed(journal.furthest_snapshot()).slots["a"].last
    assert last is not None, "what readmit status begins with"
    assert (last.id, last.path) == ("1" * 32, "miss")


def test_one_recovery_is_told_by_its_own_events(tmp_path: Path) -> None:
    journal, now = Journal(tmp_path / "journal.sqlite3", Context("n")), boottime_ns() / 1e9
    for number, (episode, previous) in enumerate((("a" * 32, None), ("ab" * 16, "a" * 32), ("c" * 32, "ab" * 16))):
        recovery(journal, episode, "hit", now + 100 * number, 32, previous)
    environment = {"READMIT_JOURNAL": str(journal.path), "READMIT_STATE": str(tmp_path)}
    told = CliRunner().invoke(logs.app, ["--episode", "ABA"], env=environment)
    assert told.output == "==> slot a, episode aaaaaaaa, attempt 1: no longer kept <==\n"
    for id_, why in (("a", "a names 2 recoveries"), ("d", "d names no recovery"), ("%", "% names no recovery")):
        with pytest.raises(ConfigError, match=why):
            CliRunner().invoke(logs.app, ["--episode", id_], env=environment, catch_exceptions=False)


def test_a_damaged_journal_is_said_and_hides_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = tmp_path / "journal.sqlite3"
    journal.write_bytes(random.Random(1).randbytes(9000))
    for name, value in (("JOURNAL", journal), ("STATE", tmp_path), ("RUNTIME", tmp_path / "r")):
        monkeypatch.setenv(f"READMIT_{name}", str(value))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r").mkdir(mode=0o700)
    shown = CliRunner().invoke(status.app, ["--json"], catch_exceptions=False)
    assert shown.exit_code == 1
    assert json.loads(shown.stdout)["children"] == []
    for command in (logs.app, report.app):
        with pytest.raises(ConfigError, match="cannot be read") as said:
            CliRunner().invoke(command, ["--episode", "a"] if command is logs.app else [], catch_exceptions=False)
        assert said.value.reason == "journal_unreadable"
    with pytest.raises(ConfigError, match="sets a damaged journal aside"):
        wait(Where(tmp_path, tmp_path, journal, Objectives()), "1" * 32)
