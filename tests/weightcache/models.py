"""Tiny models with everything that makes binding hard, identities for them, and what they hold in plain data."""

import hashlib
from typing import Any, NamedTuple

import torch
from torch import nn

from weightcache.attachment import Loader, Progress
from weightcache.binding import walk
from weightcache.fingerprint import CacheConfig


def _weight(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


class Linear(nn.Module):
    """Not torch's own, whose initialisation on the meta device imports a compiler."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = _weight(rows, columns)


class Attention(nn.Module):
    """A weight in bf16, and one in FP8 with its scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = Linear(width, width)
        self.packed = _weight(width, width, dtype=torch.float8_e4m3fn)
        self.scale = _weight(dtype=torch.float32)


class Tiny(nn.Module):
    """Tied embeddings, a buffer in no checkpoint, a counter, an empty tensor, and an attribute that is a parameter."""

    def __init__(self, width: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.embed = Linear(8, width)
        self.layers = nn.ModuleList(Attention(width) for _ in range(layers))
        self.head = Linear(8, width)
        self.head.weight = self.embed.weight
        self.empty = _weight(0, width, dtype=torch.float32)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        frequencies = torch.tensor([10_000 ** (-index / width) for index in range(0, width, 2)])
        self.register_buffer("inv_freq", frequencies, persistent=False)
        self.by_name = {"embedding": self.embed.weight}


def skeleton(**sizes: int) -> Tiny:
    with torch.device("meta"):
        return Tiny(**sizes)


def fill(model: nn.Module, seed: int = 0) -> None:
    """Give every parameter of a real model values that follow from the seed; buffers keep theirs."""
    source = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        values = torch.randn(parameter.shape, generator=source)
        parameter.data.copy_(values.to(parameter.dtype))


def become(model: nn.Module, loaded: nn.Module) -> None:
    """Make the skeleton what was loaded, as an engine's loader does."""
    model.__dict__.clear()
    model.__dict__.update(loaded.__dict__)


def loader(model: nn.Module, seed: int = 0, **sizes: int) -> Loader:
    """Loads a tiny model "from disk" in four steps."""

    def load(progress: Progress) -> None:
        loaded = Tiny(**sizes)
        for step in range(5):
            progress(step, 4)
        fill(loaded, seed)
        become(model, loaded)

    return load


def config(name: str = "tiny", **changes: Any) -> CacheConfig:
    """The identity of a tiny model's weights."""
    fields: dict[str, Any] = {
        "model_path": f"/models/{name}",
        "model_arch": "Tiny",
        "checkpoint_digest": f"digest of {name}",
        "dtype": "bfloat16",
        "torch_version": torch.__version__,
        "engine": "test",
        "layout_id": "test-1",
    }
    return CacheConfig(**{**fields, **changes})


class Facts(NamedTuple):
    """All that can be told of a tensor but where it is."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    content: str


def contents(model: nn.Module) -> dict[str, Facts]:
    """Every tensor reachable from a model, by name."""
    found = walk(model)
    kinds = {}
    for place in found.places:
        persistent = place.key not in place.module._non_persistent_buffers_set
        kinds[place.name] = "parameter" if place.is_parameter else "buffer" if persistent else "non_persistent_buffer"
    tensors = [(place.name, place.tensor) for place in found.places] + [(s.name, s.tensor) for s in found.strays]
    return {name: _facts(kinds.get(name, "attribute"), tensor) for name, tensor in tensors}


def bytes_of(tensor: torch.Tensor) -> bytes:
    """What a tensor says, row by row."""
    content = tensor.detach().contiguous().reshape(-1)
    return content.view(torch.uint8).numpy().tobytes() if content.numel() else b""


def _facts(kind: str, tensor: torch.Tensor) -> Facts:
    digest = hashlib.sha256(bytes_of(tensor)).hexdigest()
    return Facts(kind, str(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride()), digest)
