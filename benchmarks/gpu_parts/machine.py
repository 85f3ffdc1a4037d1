"""The machine that a run's figures are true of."""

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from typing import Any

import torch


def describe_machine(device: str) -> dict[str, Any]:
    """GPU, drivers, versions and imports' cost. Does not touch the GPU through CUDA."""
    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "kernel": platform.release(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "versions": {name: _version(name) for name in ("triton", "cuda-bindings", "nvidia-ml-py", "msgspec")},
        "clients": "timed attaches run in fresh interpreters: imports done and a CUDA context made before the clock",
    }
    if device == "cuda":
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        found["gpu"] = pynvml.nvmlDeviceGetName(handle)
        found["gpu_memory"] = pynvml.nvmlDeviceGetMemoryInfo(handle).total
        found["driver"] = pynvml.nvmlSystemGetDriverVersion()
        found["cuda_driver"] = pynvml.nvmlSystemGetCudaDriverVersion()
        pynvml.nvmlShutdown()
        found["imports_s"] = _imports()
    return found


def _imports() -> dict[str, float]:
    """Seconds that imports take in a fresh interpreter, one after the other."""
    code = (
        "import time\n"
        "for name in ('torch', 'weightcache.client', 'cuda.bindings.driver', 'weightcache.arena.cuda_vmm', 'triton'):\n"
        "    t = time.perf_counter(); __import__(name); print(name, time.perf_counter() - t)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name: float(seconds) for name, seconds in (line.split() for line in done.stdout.splitlines())}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    with open("/proc/cpuinfo") as file:
        return next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "unknown")
