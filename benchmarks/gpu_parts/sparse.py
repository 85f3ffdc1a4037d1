"""A checkpoint larger than the disk: files with real headers, and holes where nearly all of the weights would be.

Each tensor begins with its number and is zero behind it. Reading a hole costs what reading from a very fast disk does:
where the bytes come from makes no difference to what a loader takes of the GPU's memory.
"""

import json
import struct
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from gpu_parts import models
from gpu_parts.processes import Talk

SHARD_BYTES: Final = 4 << 30
_NAMES: Final = {torch.bfloat16: "BF16", torch.float32: "F32"}


def write(talk: Talk, shape: models.Shape, folder: Path) -> dict[str, Any]:
    """The files of a model's parameters; bytes and files."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["Benchmark"], "model_type": "benchmark"}))
    shards: list[list[tuple[int, str, torch.Tensor]]] = [[]]
    size = total = 0
    for number, (name, tensor) in enumerate(models.skeleton(shape).named_parameters()):
        if size + tensor.nbytes > SHARD_BYTES and shards[-1]:
            shards.append([])
            size = 0
        shards[-1].append((number, name, tensor))
        size += tensor.nbytes
        total += tensor.nbytes
    index = {}
    for count, members in enumerate(shards):
        file = f"model-{count + 1:05}-of-{len(shards):05}.safetensors"
        _write_shard(folder / file, members)
        index |= {name: file for _, name, _ in members}
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    on_disk = sum(file.stat().st_blocks * 512 for file in folder.iterdir())
    return {"bytes": total, "files": len(shards), "on_disk": on_disk}


def place(model: nn.Module, tensors: dict[str, torch.Tensor], where: torch.device) -> None:
    """Bind a model to what was read, and give its buffers their values."""
    parameters = dict(model.named_parameters())
    for name, tensor in tensors.items():
        module = model.get_submodule(name.rpartition(".")[0])
        assert (parameters[name].shape, parameters[name].dtype) == (tensor.shape, tensor.dtype)
        module._parameters[name.rpartition(".")[2]] = nn.Parameter(tensor, requires_grad=False)
    for name, buffer in list(model.named_buffers()):
        module = model.get_submodule(name.rpartition(".")[0])
        module._buffers[name.rpartition(".")[2]] = torch.ones(buffer.shape, dtype=buffer.dtype, device=where)


def differing(model: nn.Module) -> list[str]:
    """Names of the tensors that are not what the files hold."""
    wrong = []
    for number, (name, tensor) in enumerate(model.named_parameters()):
        flat = tensor.detach().view(-1).view(torch.uint8)
        head = bytes(flat[:8].tolist())
        if head != struct.pack("<Q", number + 1) or bool(flat[8:].any()):
            wrong.append(name)
    return wrong + [name for name, buffer in model.named_buffers() if not bool((buffer == 1).all())]


def _write_shard(path: Path, members: list[tuple[int, str, torch.Tensor]]) -> None:
    header, end, starts = {}, 0, []
    for number, name, tensor in members:
        starts.append((number, end))
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        begin = file.tell()
        file.truncate(begin + end)
        for number, start in starts:
            file.seek(begin + start)
            file.write(struct.pack("<Q", number + 1))
