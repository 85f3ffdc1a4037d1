"""Causal language models of transformers, loaded through the weight cache.

::

    model, outcome = from_pretrained("/models/smollm2", mode="client")

The model is built as a skeleton on the meta device. On a hit its tensors are mapped from the cache. Otherwise the files
are read here, tensor by tensor into private memory, and handed to transformers, which renames, merges and ties as the
architecture wants and computes what is in no file.

A rank of a tensor-parallel engine gives ``tp_size`` and ``tp_rank``: skeleton and arena are then cut as the model's own
``tp_plan`` says, and of the files only that rank's part is read.

``python -m weightcache.integrations.transformers MODEL`` is the load worker: it loads, publishes and exits.
"""

import argparse
import logging
import os
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from transformers import GenerationConfig

from weightcache.attachment import Loaded, Outcome, Progress
from weightcache.checkpoint import Checkpoint, Folder
from weightcache.client import attach
from weightcache.errors import ConfigError, UnsupportedQuantForIPCError, WeightCacheError
from weightcache.fingerprint import CacheConfig
from weightcache.identity import computed_from, digest_of, remember
from weightcache.integrations.skeleton import nbytes
from weightcache.integrations.torch_names import capability_name, dtype_name
from weightcache.integrations.transformers_form import Form
from weightcache.integrations.transformers_loading import build, import_architecture, load_model
from weightcache.journal import Journal
from weightcache.quantization import of as quantization_of

__all__ = ["cache_config", "from_pretrained", "import_architecture", "skeleton"]

ENGINE: Final = "transformers"
LAYOUT: Final = f"transformers-{transformers.__version__}"
"""transformers decides which tensors of the files are merged, so its version stands for the layout."""

log = logging.getLogger(__name__)


def from_pretrained(
    path: str | os.PathLike[str] | Folder,
    *,
    mode: str = "off",
    socket: Path | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    tp_size: int = 1,
    tp_rank: int = 0,
    journal: Journal | None = None,
    **options: Any,
) -> tuple[Any, Outcome]:
    """A causal language model in eval mode and without gradients, and how it got its weights.

    Block-wise FP8 weights stay FP8, see `weightcache.integrations.block_fp8`. Other quantised ones are not shared.

    Args:
        path: the folder of a checkpoint, or what else `weightcache.checkpoint.Folder.open` understands.
        mode: ``client``, ``daemon`` or ``off``; see `weightcache.client.attach`.
        socket: the daemon's socket; `weightcache.paths.socket_path` if None.
        dtype: of the weights; the checkpoint's own if None.
        device: ``cpu`` or a CUDA device.
        tp_size: how many ranks share the model. What connects the ranks' layers is the engine's affair.
        tp_rank: which of them this is.
        journal: where the parts of ``load_weights`` go; the environment's if None.
        options: further arguments of `weightcache.client.attach`.

    Raises:
        CheckpointError: the files are missing, damaged, or not what the architecture needs.
        ConfigError: ``architecture``, where transformers cannot build the model; ``dtype``; ``device``; ``tp_rank`` or
            ``shard_...``, where it cannot be cut.
        CacheMiss: the policy for the reason of a miss is to fail.
    """
    journal = journal or Journal.from_environment()
    if tp_size > 1:
        journal = journal.bound(rank=tp_rank)
    folder = path if isinstance(path, Folder) else Folder.open(path)
    place = place_of(device)
    with journal.phase("load_weights.skeleton"):
        model, form = _skeleton(folder, dtype, tp_size, tp_rank)
    digest = None
    if mode != "off":
        with journal.phase("load_weights.match"):
            digest = digest_of(folder).digest  # None for large files that nobody knows: learnt while they are read

    opened = cache(partial(Checkpoint.open, folder))

    def load(progress: Progress) -> Loaded:
        checkpoint = opened()
        arena = None
        if place.type == "cuda" and mode != "off" and tp_size == 1:
            from weightcache.integrations.transformers_gpu import load_onto

            loaded, found, arena = load_onto(checkpoint, model, form, digest, journal, progress, place.index)
        else:
            loaded, found = load_model(checkpoint, model, form, digest, journal, progress)
        if digest is None and mode != "off" and found is not None:
            remember(checkpoint, found)
        loaded.to(place)
        model.__dict__.clear()  # the skeleton becomes what transformers built: its submodules, buffers and attributes
        model.__dict__.update(loaded.__dict__)
        return Loaded(found, arena)

    outcome = attach(
        model,
        cache_config(folder, model, digest, place, tp_size, tp_rank),
        mode=mode,
        load=load,
        check=opened,
        load_bytes=nbytes(model),
        load_command=_load_command(folder, model.dtype, place, tp_size, tp_rank),
        socket=socket,
        journal=journal,
        device=place.index if place.type == "cuda" else None,
        barred=_barred(form),
        **options,
    )
    if os.path.exists(folder.locate("generation_config.json")):
        model.generation_config = GenerationConfig.from_pretrained(folder.root)
    return model.eval().requires_grad_(False), outcome


def cache_config(
    folder: Folder, model: Any, digest: str | None, device: torch.device, tp_size: int = 1, tp_rank: int = 0
) -> CacheConfig:
    """The identity of a model's weights as transformers lays them out.

    Args:
        folder: of the checkpoint.
        model: its skeleton.
        digest: the content of the checkpoint, without which nothing matches.
        device: where the weights will be.
        tp_size: how many ranks share the model.
        tp_rank: which of them this is.
    """
    quantization = quantization_of(folder)
    return CacheConfig(
        model_path=folder.path,
        model_arch=type(model).__name__,
        revision=folder.revision,
        checkpoint_digest=digest,
        tp_size=tp_size,
        tp_rank=tp_rank,
        quant_method=quantization.method,
        quant_config_hash=quantization.config_hash,
        dtype=dtype_name(model.dtype),
        device_capability=capability_name(device),
        torch_version=torch.__version__,
        engine=ENGINE,
        layout_id=LAYOUT,
        kernel_backend=computed_from(folder),
    )


def _load_command(folder: Folder, dtype: torch.dtype, device: torch.device, tp_size: int, tp_rank: int) -> list[str]:
    options = [f"--dtype={dtype_name(dtype)}", f"--device={device}", f"--tp-size={tp_size}", f"--tp-rank={tp_rank}"]
    return [sys.executable, "-m", __name__, folder.path, *options]


def _barred(form: Form) -> UnsupportedQuantForIPCError | None:
    try:
        form.quantization.check_allowed()
    except UnsupportedQuantForIPCError as refused:
        return refused
    return None


def skeleton(folder: Folder, dtype: torch.dtype | str | None = None, tp_size: int = 1, tp_rank: int = 0) -> Any:
    """The model without values, on the meta device, in the form that one rank has.

    Raises:
        ConfigError: ``architecture`` or ``dtype``; ``tp_rank`` or ``shard_...`` where the model cannot be cut so.
    """
    return _skeleton(folder, dtype, tp_size, tp_rank)[0]


def _skeleton(folder: Folder, dtype: torch.dtype | str | None, tp_size: int, tp_rank: int) -> tuple[Any, Form]:
    wanted = Form.of(folder, tp_size, tp_rank)
    config = import_architecture(folder)
    model = build(folder, config, _dtype(dtype or config.dtype or torch.float32))
    form = wanted.fitting(model)
    form.give(model)
    return model, form


def _dtype(wanted: torch.dtype | str) -> torch.dtype:
    found = getattr(torch, wanted, None) if isinstance(wanted, str) else wanted
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigError(
            "dtype",
            "weights need a floating point dtype of torch",
            expected="a name such as bfloat16",
            found=repr(wanted),
        )
    return found


def place_of(wanted: torch.device | str) -> torch.device:
    """The device that is meant, with its ordinal if it is a GPU.

    Raises:
        ConfigError: ``device``: torch cannot use it.
    """
    try:
        found = torch.device(wanted)
        if found.type == "cuda":
            torch.cuda.get_device_capability(found)
            # The current one is this process's: a load worker would not know which.
            found = torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index)
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA asserts
        raise ConfigError(
            "device",
            f"torch cannot use the device {wanted}",
            expected="cpu, or a CUDA device of this machine such as cuda:0",
            found=str(error).splitlines()[0],
            remedy="Check the driver, CUDA_VISIBLE_DEVICES and that this torch was built with CUDA",
        ) from error
    return found


def main() -> None:
    """Load a model, publish it and exit: 0 when it is resident."""
    parser = argparse.ArgumentParser(description="Load a model into the weight cache and exit.")
    parser.add_argument("model")
    parser.add_argument("--dtype")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--socket", type=Path)
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--tp-rank", type=int, default=0)
    parser.add_argument("--beside", action="store_true", help="leave other versions of these weights resident")
    arguments = parser.parse_args()
    options = {name: getattr(arguments, name) for name in ("socket", "dtype", "device", "tp_size", "tp_rank")}
    policies = {"fingerprint": "fallback"} if arguments.beside else None
    try:
        _, outcome = from_pretrained(arguments.model, mode="client", policies=policies, **options)
    except WeightCacheError as error:
        sys.exit(str(error))
    if outcome.generation is None:
        sys.exit(f"{arguments.model} was loaded and not published: {outcome.private_because or outcome.message}")


if __name__ == "__main__":
    main()
