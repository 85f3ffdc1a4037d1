"""Models in real shapes and with random bytes, rebuilt from their seeds wherever they are compared."""

from collections.abc import Iterator
from typing import Final, NamedTuple

import torch
from torch import nn

from weightcache import device
from weightcache.fingerprint import CacheConfig

GIB: Final = 1 << 30


class Shape(NamedTuple):
    """A model by its layers: what each layer holds, and what stands beside the layers. Sizes in elements of bf16."""

    name: str
    layers: int
    big: tuple[tuple[int, ...], ...]
    """Shapes of a layer's matrices, each in a module of its own."""
    small: int
    """A layer's vectors of 4096, each in a module of its own."""
    outer: tuple[tuple[int, ...], ...] = ()


def fused(gib: float) -> Shape:
    """2,000 tensors, as a rank of a mixture with fused experts: 80 layers of 2 fused matrices, 8 others, 15 vectors."""
    others = ((4096, 2048),) * 8
    rest = int(gib * GIB / 2 / 80) - 8 * 4096 * 2048 - 15 * 4096
    experts = rest // 3 // 4096
    return Shape(f"fused-{gib:g}GiB", 80, ((2 * experts, 4096), (experts, 4096), *others), 15)


def unfused(gib: float) -> Shape:
    """30,000 tensors: 60 layers of 160 experts with 3 matrices each, and 20 vectors."""
    rows = int(gib * GIB / 2 / 60 / 480) // 2048
    return Shape(f"unfused-{gib:g}GiB", 60, ((rows, 2048),) * 480, 20)


def llama_8b() -> Shape:
    """Llama 3 8B: 291 tensors, 15 GiB."""
    layer = ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336))
    return Shape("llama-8B", 32, layer, 2, ((128256, 4096), (128256, 4096), (4096,)))


def tiny() -> Shape:
    """A few MiB, for trying the machinery out."""
    return Shape("tiny", 3, ((64, 128),) * 5, 2, ((100, 128),))


class Weight(nn.Module):
    """One tensor, as a linear layer or a norm holds it."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=torch.bfloat16), requires_grad=False)


class Layer(nn.Module):
    """A layer's weights, and the buffer that a rotary embedding brings along."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.matrices = nn.ModuleList(Weight(dimensions) for dimensions in shape.big)
        self.norms = nn.ModuleList(Weight((4096,)) for _ in range(shape.small))
        self.register_buffer("inv_freq", torch.empty(64, dtype=torch.float32), persistent=False)


class Model(nn.Module):
    """Weights without a forward pass."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.outer = nn.ModuleList(Weight(dimensions) for dimensions in shape.outer)


def skeleton(shape: Shape) -> Model:
    """The model on the meta device."""
    with torch.device("meta"):
        return Model(shape)


def fill(model: nn.Module, where: torch.device) -> None:
    """Give every tensor its random bytes in private memory, as a loader would."""
    for number, module, kind, name, tensor in _tensors(model):
        value = content(tensor, number, where)
        if kind == "parameter":
            module._parameters[name] = nn.Parameter(value, requires_grad=False)
        else:
            module._buffers[name] = value


def content(tensor: torch.Tensor, number: int, where: torch.device) -> torch.Tensor:
    """The bytes that belong into the ``number``-th tensor of a model."""
    generator = torch.Generator(where).manual_seed(number)
    value = torch.empty(tensor.shape, dtype=tensor.dtype, device=where)
    words = value.view(-1).view(torch.int32 if value.nbytes % 4 == 0 else torch.int16)
    words.random_(generator=generator)
    return value


def differing(model: nn.Module) -> list[str]:
    """Names of the tensors that are not, byte for byte, what `fill` put there."""
    wrong = []
    for number, module, _, name, tensor in _tensors(model):
        expected = content(tensor, number, tensor.device)
        if not torch.equal(tensor.detach().view(-1).view(torch.uint8), expected.view(-1).view(torch.uint8)):
            wrong.append(f"{type(module).__name__}.{name} #{number}")
    return wrong


def size(model: nn.Module) -> int:
    """Bytes of every tensor together."""
    return sum(tensor.nbytes for *_, tensor in _tensors(model))


def count(model: nn.Module) -> int:
    return sum(1 for _ in _tensors(model))


def config(shape: Shape, where: torch.device) -> CacheConfig:
    """The identity of these weights on this device."""
    return CacheConfig(
        model_path=f"/models/{shape.name}",
        model_arch="Benchmark",
        checkpoint_digest=shape.name,
        dtype="bfloat16",
        device_capability=device.describe(where.index or 0).capability if where.type == "cuda" else None,
        torch_version=torch.__version__,
        engine="benchmark",
        layout_id="1",
    )


def _tensors(model: nn.Module) -> Iterator[tuple[int, nn.Module, str, str, torch.Tensor]]:
    number = 0
    for module in model.modules():
        for kind, held in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, tensor in list(held.items()):
                if tensor is not None:
                    yield number, module, kind, name, tensor
                    number += 1
