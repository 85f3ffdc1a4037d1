"""``readmit cache parity``: does what is resident equal what plain loading gives?"""

import json
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from weightcache import messages, paths
from weightcache.fingerprint import CacheConfig
from weightcache.journal import Context
from weightcache.protocol import Connection
from weightcache.version import VERSION
from weightcache.vocabulary import MISS_REASONS

_LISTED = 20


def parity(
    model: Annotated[str, typer.Argument(help="A checkpoint's folder, resident for transformers.")],
    dtype: Annotated[str | None, typer.Option(help="Of the weights in memory (default: the checkpoint's).")] = None,
    record: Annotated[
        bool, typer.Option("--record", help="If equal, let engines of this version use the other version's weights.")
    ] = False,
    socket: Annotated[Path | None, typer.Option(help="The daemon's socket (default: the runtime folder's).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare resident weights with a plain load by transformers, every tensor and byte. Exits 1 if any differs.

    What is resident may come from another version of the engine: that is what the comparison is for before an upgrade.
    """
    import torch
    import transformers

    from weightcache import parity as census
    from weightcache.checkpoint import Checkpoint
    from weightcache.client import attach
    from weightcache.identity import digest_of, prove
    from weightcache.integrations.transformers import cache_config, skeleton

    checkpoint = Checkpoint.open(model)
    digest = digest_of(checkpoint).digest or prove(checkpoint)
    mapped = skeleton(checkpoint.folder, dtype)
    wanted = cache_config(checkpoint.folder, mapped, digest, torch.device("cpu"))
    asked = _with_resident_layout(wanted, socket)
    attach(mapped, asked, socket=socket, policies=dict.fromkeys(MISS_REASONS, "fail"), verify=1.0)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    plain = transformers.AutoModelForCausalLM.from_pretrained(checkpoint.folder.root, dtype=mapped.dtype)
    expected, found = census.take_census(plain), census.take_census(mapped)
    differing = census.disparities(expected, found)
    recorded = record and not differing and asked.layout_id != wanted.layout_id
    if recorded:
        census.record(wanted, asked.layout_id)
    report = {
        "equal": not differing,
        "tensors": len(expected),
        "this_layout": wanted.layout_id,
        "resident_layout": asked.layout_id,
        "recorded": recorded,
        "disparities": msgspec.to_builtins(differing),
    }
    typer.echo(json.dumps(report, indent=1) if as_json else _told(report, [str(each) for each in differing]))
    raise typer.Exit(1 if differing else 0)


def _with_resident_layout(wanted: CacheConfig, socket: Path | None) -> CacheConfig:
    """The identity under which the same weights are resident, if only the layout's name differs."""
    where = Context.from_environment()
    hello = messages.Hello(version=VERSION, node=where.node, slot=where.slot)
    with_daemon = Connection(socket or paths.socket_path(), hello)
    try:
        reply, _ = with_daemon.ask(messages.Explain(config=wanted.to_dict()), messages.Done)
    finally:
        with_daemon.close()
    differences: list[dict[str, Any]] = reply.data.get("differences") or []
    if [each["field"] for each in differences] == ["layout_id"]:
        return msgspec.structs.replace(wanted, layout_id=differences[0]["found"])
    return wanted


def _told(report: dict[str, Any], differing: list[str]) -> str:
    if not differing:
        told = f"equal: {report['tensors']} tensors, resident under layout {report['resident_layout']}"
        return f"{told}; recorded for {report['this_layout']}" if report["recorded"] else told
    more = f"\nand {len(differing) - _LISTED} more" if len(differing) > _LISTED else ""
    return f"{len(differing)} differences\n" + "\n".join(differing[:_LISTED]) + more
