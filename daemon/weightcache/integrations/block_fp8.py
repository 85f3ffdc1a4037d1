"""Layers whose weights stay in block-wise FP8 in memory, under the names that checkpoints and transformers give them.

transformers runs such layers with GPU kernels only, and without a GPU turns the weights into bf16 as it loads them:
twice the bytes, and private. These multiply by the dequantised weight, made anew for each call, on any device. That is
slow and exact: the numbers are those of a model that was dequantised as a whole.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from weightcache.block_scale import SUFFIX, Block, dequantize, scale_shape
from weightcache.skip_list import SkipList

_FP8 = torch.float8_e4m3fn


class BlockFP8Linear(nn.Linear):
    """A linear layer with ``weight`` of ``rows x columns`` in FP8 and ``weight_scale_inv``, one float32 a block.

    Args:
        plain: the layer that it replaces, on the meta device; its bias is kept.
        block: rows and columns of a block.
    """

    def __init__(self, plain: nn.Linear, block: Block) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.block = plain.in_features, plain.out_features, block
        shape = (self.out_features, self.in_features)
        self.weight = _parameter(shape, _FP8)
        self.weight_scale_inv = _parameter(scale_shape(shape, block), torch.float32)
        self.register_parameter("bias", plain.bias)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name that callers of nn.Linear may use
        """``input`` times the transposed weight, plus bias, in the dtype of ``input``."""
        weight = dequantize(self.weight, self.weight_scale_inv, self.block, input.dtype)
        return functional.linear(input, weight, self.bias)


def store_in_fp8(model: Any, block: Block, skipped: SkipList) -> None:
    """Replace the layers of a model of transformers that its checkpoint holds in block-wise FP8.

    Args:
        model: on the meta device.
        block: rows and columns of a block.
        skipped: the layers that stay as they are; the output head does in any case, as transformers has it.
    """
    head = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        if module is head or skipped.covering(name):
            continue
        if type(module) is nn.Linear:
            model.set_submodule(name, BlockFP8Linear(module, block))
        elif fused := _fused(name, module):
            _store_experts(module, block, fused)


def experts_that_do_not_fit(model: Any, block: Block) -> str | None:
    """The name of experts, one tensor for all of them, whose halves (gate and up) would share a block; None if none."""
    for name, module in model.named_modules():
        for key, it in _fused(name, module):
            if key.startswith("gate_up") and it.shape[-2] // 2 % block[0]:
                return f"{name}.{key}"
    return None


def _fused(name: str, module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters of a module of experts that hold one layer of all of them: ``experts x rows x columns``."""
    own = module.named_parameters(recurse=False) if name.endswith(".experts") else ()
    return [(key, it) for key, it in own if it.dim() == 3]


def _store_experts(experts: nn.Module, block: Block, fused: list[tuple[str, nn.Parameter]]) -> None:
    """Have experts hold FP8, and dequantise all of a layer for each call."""
    for key, it in fused:
        experts.register_parameter(key, _parameter(tuple(it.shape), _FP8))
        experts.register_parameter(f"{key}{SUFFIX}", _parameter(scale_shape(tuple(it.shape), block), torch.float32))
    plain: Any = type(experts)
    keys = [key for key, _ in fused]

    def forward(self: Any, hidden_states: torch.Tensor, *rest: Any, **named: Any) -> Any:
        stored = {key: self._parameters[key] for key in keys}
        try:
            for key, weight in stored.items():
                scales = self._parameters[f"{key}{SUFFIX}"]
                self._parameters[key] = dequantize(weight, scales, block, hidden_states.dtype)
            return plain.forward(self, hidden_states, *rest, **named)
        finally:
            self._parameters.update(stored)

    experts.__class__ = type(plain.__name__, (plain,), {"forward": forward, "__module__": plain.__module__})


def _parameter(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
