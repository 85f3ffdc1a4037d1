"""Tests with real engines: run where one is installed (``make test-engines``), not collected elsewhere."""

import importlib.util
import os

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
