"""Ranks that run together: each rank's model, cut and mapped, connected to the others' by transformers' own styles.

::

    model, outcome = from_pretrained(path, mode="client", tp_size=2, tp_rank=rank)
    connect_ranks(model, init_device_mesh("cpu", (2,)))
"""

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
from transformers.distributed.tensor_parallel import EmbeddingParallel

from weightcache.errors import ConfigError


def connect_ranks(model: Any, mesh: DeviceMesh) -> None:
    """Have a rank's layers exchange with the other ranks' what they compute. For inference: no gradients are exchanged.

    Args:
        model: of this rank, from `weightcache.integrations.transformers.from_pretrained` with its ``tp_size``.
        mesh: of one dimension, the ranks in their order.

    Raises:
        ConfigError: ``shard_plan``: transformers has no plan for this model.
    """
    if not model.tp_plan:
        raise ConfigError("shard_plan", f"transformers has no plan by which ranks could share a {type(model).__name__}")
    modules = dict(model.named_modules())
    for name, style_name in model._expand_parallel_plan(dict(model.tp_plan)).items():
        if name not in modules:
            continue  # a parameter of its own, which is cut and has nothing to exchange
        module, style = modules[name], ALL_PARALLEL_STYLES[style_name]
        if isinstance(style, EmbeddingParallel):
            _tell_whole_shape(module, mesh, style.shard_dim)
        if style_name == "mla_kv_a_proj":
            module.config = model.config.get_text_config()  # where it looks up how its output is made up
        style.install_forward(module, mesh)


def _tell_whole_shape(embedding: Any, mesh: DeviceMesh, dim: int) -> None:
    """Make an embedding's weight one that knows the whole: looking up rows that another rank holds takes that."""
    whole = torch.Size((embedding.num_embeddings, embedding.embedding_dim))
    local = embedding.weight.detach()
    shared = DTensor.from_local(local, mesh, [Shard(dim)], run_check=False, shape=whole, stride=(whole[1], 1))
    embedding._parameters["weight"] = torch.nn.Parameter(shared, requires_grad=False)
