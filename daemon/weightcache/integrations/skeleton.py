"""A model that an engine's own classes have built on the meta device, to be filled by a mapping or by a load."""

from torch import nn


def nbytes(model: nn.Module) -> int:
    """Bytes of its parameters and buffers, whether they are there or not."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def become(skeleton: nn.Module, loaded: nn.Module) -> None:
    """Give the skeleton the state of a model of its class: one state under two objects.

    Whoever holds the skeleton now holds the loaded model.
    """
    object.__setattr__(skeleton, "__dict__", loaded.__dict__)
