"""The block scale: one factor for each block of a block-wise quantised weight, and where blocks may be cut.

A weight W of ``rows x columns`` in blocks of ``block_rows x block_columns`` has its scales in ``W_scale_inv``, of
``ceil(rows / block_rows) x ceil(columns / block_columns)``; the last block of a side may be short. Leading dimensions
(experts) are the same in both. Source: the checkpoints of DeepSeek-V3, whose layout vLLM, SGLang and transformers read.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from weightcache.checkpoint import TensorInfo
from weightcache.errors import ConfigError

if TYPE_CHECKING:
    import torch

SUFFIX: Final = "_scale_inv"
"""What the name of a weight's scales has behind the weight's own."""

Block = tuple[int, int]


def scale_shape(shape: tuple[int, ...], block: Block) -> tuple[int, ...]:
    """The shape of the scales of a weight with this shape; a vector counts as one row."""
    *leading, rows, columns = shape if len(shape) > 1 else (1, *(shape or (1,)))
    return (*leading, -(-rows // block[0]), -(-columns // block[1]))


def dequantize(weight: "torch.Tensor", scales: "torch.Tensor", block: Block, dtype: "torch.dtype") -> "torch.Tensor":
    """The numbers that a block-wise quantised weight stands for: each times its block's scale.

    Args:
        weight: ``(..., rows, columns)`` in FP8.
        scales: as `scale_shape` says, of any floating dtype.
        block: rows and columns of a block.
        dtype: of the result; the product is taken in it.
    """
    rows, columns = weight.shape[-2:]
    factors = scales.to(dtype).repeat_interleave(block[0], -2)[..., :rows, :]
    return weight.to(dtype).mul_(factors.repeat_interleave(block[1], -1)[..., :columns])


def check_scales(tensors: Mapping[str, TensorInfo], block: Block) -> None:
    """Check that every scale has the shape that its weight and the block size call for.

    Raises:
        ConfigError: ``shard_block_mismatch``, naming the layer.
    """
    for name, scale in tensors.items():
        weight = tensors.get(name.removesuffix(SUFFIX)) if name.endswith(SUFFIX) else None
        if weight is None:
            continue
        expected = scale_shape(weight.shape, block)
        if scale.shape != expected:
            raise block_mismatch(
                f"{name} in {scale.file} does not fit its weight",
                layer=name.removesuffix(SUFFIX),
                file=scale.file,
                tensor=name,
                width=max(weight.shape, default=1),
                block=block,
                expected=f"{list(expected)} for a weight of {list(weight.shape)} in blocks of {list(block)}",
                found=list(scale.shape),
                remedy="Correct weight_block_size, or download the file again",
            )


def block_mismatch(
    message: str,
    *,
    layer: str,
    file: str,
    tensor: str,
    width: int,
    block: Block,
    expected: object,
    found: object,
    remedy: str,
) -> ConfigError:
    """A `ConfigError` for blocks that do not fit. ``data`` carries layer, width in elements and block size."""
    return ConfigError(
        "shard_block_mismatch",
        message,
        expected=expected,
        found=found,
        remedy=remedy,
        layer=layer,
        file=file,
        tensor=tensor,
        width=width,
        block=block,
    )
