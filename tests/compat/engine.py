"""A small engine of whatever release is on the path. It speaks only what a release promises to others.

Each line of its input is an order, a JSON object, and is answered by another one.
"""

import gc
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weightcache.client import attach
from weightcache.fingerprint import CacheConfig
from weightcache.journal import Context, Journal, boottime_ns, new_episode_id


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(32, 16, dtype=torch.bfloat16), requires_grad=False)
        self.packed = nn.Parameter(torch.empty(16, 16, dtype=torch.float8_e4m3fn), requires_grad=False)
        self.tied = self.weight
        self.register_buffer("frequencies", torch.arange(8, dtype=torch.float32), persistent=False)


def content(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted([*model.named_parameters(remove_duplicate=False), *model.named_buffers()]):
        digest.update(name.encode() + bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()))
    return digest.hexdigest()


def attached(order: dict[str, Any]) -> tuple[Model, dict[str, Any]]:
    with torch.device("meta"):
        model = Model()

    def load(progress: Any) -> None:
        loaded = Model()
        source = torch.Generator().manual_seed(len(order["name"]))
        for parameter in loaded.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=source).to(parameter.dtype))
        progress(1, 1)
        model.__dict__.clear()
        model.__dict__.update(loaded.__dict__)

    config = CacheConfig(
        model_path=f"/models/{order['name']}",
        model_arch="Model",
        checkpoint_digest=f"digest of {order['name']}",
        dtype="bfloat16",
        torch_version=torch.__version__,
        engine="test",
        layout_id="test-1",
    )
    episode = new_episode_id()
    journal = Journal(Path(order["journal"]), Context("n", order["slot"], episode, 1))
    began = {"cause": "first_start", "fault_boottime_ns": boottime_ns(), "fault_clock": "start", "previous": None}
    journal.append("episode_open", "first_start", began, context=Context("n", order["slot"], episode))
    journal.append("attempt_start")
    outcome = attach(model, config, load=load, load_bytes=1, socket=Path(order["socket"]), journal=journal, verify=1.0)
    journal.append("attempt_end", "ready")
    journal.append("episode_close", "ready", {"verified": True, "generation": outcome.generation})
    told = {"path": outcome.path, "reason": outcome.reason, "generation": outcome.generation}
    return model, {**told, "content": content(model)}


models: list[Model] = []
for line in sys.stdin:
    order = json.loads(line)
    if order["do"] == "attach":
        model, told = attached(order)
        models.append(model)
    elif order["do"] == "read":
        told = {"content": [content(model) for model in models]}
    else:
        models.clear()
        del model
        gc.collect()
        told = {}
    print(json.dumps(told), flush=True)
