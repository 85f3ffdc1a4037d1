"""Processes of a benchmark: forked from one that has imported everything and never touched the GPU.

A forked client starts where an engine is once its imports are done; it makes a CUDA context of its own.
"""

import contextlib
import multiprocessing
import os
import select
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, Final

import torch

_fork: Final = multiprocessing.get_context("fork")


class Failed(RuntimeError):
    """A process ended without an answer, or answered with a traceback."""


class Process:
    """A forked process that answers once, and then may wait to be killed or told to go on.

    ``function(talk, *arguments)`` may call ``talk.send`` and ``talk.recv``; what it returns is its last answer.
    """

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._here, there = _fork.Pipe()
        self._process = _fork.Process(target=_run, args=(function, there, arguments), daemon=True)
        self._process.start()
        there.close()
        self.pid = self._process.pid or 0
        self._pidfd = os.pidfd_open(self.pid)

    def answer(self, timeout_s: float = 180.0) -> Any:
        """Its next answer."""
        if not self._here.poll(timeout_s):
            raise Failed(f"no answer within {timeout_s} s")
        try:
            kind, value = self._here.recv()
        except EOFError:
            self._process.join(10)
            raise Failed(f"the process ended with status {self._process.exitcode}") from None
        if kind == "failed":
            raise Failed(value)
        return value

    def tell(self, value: Any) -> None:
        self._here.send(value)

    def kill(self) -> float:
        """SIGKILL it; seconds until its pidfd fired."""
        began = time.perf_counter()
        os.kill(self.pid, signal.SIGKILL)
        select.select([self._pidfd], [], [])
        seconds = time.perf_counter() - began
        self.close()
        return seconds

    def end(self) -> None:
        """Wait until it ends by itself."""
        self._process.join(60)
        if self._process.exitcode is None:
            self.kill()
            raise Failed("the process did not end")
        self.close()

    def close(self) -> None:
        self._process.join(60)
        self._here.close()
        with contextlib.suppress(OSError):
            os.close(self._pidfd)

    @property
    def exit_code(self) -> int | None:
        self._process.join(30)
        return self._process.exitcode


class Talk:
    """A forked process's end of the conversation."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, value: Any) -> None:
        self._connection.send(("answer", value))

    def recv(self) -> Any:
        return self._connection.recv()


def call(function: Callable[..., Any], *arguments: Any, timeout_s: float = 180.0) -> Any:
    """The result of a function in a fresh process."""
    process = Process(function, *arguments)
    try:
        return process.answer(timeout_s)
    finally:
        if process.exit_code is None:
            process.kill()
        else:
            process.close()


def _run(function: Callable[..., Any], connection: Connection, arguments: tuple[Any, ...]) -> None:
    talk = Talk(connection)
    try:
        talk.send(function(talk, *arguments))
    except BaseException:  # noqa: BLE001 - whatever it was, the benchmark must hear of it
        connection.send(("failed", traceback.format_exc()))
    # Python's own way out would run the destructors of a CUDA context that may be broken.
    os._exit(0)


def cuda_context(where: torch.device) -> float:
    """Make this process's CUDA context; seconds."""
    began = time.perf_counter()
    if where.type == "cuda":
        torch.zeros(1, device=where)
        torch.cuda.synchronize()
    return time.perf_counter() - began


@contextlib.contextmanager
def gpu_memory_peak(out: dict[str, Any]) -> Iterator[None]:
    """Sample the GPU's used bytes (NVML) beside a block; puts ``before``, ``peak`` and ``after`` into ``out``."""
    sampler = Process(_sample)
    out["before"] = sampler.answer()
    try:
        yield
    finally:
        sampler.tell("stop")
        out["peak"], out["after"] = sampler.answer()
        sampler.end()


def _sample(talk: Talk) -> tuple[int, int]:
    used = used_bytes()
    talk.send(used)
    peak = used
    while not talk._connection.poll(0.002):
        used = used_bytes()
        peak = max(peak, used)
    return peak, used_bytes()


_nvml: list[Any] = []


def gpu_memory() -> list[int]:
    """Bytes of every GPU that anybody uses, as NVML counts them. No CUDA context."""
    import pynvml

    pynvml.nvmlInit()
    handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
    return [int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles]


def used_bytes() -> int:
    """Bytes of the first GPU that anybody uses, as NVML counts them. No CUDA context."""
    import pynvml

    if not _nvml or _nvml[0] != os.getpid():
        pynvml.nvmlInit()
        _nvml[:] = [os.getpid(), pynvml.nvmlDeviceGetHandleByIndex(0)]
    return int(pynvml.nvmlDeviceGetMemoryInfo(_nvml[1]).used)
