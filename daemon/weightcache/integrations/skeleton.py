"""A model that an engine's own classes have built without memory for its weights, for a mapping or a load to fill."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from weightcache.errors import CacheMiss

_UNFILLED: Final = frozenset({torch.empty, torch.empty_permuted, torch.empty_strided})


class Unfilled(TorchFunctionMode):
    """Inside it, tensors that are made to be filled later are on the meta device; those that are computed are real.

    For models that look at what they compute as they are built, such as the map of a rank's experts.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func in _UNFILLED and options.get("device") is None:
            options["device"] = "meta"
        return func(*args, **options)


def build(make: Callable[[], nn.Module], target: torch.device, again: Callable[[], None] = lambda: None) -> nn.Module:
    """Build a model without memory for its weights.

    Args:
        make: makes it, of tensors on whatever device is in force.
        target: where its weights will be.
        again: called after a failure, before it is made once more.

    Raises:
        CacheMiss: ``state_unrestorable``: it needs the memory.
    """
    failure: Exception | None = None
    for devices in ((torch.device("meta"),), (target, Unfilled())):
        try:
            with contextlib.ExitStack() as contexts:
                for device in devices:
                    contexts.enter_context(device)
                return make()
        except Exception as error:  # noqa: BLE001 - a model may do anything with its tensors, and fails as it likes
            failure = error
            again()
    raise CacheMiss(
        "state_unrestorable",
        f"the model cannot be built without memory for its weights: {type(failure).__name__}: {failure}",
        remedy="Start this model with the weight cache off (mode off)",
    )


def nbytes(model: nn.Module) -> int:
    """Bytes of its parameters and buffers, whether they are there or not."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def become(skeleton: nn.Module, loaded: nn.Module) -> None:
    """Give the skeleton the state of a model of its class: one state under two objects.

    Whoever holds the skeleton now holds the loaded model.
    """
    object.__setattr__(skeleton, "__dict__", loaded.__dict__)
