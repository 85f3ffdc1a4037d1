"""The form of a model of transformers: which layers hold block-wise FP8, and which part of each tensor its rank holds.

A model takes its form on the meta device, before anything is loaded or mapped, so that a skeleton and a loaded model
have the same tensors. It is known from the config alone: on a hit no weight file is opened.
"""

import re
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from weightcache.binding import walk
from weightcache.block_scale import SUFFIX
from weightcache.checkpoint import DTYPES, Checkpoint, Folder, TensorInfo
from weightcache.checkpoint.refusal import refusal
from weightcache.errors import ConfigError
from weightcache.integrations.block_fp8 import experts_that_do_not_fit, store_in_fp8
from weightcache.quantization import Quantization, Verdict
from weightcache.quantization import of as quantization_of
from weightcache.sharding import Plan, Target, plan_shards, plan_tensors

_STORED_AS: Final = {dtype.torch: name for name, dtype in DTYPES.items()}
_HEADS: Final = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads", "v_proj": "num_key_value_heads"}


class Form(NamedTuple):
    """See the top of this module.

    Attributes:
        quantization: what the config announces.
        tp_size: how many ranks share the model.
        tp_rank: which of them this is.
    """

    quantization: Quantization
    tp_size: int = 1
    tp_rank: int = 0

    @classmethod
    def of(cls, folder: Folder, tp_size: int = 1, tp_rank: int = 0) -> "Form":
        """The form of the model in a folder, for one rank.

        Raises:
            ConfigError: ``tp_rank``: there is no such rank; ``shard_quantization``: weights like these cannot be cut.
            CheckpointError: ``config_invalid``.
        """
        if not 0 <= tp_rank < tp_size:
            raise ConfigError(
                "tp_rank", "there is no such rank", expected=f"0 to {tp_size - 1} of at least 1", found=tp_rank
            )
        return cls(quantization_of(folder), tp_size, tp_rank)._checked()

    def _checked(self) -> "Form":
        if self.tp_size > 1 and self.quantization.verdict is not None:
            raise ConfigError(
                "shard_quantization",
                f"{self.quantization.verdict.key} decides that these weights cannot be cut",
                expected="unquantised or block-wise fp8 weights",
                found=self.quantization.method,
                remedy="Load this model without tensor parallelism",
            )
        return self

    def fitting(self, model: Any) -> "Form":
        """The form that a model can take: what does not fit is left to transformers, and not shared."""
        experts = experts_that_do_not_fit(model, self._block) if self._block else None
        if experts is None:
            return self
        verdict = Verdict("other", experts, "halves that end inside a block")
        return Form(self.quantization._replace(verdict=verdict), self.tp_size, self.tp_rank)._checked()

    @property
    def is_whole_and_plain(self) -> bool:
        """Whether the model is as transformers builds it."""
        return self.tp_size == 1 and self._block is None

    @property
    def _block(self) -> tuple[int, int] | None:
        return self.quantization.block_size if self.quantization.verdict is None else None

    def give(self, model: Any) -> None:
        """Give a model on the meta device this form.

        Raises:
            ConfigError: as `weightcache.sharding.plan_tensors`, and ``shard_mismatch`` for attention heads.
        """
        if self._block is not None:
            store_in_fp8(model, self._block, self.quantization.skipped)
        if self.tp_size > 1:
            _check_heads(model, self.tp_size)
            self._narrow(model)

    def _narrow(self, model: Any) -> None:
        """Replace every parameter that is cut by one of the shape of this rank's part."""
        tensors = {
            name: TensorInfo("", _STORED_AS[str(it.dtype).removeprefix("torch.")], tuple(it.shape), 0, 0)
            for name, it in model.named_parameters()  # one name each: what is tied is cut as its first name says
        }
        plan = plan_tensors(tensors, model.tp_plan, self.tp_size, self._block)
        if not plan.splits:
            raise ConfigError(
                "shard_plan",
                f"transformers has no plan by which ranks could share a {type(model).__name__}",
                expected="a tp_plan of its own",
                found="none, so every rank would hold the whole model",
                remedy="Load this model without tensor parallelism",
            )
        narrow: dict[int, nn.Parameter] = {}
        for place in walk(model).places:
            part = plan.part(place.name, self.tp_rank) if place.name in tensors else None
            if part is not None:
                values = torch.empty(part.shape(tuple(place.tensor.shape)), dtype=place.tensor.dtype, device="meta")
                narrow[id(place.tensor)] = nn.Parameter(values, requires_grad=False)
            if id(place.tensor) in narrow:
                place.holder[place.key] = narrow[id(place.tensor)]

    def plan(self, model: Any, checkpoint: Checkpoint) -> Plan | None:
        """How the files are cut for a model of this form, or None where all of them is read.

        Raises:
            ConfigError: as `weightcache.sharding.plan_tensors`.
        """
        if self.tp_size == 1:
            return None
        return plan_shards(checkpoint, model.tp_plan, self.tp_size, self._block, _targets(model, checkpoint))

    def check(self, model: Any, checkpoint: Checkpoint) -> None:
        """Check that the files hold in FP8 what the model does, and nothing else: no loader may convert in silence.

        Raises:
            CheckpointError: ``quant_conflict``, naming the tensor.
        """
        if self._block is None:
            return
        own = dict(model.named_parameters(remove_duplicate=False))
        for name, target in _targets(model, checkpoint).items():
            info, parameter = checkpoint.tensors[name], own.get(target.name)
            if parameter is not None and (info.dtype == "F8_E4M3") != (parameter.dtype == torch.float8_e4m3fn):
                raise refusal(
                    "quant_conflict",
                    f"{name} in {info.file} is stored otherwise than the config says",
                    expected=_STORED_AS[str(parameter.dtype).removeprefix("torch.")],
                    found=info.dtype,
                    remedy="List every layer that is stored plain in modules_to_not_convert",
                    file=info.file,
                    tensor=name,
                )


def _check_heads(model: Any, tp_size: int) -> None:
    """Check that no attention head would be cut in two: a width may divide where the number of heads does not."""
    config = model.config.get_text_config()
    for pattern, style in model.tp_plan.items():
        count = getattr(config, _HEADS.get(pattern.rpartition(".")[2], ""), None)
        if style == "colwise" and isinstance(count, int) and count % tp_size:
            raise ConfigError(
                "shard_mismatch",
                f"{pattern} cannot be shared out to {tp_size} ranks",
                expected=f"a number of heads that {tp_size} divides",
                found=f"{count} heads",
                remedy=f"Choose a tensor parallel size that divides {count}",
                layer=pattern,
            )


def conversions(model: Any) -> list[Any]:
    """How transformers names and merges what is in files, and likewise the scales of what it merges."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    mapping: list[Any] = []
    scales = [name for name, _ in model.named_parameters() if name.endswith(SUFFIX)]
    for each in get_model_conversion_mapping(model, add_legacy=False):
        mapping.append(each)
        if isinstance(each, WeightConverter):
            sources, targets = each._original_source_patterns, each._original_target_patterns
            if any(re.search(f"{targets[0]}{SUFFIX}$", name) for name in scales):
                with_scales = [f"{it}{SUFFIX}" for it in sources], [f"{it}{SUFFIX}" for it in targets]
                mapping.append(each.copy(*with_scales, operations=list(each.operations)))
    return mapping


def _targets(model: Any, checkpoint: Checkpoint) -> dict[str, Target]:
    """What transformers makes of each tensor in the files."""
    from transformers.core_model_loading import (
        Concatenate,
        MergeModulelist,
        WeightConverter,
        WeightRenaming,
        rename_source_key,
    )

    mapping = conversions(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    own, prefix = model.state_dict(), model.base_model_prefix
    targets = {}
    for name in checkpoint.tensors:
        target, pattern = rename_source_key(name, renamings, converters, prefix, own)
        if target not in own and name in own:
            target, pattern = rename_source_key(name, [], [], prefix, own)
        converter = by_pattern.get(pattern) if pattern else None
        steps = converter.operations if converter else []
        others = [type(step).__name__ for step in steps if not isinstance(step, MergeModulelist | Concatenate)]
        merged = any(isinstance(step, Concatenate) for step in steps)
        targets[name] = Target(target, merged, ", ".join(others))
    return targets
