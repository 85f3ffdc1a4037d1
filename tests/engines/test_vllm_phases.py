"""Phases from what vLLM says."""

import logging
import sys
from pathlib import Path

import pytest
from vllm.logger import _configure_vllm_root_logger

from weightcache.integrations import vllm_fork, vllm_phases
from weightcache.journal import Journal


def test_lines_are_heard_also_after_vllm_has_set_up_its_log_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("READMIT_JOURNAL", str(tmp_path / "journal.sqlite3"))
    marks = vllm_phases.Marks()
    vllm_phases.listen(marks)
    _configure_vllm_root_logger()
    logger = logging.getLogger("vllm.distributed.parallel_state")
    marks.begin("distributed_init.topology")
    logger.info(
        "world_size=%d rank=%d local_rank=%d distributed_init_method=%s backend=%s", 1, 0, 0, "file://x", "gloo"
    )
    logger.info("rank %s in world size %s is assigned as DP rank %s", 0, 1, 0)
    marks.begin("server_ready")
    logging.getLogger("uvicorn.error").setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").info("Application startup complete.")
    journal = Journal(tmp_path / "journal.sqlite3")
    said = [(event.kind, event.name) for event in journal.query("ORDER BY id")]
    assert said == [
        ("phase_begin", "distributed_init.topology"),
        ("phase_end", "distributed_init.topology"),
        ("phase_begin", "distributed_init.rendezvous"),
        ("phase_end", "distributed_init.rendezvous"),
        ("phase_begin", "server_ready"),
        ("phase_end", "server_ready"),
    ]


def test_a_release_that_makes_its_tokenizer_elsewhere_starts_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_phases, "TOKENIZER", "renamed_in_another_release")
    vllm_phases._time_tokenizer(vllm_phases.Marks())
    monkeypatch.setattr(vllm_phases, "MAKES_TOKENIZERS", ("vllm.moved_in_another_release",))
    vllm_phases._time_tokenizer(vllm_phases.Marks())


def test_what_another_release_has_moved_is_not_held_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_fork, "LATE", ("vllm.moved_in_another_release.core", "vllm.v1.engine.core"))
    vllm_fork.preload()
    assert "vllm.v1.engine.core" in sys.modules
