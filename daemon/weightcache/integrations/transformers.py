"""Causal language models of transformers, loaded through the weight cache.

::

    model, outcome = from_pretrained("/models/smollm2", mode="client")

The model is built as a skeleton on the meta device. On a hit its tensors are mapped from the cache. Otherwise the files
are read here, tensor by tensor into private memory, and handed to transformers, which renames, merges and ties as the
architecture wants and computes what is in no file.

``python -m weightcache.integrations.transformers MODEL`` is the load worker: it loads, publishes and exits.
"""

import argparse
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from weightcache.attachment import Outcome, Progress
from weightcache.checkpoint import Checkpoint, Folder
from weightcache.client import attach
from weightcache.errors import CheckpointError, ConfigError, UnsupportedQuantForIPCError, WeightCacheError
from weightcache.fingerprint import CacheConfig
from weightcache.identity import digest_of, remember
from weightcache.journal import Journal
from weightcache.quantization import UNQUANTIZED
from weightcache.quantization import of as quantization_of

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
    journal: Journal | None = None,
    **options: Any,
) -> tuple[Any, Outcome]:
    """A causal language model in eval mode and without gradients, and how it got its weights.

    A quantised checkpoint is never shared: its quantiser replaces modules as it loads, which a skeleton does not show.

    Args:
        path: the folder of a checkpoint, or what else `weightcache.checkpoint.Folder.open` understands.
        mode: ``client``, ``daemon`` or ``off``; see `weightcache.client.attach`.
        socket: the daemon's socket; `weightcache.paths.socket_path` if None.
        dtype: of the weights; the checkpoint's own if None.
        device: ``cpu`` or a CUDA device.
        journal: where the parts of ``load_weights`` go; the environment's if None.
        options: further arguments of `weightcache.client.attach`.

    Raises:
        CheckpointError: the files are missing, damaged, or not what the architecture needs.
        ConfigError: ``architecture``, where transformers cannot build the model; ``dtype``; ``device``.
        CacheMiss: the policy for the reason of a miss is to fail.
    """
    journal = journal or Journal.from_environment()
    folder = path if isinstance(path, Folder) else Folder.open(path)
    place = _device(device)
    with journal.phase("load_weights.skeleton"):
        model = skeleton(folder, dtype)
    digest = None
    if mode != "off":
        with journal.phase("load_weights.match"):
            digest = digest_of(folder).digest  # None for large files that nobody knows: learnt while they are read

    def load(progress: Progress) -> str | None:
        checkpoint = Checkpoint.open(folder)
        loaded = _load(checkpoint, model, digest, journal, progress).to(place)
        if digest is None and mode != "off" and checkpoint.digest is not None:
            remember(checkpoint, checkpoint.digest)
        model.__dict__.clear()  # the skeleton becomes what transformers built: its submodules, buffers and attributes
        model.__dict__.update(loaded.__dict__)
        return checkpoint.digest

    outcome = attach(
        model,
        cache_config(folder, model, digest, place),
        mode=mode,
        load=load,
        load_bytes=sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())),
        load_command=_load_command(folder, model.dtype, place),
        socket=socket,
        journal=journal,
        device=place.index if place.type == "cuda" else None,
        barred=_barred(folder),
        **options,
    )
    if os.path.exists(folder.locate("generation_config.json")):
        model.generation_config = GenerationConfig.from_pretrained(folder.root)
    return model.eval().requires_grad_(False), outcome


def cache_config(folder: Folder, model: Any, digest: str | None, device: torch.device) -> CacheConfig:
    """The identity of a model's weights as transformers lays them out.

    Args:
        folder: of the checkpoint.
        model: its skeleton.
        digest: the content of the checkpoint, without which nothing matches.
        device: where the weights will be.
    """
    quantization = quantization_of(folder)
    return CacheConfig(
        model_path=folder.path,
        model_arch=type(model).__name__,
        revision=folder.revision,
        checkpoint_digest=digest,
        quant_method=quantization.method,
        quant_config_hash=quantization.config_hash,
        dtype=_name(model.dtype),
        device_capability=_capability(device),
        torch_version=torch.__version__,
        engine=ENGINE,
        layout_id=LAYOUT,
    )


def _load_command(folder: Folder, dtype: torch.dtype, device: torch.device) -> list[str]:
    return [sys.executable, "-m", __name__, folder.path, f"--dtype={_name(dtype)}", f"--device={device}"]


def _capability(device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _barred(folder: Folder) -> UnsupportedQuantForIPCError | None:
    quantization = quantization_of(folder)
    try:
        quantization.check_allowed()
    except UnsupportedQuantForIPCError as refused:
        return refused
    if quantization.method == UNQUANTIZED:
        return None
    return UnsupportedQuantForIPCError(
        "transformers builds the modules of a quantised model only as it loads them",
        detail="other",
        expected="unquantised weights",
        found=quantization.method,
    )


def skeleton(folder: Folder, dtype: torch.dtype | str | None = None) -> Any:
    """The model without values, on the meta device.

    Raises:
        ConfigError: ``architecture`` or ``dtype``.
    """
    config = import_architecture(folder)
    wanted = _dtype(dtype or config.dtype or torch.float32)
    with _telling(folder), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=wanted)  # type: ignore[no-untyped-call]


def import_architecture(folder: Folder) -> Any:
    """The model's configuration, once the modules that define the model are imported, which can take a second.

    Raises:
        ConfigError: ``architecture``.
    """
    with _telling(folder):
        config = AutoConfig.from_pretrained(folder.root, local_files_only=True)
        AutoModelForCausalLM._model_mapping[type(config)]
        return config


@contextmanager
def _telling(folder: Folder) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the only check is to try, and every architecture and quantiser fails in its own way
        raise ConfigError(
            "architecture",
            f"transformers {transformers.__version__} cannot build the model in {folder.path}",
            expected="the config of a causal language model that it knows",
            found=f"model_type {folder.config.get('model_type')!r} ({type(error).__name__}: {error})",
            remedy="Install a transformers that knows it, or correct config.json",
            path=folder.path,
        ) from error


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


def _device(wanted: torch.device | str) -> torch.device:
    try:
        found = torch.device(wanted)
        if found.type == "cuda":
            torch.cuda.get_device_capability(found)
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA asserts
        raise ConfigError(
            "device",
            f"torch cannot use the device {wanted}",
            expected="cpu, or a CUDA device of this machine such as cuda:0",
            found=str(error).splitlines()[0],
            remedy="Check the driver, CUDA_VISIBLE_DEVICES and that this torch was built with CUDA",
        ) from error
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _load(checkpoint: Checkpoint, like: Any, digest: str | None, journal: Journal, progress: Progress) -> Any:
    """The model from its files; ``like`` is its skeleton, ``digest`` what the files should hold if anybody knows.

    Raises:
        CheckpointError: the files are bad; ``changed`` where they hold something else; ``tensor_missing`` or
            ``geometry`` where they do not hold what the architecture needs.
    """
    tensors = {}
    done = 0
    for name, tensor in checkpoint.read():
        tensors[name] = tensor
        done += tensor.nbytes
        progress(done, checkpoint.total_bytes)
    if digest not in (None, checkpoint.digest):
        raise CheckpointError(
            "changed",
            f"the files of {checkpoint.path} changed while the model was loaded, or the disk returns other bytes",
            expected=f"content {digest}",
            found=f"content {checkpoint.digest}",
            remedy="Do not write to a checkpoint in use; start again",
            path=checkpoint.path,
        )
    with journal.phase("load_weights.process"), _telling(checkpoint.folder):
        model, report = type(like).from_pretrained(
            None,
            config=like.config,
            state_dict=tensors,
            dtype=like.dtype,
            ignore_mismatched_sizes=True,  # reported here and refused below, where transformers would go on at random
            output_loading_info=True,
        )
    _require_complete(checkpoint, report)
    model.config.name_or_path = model.name_or_path = like.name_or_path
    return model


def _require_complete(checkpoint: Checkpoint, report: dict[str, Any]) -> None:
    missing, mismatched = sorted(report["missing_keys"]), sorted(report["mismatched_keys"])
    if missing:
        raise CheckpointError(
            "tensor_missing",
            f"{checkpoint.path} lacks {len(missing)} tensors that the architecture has: {', '.join(missing[:10])}",
            remedy="Download the model again, or correct config.json",
            path=checkpoint.path,
            tensors=missing,
        )
    if mismatched:
        name, found, expected = mismatched[0]
        raise CheckpointError(
            "geometry",
            f"{len(mismatched)} tensors of {checkpoint.path} have other shapes than the architecture, first {name}",
            expected=list(expected),
            found=list(found),
            remedy="Check that config.json belongs to these files",
            path=checkpoint.path,
            tensor=name,
        )
    if report["unexpected_keys"]:
        strangers = ", ".join(sorted(report["unexpected_keys"]))
        log.warning("%s: no part of the architecture, left out: %s", checkpoint.path, strangers)


def main() -> None:
    """Load a model, publish it and exit: 0 when it is resident."""
    parser = argparse.ArgumentParser(description="Load a model into the weight cache and exit.")
    parser.add_argument("model")
    parser.add_argument("--dtype")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--socket", type=Path)
    arguments = parser.parse_args()
    options = {"socket": arguments.socket, "dtype": arguments.dtype, "device": arguments.device}
    try:
        _, outcome = from_pretrained(arguments.model, mode="client", **options)
    except WeightCacheError as error:
        sys.exit(str(error))
    if outcome.generation is None:
        sys.exit(f"{arguments.model} was loaded and not published: {outcome.private_because or outcome.message}")


if __name__ == "__main__":
    main()
