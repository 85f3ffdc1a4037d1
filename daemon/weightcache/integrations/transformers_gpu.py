"""Loading a causal language model of transformers straight onto a GPU.

Transformers renames, merges and ties tensors as an architecture wants. What it only has to put in place it gets as a
stand-in: of the right shape and dtype, and without bytes. Where the stand-in comes out again goes the tensor itself, in
the arena that it was read into and that is published.
"""

import logging
from typing import Any

import torch
from torch import nn

from weightcache.arena.cuda_checkpoint import Resident, load
from weightcache.arena.cuda_vmm import CudaVmmWriter
from weightcache.attachment import Progress
from weightcache.binding import walk
from weightcache.checkpoint import DTYPES, Checkpoint
from weightcache.integrations.transformers_form import Form
from weightcache.integrations.transformers_loading import load_model
from weightcache.journal import Journal

log = logging.getLogger(__name__)


def load_onto(
    checkpoint: Checkpoint,
    like: Any,
    form: Form,
    digest: str | None,
    journal: Journal,
    progress: Progress,
    device: int,
) -> tuple[Any, str | None, CudaVmmWriter | None]:
    """The model from its files and their digest, as `load_model` gives them, and the arena that holds most of it.

    What has other names, shapes or dtypes in the files than in the model is read to host memory and left there.

    Args:
        checkpoint: the files.
        like: the model's skeleton, of one rank alone.
        form: the skeleton's form.
        digest: what the files should hold, if anybody knows.
        journal: where processing is marked.
        progress: told of what is read.
        device: CUDA ordinal.

    Raises:
        CheckpointError, ConfigError: as `load_model`.
        CacheMiss: there is no room on the GPU, or it cannot make an arena.
    """
    source = _Source(checkpoint, like, device)
    try:
        model, found = load_model(checkpoint, like, form, digest, journal, progress, source.read)
        converted = source.settle(model)
    except BaseException:
        source.close()
        raise
    if not converted:
        return model, found, source.arena
    log.warning("%s: transformers converts %s, so all is read to host memory", checkpoint.path, converted[0])
    source.close()
    del model
    return *load_model(checkpoint, like, form, digest, journal, progress), None


class _Source:
    """A checkpoint read onto a GPU, with stand-ins for what is there."""

    def __init__(self, checkpoint: Checkpoint, like: Any, device: int) -> None:
        self._checkpoint = checkpoint
        self._names = _fitting(checkpoint, like)
        self._device = device
        self._resident: Resident | None = None
        self._standing: dict[int, tuple[str, torch.Tensor]] = {}

    @property
    def arena(self) -> CudaVmmWriter | None:
        return self._resident.arena if self._resident else None

    def read(self, progress: Progress) -> dict[str, torch.Tensor]:
        """What transformers is given."""
        self._resident = load(self._checkpoint, self._device, self._names, progress)
        given = dict(self._resident.tensors)
        for name in self._names:
            given[name] = torch.empty((), dtype=given[name].dtype).expand(given[name].shape)
            self._standing[_storage(given[name])] = name, given[name]  # kept, or another could get its address
        return given

    def settle(self, model: Any) -> list[str]:
        """Put tensors in their stand-ins' places; the names of those whose stand-ins are nowhere."""
        assert self._resident is not None
        made: dict[str, nn.Parameter] = {}
        for place in walk(model).places:
            name, _ = self._standing.get(_storage(place.tensor), (None, None))
            if name is not None:
                if name not in made:
                    made[name] = nn.Parameter(self._resident.tensors[name], requires_grad=False)
                place.holder[place.key] = made[name]
        return sorted(self._names - made.keys())

    def close(self) -> None:
        if self._resident is not None:
            self._resident.arena.close()
            self._resident = None


def _fitting(checkpoint: Checkpoint, like: Any) -> set[str]:
    """The tensors that are, by name, shape and dtype, parameters of the model. The head of a tied pair is left out."""
    wanted = {name: (tuple(it.shape), it.dtype) for name, it in like.named_parameters(remove_duplicate=False)}
    head = checkpoint.tie.head if checkpoint.tie is not None else None
    return {
        name
        for name, info in checkpoint.tensors.items()
        if name != head and wanted.get(name) == (info.shape, getattr(torch, DTYPES[info.dtype].torch, None))
    }


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
