"""Sharding: which part of every tensor a tensor-parallel rank holds, decided from headers before anything loads.

A weight is cut by its rows (column-parallel: outputs) or by its columns (row-parallel: inputs). Several layers stored
as one (gate and up, or q, k and v) are cut each by itself. Block-wise scales are cut where the weight's own blocks end:
a cut that falls inside a block cannot be made, which is an error here and not deep in a layer.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from weightcache import block_scale
from weightcache.checkpoint import Checkpoint, Part, TensorInfo, Tie
from weightcache.checkpoint.part import Range
from weightcache.errors import ConfigError

if TYPE_CHECKING:
    import torch


class Split(NamedTuple):
    """How a tensor is cut.

    Attributes:
        dim: along which dimension, counted from the end.
        parts: the layers stored in it as one, in proportion; each is cut by itself.
    """

    dim: int
    parts: tuple[int, ...] = (1,)


class Target(NamedTuple):
    """What a tensor of the files becomes in the model.

    Attributes:
        name: the model's name for it, which the plan is about.
        merged: whether several tensors become that one, side by side. Each is then cut by itself, before.
        rearranged: what else is done to it, in words; a part of it would become something else.
    """

    name: str
    merged: bool = False
    rearranged: str = ""


ROWS: Final = Split(-2)
COLUMNS: Final = Split(-1)

_CUT: Final = {
    "colwise": ROWS,
    "rowwise": COLUMNS,
    "packed_colwise": Split(-2, (1, 1)),
    "packed_rowwise": Split(-1, (1, 1)),
    "embedding_rowwise": ROWS,
    "embedding_colwise": COLUMNS,
}
_WITH_COMMUNICATION: Final = ("_gather_output", "_split_input", "_rep")
"""Endings of styles that say what happens to inputs and outputs; the weight is cut all the same."""

_WHOLE: Final = frozenset(
    {
        "replicate", "replicated_with_grad_allreduce", "sequence_parallel", "all_reduce", "moe_tp_experts",
        "moe_identity_expert", "mla_kv_a_proj", "local_params",
    }
)  # fmt: skip
"""Styles of transformers' ``tp_plan`` that leave a weight whole on every rank."""

_NUMBER: Final = re.compile(r"(?<![^.])[0-9]+(?![^.])")


class Plan(NamedTuple):
    """Which tensors are cut and how, for so many ranks. A tensor that is not in ``splits`` is whole on every rank.

    Attributes:
        tp_size: the number of ranks.
        splits: by the tensor's name; scales and biases have entries of their own.
        shapes: the whole tensors' shapes.
        block: the quantisation's block, or None.
    """

    tp_size: int
    splits: Mapping[str, Split]
    shapes: Mapping[str, tuple[int, ...]]
    block: block_scale.Block | None

    def ranges(self, name: str, tp_rank: int) -> tuple[Range, ...] | None:
        """The ranges of a tensor that a rank holds, or None if it holds all."""
        split = self.splits.get(name)
        if split is None:
            return None
        if self.block is None or not name.endswith(block_scale.SUFFIX):
            return _ranges(self.shapes[name][split.dim], split, self.tp_size, tp_rank)
        weight, side = self.shapes[name.removesuffix(block_scale.SUFFIX)], self.block[split.dim]
        cut = _ranges(weight[split.dim], split, self.tp_size, tp_rank)
        return tuple((begin // side, -(-end // side)) for begin, end in cut)

    def part(self, name: str, tp_rank: int) -> Part | None:
        """The part of a tensor that a rank holds, or None if it holds all."""
        ranges = self.ranges(name, tp_rank)
        return None if ranges is None or self.tp_size == 1 else Part(self.splits[name].dim, ranges)

    def parts(self, tp_rank: int) -> Callable[[str], Part | None]:
        """A rank's parts, for `weightcache.checkpoint.Checkpoint.read_parts`."""
        return lambda name: self.part(name, tp_rank)

    def shard(self, name: str, tensor: "torch.Tensor", tp_rank: int) -> "torch.Tensor":
        """A rank's part of a whole tensor; the tensor itself where the rank holds all of it."""
        import torch

        part = self.part(name, tp_rank)
        if part is None:
            return tensor
        pieces = [tensor.narrow(part.dim, begin, end - begin) for begin, end in part.ranges]
        return torch.cat([_bytes(piece) for piece in pieces], part.dim).view(tensor.dtype)

    def unshard(self, name: str, shards: "Sequence[torch.Tensor]") -> "torch.Tensor":
        """The whole tensor from all ranks' parts, in the order of ranks."""
        import torch

        if name not in self.splits or self.tp_size == 1:
            return shards[0]
        dim = self.splits[name].dim
        pieces: list[tuple[int, torch.Tensor]] = []
        for tp_rank, shard in enumerate(shards):
            at = 0
            for begin, end in self.ranges(name, tp_rank) or ():
                pieces.append((begin, _bytes(shard.narrow(dim, at, end - begin))))
                at += end - begin
        ordered = [piece for _, piece in sorted(pieces, key=lambda item: item[0])]
        return torch.cat(ordered, dim).view(shards[0].dtype)


def plan_shards(
    checkpoint: Checkpoint,
    styles: Mapping[str, str],
    tp_size: int,
    block: block_scale.Block | None = None,
    targets: Mapping[str, Target] | None = None,
) -> Plan:
    """Plan the shards of a checkpoint, and check that every cut can be made; see `plan_tensors`."""
    return plan_tensors(checkpoint.tensors, styles, tp_size, block, checkpoint.tie, targets)


def plan_tensors(
    tensors: Mapping[str, TensorInfo],
    styles: Mapping[str, str],
    tp_size: int,
    block: block_scale.Block | None = None,
    tie: Tie | None = None,
    targets: Mapping[str, Target] | None = None,
) -> Plan:
    """Plan the shards of tensors, and check that every cut can be made.

    Tied embeddings are cut alike, so that both names still mean one tensor on every rank.

    Args:
        tensors: their dtypes and shapes, by name.
        styles: layer name pattern to style, as in transformers' ``tp_plan``: ``layers.*.mlp.up_proj`` to ``colwise``.
        tp_size: the number of ranks.
        block: rows and columns of a block, for block-wise FP8.
        tie: head and embedding that share one tensor.
        targets: by name, what becomes of a tensor; where absent, it keeps its name.

    Raises:
        ConfigError: ``shard_mismatch`` where a dimension does not divide, ``shard_block_mismatch`` where a cut falls
            inside a block; both name the layer and the width per rank. ``shard_style`` for a style unknown here, and
            for a target that cannot be made of parts.
    """
    cuts = {pattern: _split_of(pattern, style) for pattern, style in styles.items()}
    splits: dict[str, Split] = {}
    for name, info in tensors.items():
        target = (targets or {}).get(name, Target(name))
        split = _find_split(target.name, info, cuts)
        if split is not None:
            splits[name] = _split_before(name, target, split)
    if tie is not None and tie.head is not None:
        splits.pop(tie.head, None)
        if tie.embedding in splits:
            splits[tie.head] = splits[tie.embedding]
    plan = Plan(tp_size, splits, {name: info.shape for name, info in tensors.items()}, block)
    for name in splits:
        _check(plan, name, tensors[name])
    return plan


def _split_before(name: str, target: Target, split: Split) -> Split:
    """How a tensor of the files is cut, so that what becomes of it is cut as `split` says."""
    one_for_all = target.merged and len(split.parts) == 1  # the cut would fall into one of those merged
    if target.rearranged or one_for_all:
        raise ConfigError(
            "shard_style",
            f"{name} becomes {target.name} in a way in which its parts cannot",
            expected="a tensor that is renamed, stacked or put beside others",
            found=target.rearranged or "a cut through several that were put side by side",
            remedy="Load this model without tensor parallelism",
            layer=target.name,
        )
    return split._replace(parts=(1,)) if target.merged else split


def _split_of(pattern: str, style: str) -> Split | None:
    if style in _WHOLE:
        return None
    for ending in _WITH_COMMUNICATION:
        style = style.removesuffix(ending)
    if style not in _CUT:
        raise ConfigError(
            "shard_style",
            f"the style of {pattern} is not known",
            expected=", ".join(sorted({*_CUT, *_WHOLE})),
            found=style,
            remedy="Load this model without tensor parallelism",
            layer=pattern,
        )
    return _CUT[style]


def _find_split(name: str, info: TensorInfo, cuts: Mapping[str, Split | None]) -> Split | None:
    """How a plan cuts a tensor. Patterns name layers, or tensors without a layer around them (experts)."""
    layer, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias", f"weight{block_scale.SUFFIX}"):
        layer = name.removesuffix(block_scale.SUFFIX)
    parts = _NUMBER.sub("*", layer).split(".")
    split = next((cuts[tail] for tail in _tails(parts) if tail in cuts), None)
    if split is None or kind != "bias":
        return split if len(info.shape) > 1 else None
    return split._replace(dim=-1) if split.dim == ROWS.dim else None


def _tails(parts: list[str]) -> Iterator[str]:
    """A name, and what is left of it without its first parts: plans leave out what is around the language model."""
    return (".".join(parts[start:]) for start in range(len(parts)))


def _check(plan: Plan, name: str, info: TensorInfo) -> None:
    split = plan.splits[name]
    if plan.tp_size == 1 or (plan.block is not None and name.endswith(block_scale.SUFFIX)):
        return  # scales follow their weight
    length = info.shape[split.dim]
    whole = sum(split.parts)
    for part in split.parts:
        size, rest = divmod(length * part, whole)
        width, short = divmod(size, plan.tp_size)
        if rest or short:
            raise ConfigError(
                "shard_mismatch",
                f"{name} cannot be shared out to {plan.tp_size} ranks",
                expected=f"a width that {plan.tp_size} divides",
                found=size if not rest else f"{length} in the proportion {split.parts}",
                remedy=f"Choose a tensor parallel size that divides {size}",
                layer=name,
                width=width,
            )
        side = None if plan.block is None or info.dtype != "F8_E4M3" else plan.block[split.dim]
        if side is not None and width % side:
            raise block_scale.block_mismatch(
                f"{name} cannot be shared out to {plan.tp_size} ranks: a rank's part would end inside a block",
                layer=name,
                file=info.file,
                tensor=name,
                width=width,
                block=plan.block or (0, 0),
                expected=f"a width per rank that is a multiple of {side}",
                found=width,
                remedy="Choose a smaller tensor parallel size",
            )


def _ranges(length: int, split: Split, tp_size: int, tp_rank: int) -> tuple[Range, ...]:
    if tp_size == 1:
        return ((0, length),)
    ranges = []
    start = 0
    for part in split.parts:
        size = length * part // sum(split.parts)
        width = size // tp_size
        ranges.append((start + tp_rank * width, start + (tp_rank + 1) * width))
        start += size
    return tuple(ranges)


def _bytes(tensor: "torch.Tensor") -> "torch.Tensor":
    """The same elements as bytes, which every operation knows, also for dtypes that few do."""
    import torch

    return tensor.contiguous().view(torch.uint8)
