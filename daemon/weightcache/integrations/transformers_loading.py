"""Loading a causal language model of transformers from its files, in a form of its own.

The files are read here, tensor by tensor into private memory, and handed to transformers, which renames, merges and
ties as the architecture wants and computes what is in no file.
"""

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import register_checkpoint_conversion_mapping

from weightcache.attachment import Progress
from weightcache.block_scale import SUFFIX
from weightcache.checkpoint import Checkpoint, Folder
from weightcache.checkpoint.refusal import refusal
from weightcache.errors import CheckpointError, ConfigError, WeightCacheError
from weightcache.identity import lookup, prove
from weightcache.integrations.transformers_form import Form, conversions
from weightcache.journal import Journal
from weightcache.quantization import of as quantization_of

log = logging.getLogger(__name__)


def import_architecture(folder: Folder) -> Any:
    """The model's configuration, once the modules that define the model are imported, which can take a second.

    Raises:
        ConfigError: ``architecture``.
    """
    with telling(folder):
        config = AutoConfig.from_pretrained(folder.root, local_files_only=True)
        AutoModelForCausalLM._model_mapping[type(config)]
        return config


def build(folder: Folder, config: Any, dtype: torch.dtype) -> Any:
    """The model on the meta device, as transformers builds it.

    Raises:
        ConfigError: ``architecture``.
    """
    with telling(folder), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]


def load_model(
    checkpoint: Checkpoint,
    like: Any,
    form: Form,
    digest: str | None,
    journal: Journal,
    progress: Progress,
    read: Callable[[Progress], dict[str, torch.Tensor]] | None = None,
) -> tuple[Any, str | None]:
    """The model from its files, and their digest as far as it is known.

    Args:
        checkpoint: the files.
        like: the model's skeleton.
        form: the skeleton's form.
        digest: what the files should hold, if anybody knows.
        journal: where processing is marked.
        progress: told of every tensor.
        read: reads all tensors in another way, and sets the checkpoint's digest; for a model of one rank alone.

    Raises:
        CheckpointError: the files are bad; ``changed`` where they hold something else; ``tensor_missing``,
            ``geometry`` or ``quant_conflict`` where they do not hold what the architecture needs.
        ConfigError: the files cannot be cut.
    """
    _check_quantization(checkpoint, form)
    form.check(like, checkpoint)
    plan = form.plan(like, checkpoint)
    tensors = {} if read is None else read(progress)
    done = 0
    if read is None:
        for name, tensor in checkpoint.read() if plan is None else checkpoint.read_parts(plan.parts(form.tp_rank)):
            _check_scales(checkpoint, name, tensor)
            tensors[name] = tensor
            done += checkpoint.tensors[name].nbytes
            progress(done, checkpoint.total_bytes)
    found = checkpoint.digest
    if plan is not None and digest is not None:
        found = lookup(checkpoint) or prove(checkpoint)  # parts cannot be hashed: the files must be those that were
    if digest not in (None, found):
        raise CheckpointError(
            "changed",
            f"the files of {checkpoint.path} changed while the model was loaded, or the disk returns other bytes",
            expected=f"content {digest}",
            found=f"content {found}",
            remedy="Do not write to a checkpoint in use; start again",
            path=checkpoint.path,
        )
    with journal.phase("load_weights.process"), telling(checkpoint.folder):
        model, report = _class(like, form).from_pretrained(
            None,
            config=_config(like, form),
            state_dict=tensors,
            dtype=like.dtype,
            ignore_mismatched_sizes=True,  # reported here and refused below, where transformers would go on at random
            output_loading_info=True,
        )
    require_complete(checkpoint, report)
    model.config.name_or_path = model.name_or_path = like.name_or_path
    if hasattr(like.config, "quantization_config"):
        model.config.quantization_config = like.config.quantization_config
    return model, found


def _check_quantization(checkpoint: Checkpoint, form: Form) -> None:
    """Check that the files are quantised as the config says: transformers would convert them in silence."""
    found = quantization_of(checkpoint).verdict
    if found is not None and form.quantization.verdict is None:
        raise refusal(
            "quant_conflict",
            f"{found.key} decides that the files are not what the config says",
            expected=form.quantization.method,
            found=found.found,
            remedy="Download config and weights again, of one revision",
            path=checkpoint.path,
        )


def _check_scales(checkpoint: Checkpoint, name: str, tensor: torch.Tensor) -> None:
    """Check that block scales are numbers: with one that is not, a whole block says nothing."""
    if name.endswith(SUFFIX) and tensor.is_floating_point() and not tensor.isfinite().all():
        info = checkpoint.tensors[name]
        raise refusal(
            "quant_conflict",
            f"{name} in {info.file} holds scales that are no numbers",
            expected="finite scales",
            found=f"{int((~tensor.isfinite()).sum())} of {tensor.numel()} infinite or not a number",
            remedy="Download the file again",
            file=info.file,
            tensor=name,
        )


def _class(like: Any, form: Form) -> Any:
    """The model's class, but of instances that take a form as they are made: transformers makes the one it loads."""
    plain: Any = type(like)
    if form.is_whole_and_plain:
        return plain

    def init(self: Any, config: Any) -> None:
        plain.__init__(self, config)
        form.give(self)

    name = f"{plain.__name__}InForm"
    register_checkpoint_conversion_mapping(name, conversions(like), overwrite=True)
    return type(name, (plain,), {"__init__": init, "__module__": plain.__module__})


def _config(like: Any, form: Form) -> Any:
    config = like.config
    if form.quantization.block_size is not None and form.quantization.verdict is None:
        config = copy.deepcopy(config)
        del config.quantization_config  # or transformers would ask for a GPU; the form has seen to it
    return config


@contextmanager
def telling(folder: Folder) -> Iterator[None]:
    """Turn whatever transformers fails with into a `ConfigError` ``architecture`` that names the model."""
    try:
        yield
    except WeightCacheError:
        raise
    except Exception as error:  # the only check is to try, and every architecture and quantiser fails in its own way
        raise ConfigError(
            "architecture",
            f"transformers {transformers.__version__} cannot build the model in {folder.path}",
            expected="the config of a causal language model that it knows",
            found=f"model_type {folder.config.get('model_type')!r} ({type(error).__name__}: {error})",
            remedy="Install a transformers that knows it, or correct config.json",
            path=folder.path,
        ) from error


def require_complete(checkpoint: Checkpoint, report: dict[str, Any]) -> None:
    """Check that transformers found all it needs: it goes on with random numbers otherwise, and only mentions it.

    Args:
        checkpoint: what it read.
        report: its ``output_loading_info``.

    Raises:
        CheckpointError: ``tensor_missing`` or ``geometry``.
    """
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
