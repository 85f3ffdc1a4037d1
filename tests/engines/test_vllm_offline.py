"""Versions of vLLM compared, and loaded for, by the shipped commands."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.engines import checkpoints
from tests.fixtures.versions import version


def cache(*arguments: object) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "readmit.cli", "cache", *map(str, arguments), "--engine", "vllm", "--json"]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=1200, check=False)
    assert "Traceback" not in done.stderr
    return done.returncode, json.loads(done.stdout or done.stderr)


def test_versions_found_equal_share_what_either_loads(tmp_path: Path, daemon: Path) -> None:
    model = checkpoints.write("llama", tmp_path / "llama")
    old, new = version(tmp_path / "old", "0.32.1", "vllm"), version(tmp_path / "new", "0.32.2", "vllm")
    code, report = cache("parity", model, "--old", old, "--new", new)
    assert (code, report["equal"], report["recorded"], report["disparities"]) == (0, True, True, []), report
    assert (report["resident_layout"], report["this_layout"]) == ("vllm-0.32.1", "vllm-0.32.2")
    code, first = cache("prepare", model, "--new", old, "--socket", daemon)
    assert (code, len(first["loaded"]), first["both_fit"]) == (0, 1, True), first
    code, second = cache("prepare", model, "--new", new, "--socket", daemon)
    assert (code, second["loaded"], second["still_resident"]) == (0, [], first["loaded"]), second
    third = version(tmp_path / "third", "0.32.3", "vllm")
    code, beside = cache("prepare", model, "--new", third, "--socket", daemon)
    assert (code, len(beside["loaded"]), beside["still_resident"]) == (0, 1, first["loaded"]), beside


def test_a_release_that_was_not_tested_is_refused_by_name(tmp_path: Path, daemon: Path) -> None:
    model = checkpoints.write("llama", tmp_path / "llama")
    code, told = cache("prepare", model, "--new", version(tmp_path / "new", "9.9", "vllm"), "--socket", daemon)
    assert (code, told["kind"]) == (2, "cache_miss")
    assert "vLLM 9.9" in "".join(told["output"])
