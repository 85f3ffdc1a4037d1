"""``readmit cache parity``: does a model mapped from the cache equal the model that plain loading gives?"""

import json
import subprocess
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from readmit.commands import Json
from readmit.commands.daemon import Dtype
from readmit.commands.engines import Engine, offline
from readmit.daemon import ask_daemon
from weightcache import messages
from weightcache.errors import ConfigError
from weightcache.fingerprint import CacheConfig
from weightcache.vocabulary import MISS_REASONS

if TYPE_CHECKING:
    from weightcache.parity import Report

_LISTED = 20
_VERSIONS_MAY_DIFFER_IN = frozenset({"layout_id", "model_path"})


def parity(
    model: Annotated[str, typer.Argument(help="A checkpoint's folder.")],
    dtype: Dtype = None,
    engine: Engine = "transformers",
    record: Annotated[
        bool | None,
        typer.Option(help="If equal, let engines of this version use the other's weights (--old and --new do)."),
    ] = None,
    old: Annotated[
        Path | None, typer.Option(metavar="VENV", help="Compare two versions: the virtual environment of the one.")
    ] = None,
    new: Annotated[Path | None, typer.Option(metavar="VENV", help="The virtual environment of the other.")] = None,
    socket: Annotated[Path | None, typer.Option(help="Compare what is resident at this daemon.")] = None,
    as_json: Json = False,
) -> None:
    """Compare a model's loads from disk and through an arena: tensors, bytes, logits. Exits 1 if they differ.

    Without a daemon the arena is made here. With --socket it is what is resident, which may come from another version
    of the engine. With --old and --new two versions load the model, and neither cache nor daemon takes part; for vLLM
    there is only that.
    """
    census = offline(engine).census
    if (old is None) != (new is None):
        raise typer.BadParameter("--old and --new go together")
    if old is None and engine != "transformers":
        raise typer.BadParameter(f"--engine {engine} compares two versions: give --old and --new")
    if old is not None and new is not None:
        report = _compare_versions(census, model, dtype, (old, new), record is not False)
    else:
        report = _compare_loads(model, dtype, socket, bool(record))
    typer.echo(json.dumps(report, indent=1) if as_json else _told(report))
    raise typer.Exit(0 if report["equal"] else 1)


def _compare_loads(model: str, dtype: str | None, socket: Path | None, record: bool) -> dict[str, Any]:
    import torch

    from weightcache import parity as census
    from weightcache.checkpoint import Checkpoint
    from weightcache.client import attach
    from weightcache.identity import know_digest
    from weightcache.integrations.transformers import cache_config, from_pretrained, skeleton
    from weightcache.integrations.transformers_census import load_plainly, logits_of

    checkpoint = Checkpoint.open(model)
    digest = know_digest(checkpoint.folder)
    mapped = skeleton(checkpoint.folder, dtype)
    wanted = asked = cache_config(checkpoint.folder, mapped, digest, torch.device("cpu"))
    plain_dtype = mapped.dtype
    if socket is not None:
        asked = _with_resident_layout(wanted, socket)
        attach(mapped, asked, socket=socket, policies=dict.fromkeys(MISS_REASONS, "fail"), verify=1.0)
    else:
        _through_an_arena(from_pretrained(checkpoint.folder, dtype=plain_dtype)[0], mapped, wanted)
    plain = load_plainly(checkpoint.folder, plain_dtype).eval()
    expected, found = census.take_census(plain), census.take_census(mapped)
    differing = census.disparities(expected, found)
    same_logits = not differing and torch.equal(logits_of(plain), logits_of(mapped))
    recorded = record and same_logits and asked.layout_id != wanted.layout_id
    if recorded:
        census.record(wanted, asked.layout_id)
    return {
        "equal": same_logits,
        "compared": "an arena made here" if socket is None else "what is resident",
        "tensors": len(expected),
        "logits_equal": same_logits,
        "this_layout": wanted.layout_id,
        "resident_layout": asked.layout_id,
        "recorded": recorded,
        "disparities": msgspec.to_builtins(differing),
        "config": wanted.to_dict(),
    }


def _through_an_arena(loaded: Any, mapped: Any, config: CacheConfig) -> None:
    """Pack a loaded model into an arena, and bind what was packed into a skeleton, as an attach does."""
    from weightcache.attachment import Attachment
    from weightcache.journal import Journal
    from weightcache.publish import pack

    with closing(pack(loaded, config, origin="parity")) as packed:
        attachment = Attachment(mapped, config, "client", socket=Path(), journal=Journal(None), verify=1.0)
        attachment.adopt("parity", packed)
    mapped.eval()


def _with_resident_layout(wanted: CacheConfig, socket: Path) -> CacheConfig:
    """The identity under which the same weights are resident, if only the layout's name differs."""
    differences = ask_daemon(socket, messages.Explain(config=wanted.to_dict()))["differences"] or []
    if [each["field"] for each in differences] == ["layout_id"]:
        return msgspec.structs.replace(wanted, layout_id=differences[0]["found"])
    return wanted


def _compare_versions(
    module: str, model: str, dtype: str | None, venvs: tuple[Path, Path], record: bool
) -> dict[str, Any]:
    from weightcache import parity as census

    before, after = (_report(venv, module, model, dtype) for venv in venvs)
    ours, theirs = CacheConfig.from_dict(after.config), CacheConfig.from_dict(before.config)
    differing = census.disparities(before.tensors, after.tensors)
    others = [each for each in ours.differences(theirs) if each.field not in _VERSIONS_MAY_DIFFER_IN]
    equal = not differing and not others and before.logits == after.logits
    recorded = record and equal and ours.layout_id != theirs.layout_id
    if recorded:
        census.record(ours, theirs.layout_id)
    return {
        "equal": equal,
        "compared": "two versions",
        "tensors": len(before.tensors),
        "logits_equal": before.logits == after.logits,
        "this_layout": ours.layout_id,
        "resident_layout": theirs.layout_id,
        "recorded": recorded,
        "disparities": msgspec.to_builtins(differing),
        "differences": msgspec.to_builtins(others),
        "config": ours.to_dict(),
    }


def _report(venv: Path, module: str, model: str, dtype: str | None) -> "Report":
    """What the version in a virtual environment makes of a model.

    Raises:
        ConfigError: ``venv``: it cannot be run, or it cannot load the model.
    """
    from weightcache.parity import Report

    command = [str(venv / "bin" / "python"), "-m", module, model]
    command += [f"--dtype={dtype}"] if dtype else []
    try:
        run = subprocess.run(command, capture_output=True, check=True)
        return msgspec.json.decode(run.stdout.splitlines()[-1], type=Report)
    except (OSError, subprocess.CalledProcessError, IndexError, msgspec.MsgspecError) as error:
        said = getattr(error, "stderr", b"").decode(errors="replace").strip().splitlines()
        raise ConfigError(
            "venv",
            f"the version in {venv} cannot say what it makes of {model}",
            expected="a virtual environment with readmit and the engine",
            found=said[-1] if said else str(error),
            remedy="Install this release of readmit there, into the engine's environment",
            path=str(venv),
        ) from error


def _told(report: dict[str, Any]) -> str:
    if report["equal"]:
        told = f"equal: {report['tensors']} tensors and the logits; {report['compared']}"
        told += f", layout {report['resident_layout']}"
        return f"{told}; recorded for {report['this_layout']}" if report["recorded"] else told
    lines = [
        f"{each['name']}: {each['what']}: expected {each['expected']}, found {each['found']}"
        for each in report["disparities"]
    ]
    lines += [
        f"{each['field']}: expected {each['expected']}, found {each['found']}" for each in report.get("differences", [])
    ]
    if not lines:
        return "every tensor is equal, and the logits are not"
    more = f"\nand {len(lines) - _LISTED} more" if len(lines) > _LISTED else ""
    return f"{len(lines)} differences\n" + "\n".join(lines[:_LISTED]) + more
