"""The path that engines ship today: one CUDA IPC handle a tensor, opened one by one and put in place by name.

As SGLang's weight cache does it: the holder owns the weights in ordinary GPU memory and exports them through torch's
reducers; the client rebuilds each tensor and assigns it by a dictionary look-up. Writable and unverified.
"""

import pickle
import time
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import reduce_tensor

from gpu_parts import models
from gpu_parts.processes import Talk, cuda_context


def holder(talk: Talk, shape: models.Shape) -> None:
    """Own the weights; for every request export them anew, since torch's handles may be opened once."""
    where = torch.device("cuda", 0)
    cuda_context(where)
    model = models.skeleton(shape)
    models.fill(model, where)
    torch.cuda.synchronize()
    talk.send("loaded")
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    while talk.recv() == "export":
        began = time.perf_counter()
        payload = bytes(
            ForkingPickler.dumps({name: reduce_tensor(tensor.detach()) for name, tensor in tensors.items()})
        )
        talk.send((time.perf_counter() - began, payload))


def client(talk: Talk | None, shape: models.Shape, payload: bytes) -> dict[str, Any]:
    """Open every handle and put every tensor in place."""
    cuda_context(torch.device("cuda", 0))
    model = models.skeleton(shape)
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
    return {"unpickle": read - began, "open": mapped - read, "bind": done - mapped, "total": done - began}
