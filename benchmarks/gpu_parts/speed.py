"""Whether weights compute as fast from a read-only mapping as from ordinary memory."""

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

ROUNDS = 9
REPLAYS = 20


def compare(model: nn.Module) -> dict[str, Any]:
    """Times on the mapped weights of a Llama-shaped model, and on a private copy of them.

    Returns:
        By operation: median seconds ``mapped`` and ``ordinary``, and their ratio.
    """
    mapped = _matrices(model)
    ordinary = [[matrix.clone() for matrix in layer] for layer in mapped]
    device = mapped[0][0].device
    token = torch.randn(1, 4096, dtype=torch.bfloat16, device=device) * 0.01
    batch = torch.randn(4096, 4096, dtype=torch.bfloat16, device=device) * 0.01
    for layers in (mapped, ordinary):
        for layer in layers:
            for matrix in layer:
                assert matrix.is_contiguous()
    work: dict[str, Callable[[list[list[torch.Tensor]]], Callable[[], None]]] = {
        "gemm 4096x4096x14336": lambda layers: _captured(lambda: [batch @ layer[4].t() for layer in layers[:8]]),
        "gemv 4096x14336": lambda layers: _captured(lambda: [token @ layer[4].t() for layer in layers]),
        "decode step (weights of 32 layers, one token)": lambda layers: _captured(lambda: _step(layers, token)),
    }
    found = {}
    for name, make in work.items():
        replays = {"mapped": make(mapped), "ordinary": make(ordinary)}
        times: dict[str, list[float]] = {"mapped": [], "ordinary": []}
        for _ in range(ROUNDS):  # in turn, so that a drifting clock meets both
            for kind, replay in replays.items():
                times[kind].append(_seconds(replay))
        medians = {kind: statistics.median(values) for kind, values in times.items()}
        found[name] = {**medians, "ratio": medians["mapped"] / medians["ordinary"], "n": ROUNDS * REPLAYS}
    return found


def _matrices(model: nn.Module) -> list[list[torch.Tensor]]:
    return [[weight.weight.detach() for weight in layer.matrices] for layer in model.layers]


def _step(layers: list[list[torch.Tensor]], token: torch.Tensor) -> torch.Tensor:
    """A decode step without its attention scores: what reads weights."""
    x = token
    for q, k, v, o, gate, up, down in layers:
        normed = nn.functional.rms_norm(x, (4096,))
        heads = normed @ q.t()
        heads = heads + (normed @ k.t() + normed @ v.t()).repeat(1, 4)
        x = x + heads @ o.t()
        normed = nn.functional.rms_norm(x, (4096,))
        x = x + (nn.functional.silu(normed @ gate.t()) * (normed @ up.t())) @ down.t()
    return x


def _captured(work: Callable[[], object]) -> Callable[[], None]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def _seconds(replay: Callable[[], None]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    replay()
    start.record()
    for _ in range(REPLAYS):
        replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000 / REPLAYS
