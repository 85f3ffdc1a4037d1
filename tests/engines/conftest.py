"""Tests with real engines: run where one is installed (``make test-engines``), not collected elsewhere."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fixtures.daemon import running_daemon

if importlib.util.find_spec("sglang"):
    collect_ignore_glob = ["test_vllm*.py"]

    import torch

    # SGLang imports torchvision, whose build for CPUs no registry has; it wants these of its operators declared.
    for operator in ("nms", "qnms"):
        torch.library.define(f"torchvision::{operator}", "(Tensor x) -> Tensor")
elif importlib.util.find_spec("vllm"):
    collect_ignore_glob = ["test_sglang.py"]
else:
    collect_ignore_glob = ["test_*.py"]

# vLLM compiles the counting of log-probabilities on the first request for one, which takes longer than all tests here.
os.environ["TORCHDYNAMO_DISABLE"] = "1"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A real daemon; yields its socket."""
    monkeypatch.setenv("READMIT_RUNTIME", str(tmp_path / "r"))
    monkeypatch.setenv("READMIT_STATE", str(tmp_path / "s"))
    with running_daemon(tmp_path / "cache.sock") as socket:
        yield socket
