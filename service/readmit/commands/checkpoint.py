"""``readmit cache preflight`` and ``fingerprint``: what a checkpoint is, and whether it can be trusted and shared."""

import json
import sys
from collections import Counter
from importlib import metadata
from typing import Annotated, Any, Final

import typer

from readmit.commands import Json
from readmit.commands.daemon import Dtype
from weightcache import identity, quantization
from weightcache.checkpoint import DTYPES, Checkpoint, Folder
from weightcache.errors import ConfigError, UnsupportedQuantForIPCError
from weightcache.fingerprint import CacheConfig
from weightcache.quantization import Quantization

FLOATING: Final = tuple(dtype.torch for dtype in DTYPES.values() if "float" in dtype.torch)

Model = Annotated[str, typer.Argument(help="A folder, a hub cache's folder, or a repository's name in that cache.")]
Revision = Annotated[str | None, typer.Option(help="Of a hub cache's folder: a commit, or a name under refs.")]


def preflight(
    model: Model,
    revision: Revision = None,
    tp_size: Annotated[int, typer.Option(min=1, help="Check that so many ranks can share it, too.")] = 1,
    as_json: Json = False,
) -> None:
    """Check a checkpoint by its index and headers. Exits 2 if it is bad, and says where."""
    checkpoint = Checkpoint.open(model, revision)
    found = quantization.of(checkpoint)
    by_dtype: Counter[str] = Counter()
    for info in checkpoint.tensors.values():
        by_dtype[info.dtype] += info.nbytes
    _print(
        {
            "path": checkpoint.path,
            "revision": checkpoint.revision,
            "files": len(checkpoint.files),
            "tensors": len(checkpoint.tensors),
            "bytes": checkpoint.total_bytes,
            "bytes_by_dtype": dict(by_dtype.most_common()),
            "tied": None if checkpoint.tie is None else checkpoint.tie._asdict(),
            **_quantization(found),
            "notes": [*checkpoint.notes, *found.notes],
            **({} if tp_size == 1 else {"shards": _shards(checkpoint, tp_size)}),
        },
        as_json,
    )


def fingerprint(
    model: Model,
    revision: Revision = None,
    hash_now: Annotated[bool, typer.Option("--hash", help="Read every byte, whatever is remembered.")] = False,
    dtype: Dtype = None,
    tp_size: Annotated[int, typer.Option(min=1, help="How many ranks share the model.")] = 1,
    tp_rank: Annotated[int, typer.Option(min=0, help="Which of them asks.")] = 0,
    as_json: Json = False,
) -> None:
    """Show the identity that a transformers engine asks for. Without --hash a large one is not read."""
    if tp_rank >= tp_size:
        raise typer.BadParameter(f"there is no rank {tp_rank} of {tp_size}")
    folder = Folder.open(model, revision)
    chosen = dtype or _dtype(folder)
    if chosen not in FLOATING:
        raise ConfigError(
            "dtype", "weights need a floating point dtype of torch", expected=", ".join(FLOATING), found=chosen
        )
    known = identity.Identity(prove(Checkpoint.open(folder)), "hashed") if hash_now else identity.digest_of(folder)
    own = {"dtype": chosen, "tp_size": tp_size, "tp_rank": tp_rank, **_engine()}
    fields = {**identity.fields_of(folder, known.digest), **own, "kernel_backend": identity.computed_from(folder)}
    _print(
        {
            **CacheConfig.from_dict(fields).to_dict(),
            "digest_status": known.status,
            **_quantization(quantization.of(folder)),
        },
        as_json,
    )


def _engine() -> dict[str, str]:
    """What `weightcache.integrations.transformers` says of itself, without the seconds that importing it takes."""
    try:
        version = metadata.version("transformers")
    except metadata.PackageNotFoundError:  # the checkpoint's own fields are worth showing all the same
        version = "none"
    return {
        "torch_version": metadata.version("torch"),
        "engine": "transformers",
        "layout_id": f"transformers-{version}",
    }


def _dtype(folder: Folder) -> str:
    """The dtype that transformers gives the weights of this checkpoint."""
    sections = [folder.config, folder.config.get("text_config")]
    named = (section.get(key) for section in sections if isinstance(section, dict) for key in ("dtype", "torch_dtype"))
    return str(next((each for each in named if each), "float32")).removeprefix("torch.")


def _shards(checkpoint: Checkpoint, tp_size: int) -> dict[str, Any]:
    """How the model's own plan shares it out, once it is known that it can."""
    from weightcache.integrations.transformers import skeleton  # seconds
    from weightcache.integrations.transformers_form import Form

    plan = Form.of(checkpoint.folder, tp_size).plan(skeleton(checkpoint.folder, tp_size=tp_size), checkpoint)
    assert plan is not None
    cut = sum(checkpoint.tensors[name].nbytes for name in plan.splits)
    return {
        "tp_size": tp_size,
        "cut_tensors": len(plan.splits),
        "whole_tensors": len(checkpoint.tensors) - len(plan.splits),
        "bytes_per_rank": checkpoint.total_bytes - cut + cut // tp_size,
    }


def prove(checkpoint: Checkpoint) -> str:
    """Read every byte of a checkpoint for its digest, showing how far that is."""
    if not sys.stderr.isatty():
        return identity.prove(checkpoint)
    with typer.progressbar(length=checkpoint.total_bytes, label="Reading", file=sys.stderr) as bar:
        return identity.prove(checkpoint, lambda done: bar.update(done - bar.pos))


def _quantization(found: Quantization) -> dict[str, Any]:
    try:
        found.check_allowed()
        refusal = None
    except UnsupportedQuantForIPCError as error:
        refusal = error.to_dict()
    return {
        "quant_method": found.method,
        "block_size": found.block_size,
        "skipped_layers": list(found.skipped.entries),
        "shareable": refusal is None,
        "not_shareable_because": refusal,
    }


def _print(facts: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    for name, value in facts.items():
        if value in (None, [], {}, ()):
            continue
        text = value["message"] if name == "not_shareable_because" else value
        if isinstance(text, dict):
            text = ", ".join(f"{key} {item}" for key, item in text.items())
        elif isinstance(text, list | tuple):
            text = ", ".join(map(str, text))
        typer.echo(f"{name.replace('_', ' '):22} {text}")
