"""The path that engines ship today: one CUDA IPC handle a tensor, opened one by one and put in place by name.

As SGLang's weight cache does it: the holder owns the weights in ordinary GPU memory and exports them through torch's
reducers; the client rebuilds each tensor and assigns it by a dictionary look-up. Writable and unverified.
"""

import pickle
import socket
import statistics
import struct
import time
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import reduce_tensor

from gpu_parts import models
from gpu_parts.processes import Talk, cuda_context
from gpu_parts.report import Report


def holder(talk: Talk, shape: models.Shape, path: str) -> None:
    """Own the weights; for every connection export them anew, since torch's handles may be opened once."""
    where = torch.device("cuda", 0)
    cuda_context(where)
    model = models.skeleton(shape)
    models.fill(model, where)
    torch.cuda.synchronize()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    talk.send("loaded")
    while True:
        connection, _ = listener.accept()
        began = time.perf_counter()
        payload = bytes(
            ForkingPickler.dumps({name: reduce_tensor(tensor.detach()) for name, tensor in tensors.items()})
        )
        connection.sendall(struct.pack("Qd", len(payload), time.perf_counter() - began) + payload)
        connection.close()


def client(talk: Talk | None, shape: models.Shape, path: str) -> dict[str, Any]:
    """Ask for the handles, open every one and put every tensor in place."""
    cuda_context(torch.device("cuda", 0))
    model = models.skeleton(shape)
    asked = time.perf_counter()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        stream = connection.makefile("rb")
        size, export = struct.unpack("Qd", stream.read(16))
        payload = stream.read(size)
    began = time.perf_counter()
    handles = pickle.loads(payload)  # our own holder's
    read = time.perf_counter()
    opened = {name: rebuild(*arguments) for name, (rebuild, arguments) in handles.items()}
    mapped = time.perf_counter()
    modules = dict(model.named_modules())
    for name, tensor in opened.items():
        parent, _, leaf = name.rpartition(".")
        module = modules[parent]
        if leaf in module._parameters:
            module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
        else:
            module._buffers[leaf] = tensor.clone()
    torch.cuda.synchronize()
    done = time.perf_counter()
    return {
        "export": export,
        "wait": began - asked,
        "unpickle": read - began,
        "open": mapped - read,
        "bind": done - mapped,
        "total": done - began,
        "whole": done - asked,
    }


def compare(report: Report, ours: list[dict[str, Any]], theirs: list[dict[str, Any]], tensors: str) -> None:
    """Our attach against theirs: by medians, and the fastest process against the fastest, down to the slowest."""
    report.figure(f"attach, in turn with CUDA IPC, {tensors}", [it["attach_s"] for it in ours], "s")
    for part, what in (("export", "the holder's export"), ("total", "client"), ("whole", "from asking to bound")):
        report.figure(f"CUDA IPC, one handle a tensor, {tensors}: {what}", [it[part] for it in theirs], "s")
    for part, what in (("whole", "from asking to bound"), ("total", "its client alone")):
        bounds = {"at_least": 4, "aim": 8} if part == "whole" else {}
        work = f"faster than CUDA IPC a tensor, {tensors}, {what}"
        ratio = _median(theirs, part) / _median(ours, "attach_s")
        report.figure(work, [ratio], "times", **bounds)
        pairs = zip(_by_pace(theirs), _by_pace(ours), strict=False)
        ratios = [their[part] / our["attach_s"] for their, our in pairs]
        report.figure(f"  {work}, like with like", ratios, "times")


def _median(results: list[dict[str, Any]], part: str) -> float:
    return statistics.median(it[part] for it in results)


def _by_pace(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(results, key=lambda it: float(it["pace_s"]))
