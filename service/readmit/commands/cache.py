"""``readmit cache``: the weight cache daemon, and what it holds."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from readmit.commands import Json, application
from readmit.commands.checkpoint import fingerprint, preflight
from readmit.commands.daemon import Device, Dtype, Socket, socket_of
from readmit.commands.load import load, prepare
from readmit.commands.parity import parity
from readmit.commands.tables import table
from readmit.daemon import ask_daemon
from readmit.where import ConfigOption
from weightcache import messages
from weightcache.occupancy import by_device

app = application(no_args_is_help=True, help="The weight cache daemon, and what it holds.")
app.command()(preflight)
app.command()(fingerprint)
app.command()(parity)
app.command()(load)
app.command()(prepare)


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []})
def serve(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option("--config", help="The node's configuration; other options win.")
    ] = None,
) -> None:
    """Run the weight cache daemon in the foreground."""
    command: tuple[str, ...] = (sys.executable, "-m", "weightcache.daemon")
    if config is not None:
        from readmit.config import load as load_config  # here, because a daemon that restarts without one waits for it
        from readmit.node import daemon_command

        node = load_config(config)
        command = daemon_command(node)
        os.environ |= {"READMIT_NODE": node.node.name, "READMIT_JOURNAL": str(node.journal)}
    if {"-h", "--help"} & set(context.args):
        print("With --config FILE it is run as the node's configuration says; options beside that win.\n", flush=True)
    # A process of its own: the daemon stays small because it never imports what this command line needs.
    os.execv(command[0], [*command, *context.args])


@app.command()
def status(socket: Socket = None, config: ConfigOption = None, as_json: Json = False) -> None:
    """Show what is resident, who uses it, what loads, what was lost."""
    facts = ask_daemon(socket_of(socket, config), messages.Status())
    if as_json:
        typer.echo(json.dumps(facts, indent=1))
        return
    console = Console(soft_wrap=True)
    limit = f" of {_mib(facts['capacity'])}" if facts["capacity"] else ""
    keeper = "descriptors kept by a keeper" if facts["keeper"] else "no keeper: weights end with daemon and engines"
    console.print(
        f"daemon pid {facts['pid']} at {facts['socket']}, up {facts['uptime_s']:.0f} s, {facts['rss_mib']} MiB itself; "
        f"{_mib(facts['resident_bytes'])}{limit} resident; {keeper}"
    )
    for device, taken in by_device(facts["generations"]).items():
        console.print(f"{device}: {_mib(taken.resident)} of its memory resident, {_mib(taken.leased)} of them in use")
    for each in facts["generations"]:
        console.print(_generation(each))
    for claim in facts["claims"]:
        done = f"{_mib(claim['done'])} of {_mib(claim['total'])}"
        what = claim["config"]["model_path"] + _on(claim)
        console.print(f"pid {claim['pid']} is loading {what}: {done}, {claim['elapsed_s']} s")
    for loss in facts["losses"]:
        console.print(f"generation {loss['generation']}{_on(loss)} was lost: {loss['detail']}")
    if facts["journal"]["spool_bytes"] or facts["journal"]["lost"]:
        console.print(f"the journal is degraded: {facts['journal']}")


@app.command()
def release(
    generation: Annotated[str | None, typer.Argument(help="A generation, or the start of its name.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Release all of them.")] = False,
    force: Annotated[bool, typer.Option(help="Also what engines use; its memory returns when they end.")] = False,
    socket: Socket = None,
    config: ConfigOption = None,
    as_json: Json = False,
) -> None:
    """Give resident weights up."""
    if (generation is None) != everything:
        raise typer.BadParameter("name a generation, or give --all")
    socket = socket_of(socket, config)
    name = None if generation is None else _full_name(socket, generation)
    released = ask_daemon(socket, messages.Release(generation=name, force=force))["released"]
    typer.echo(json.dumps({"released": released}) if as_json else f"released {', '.join(released) or 'nothing'}")


@app.command()
def quarantine(
    generation: Annotated[str, typer.Argument(help="A generation, or the start of its name.")],
    reason: Annotated[str, typer.Option(help="Why; shown to whoever asks for it.")] = "set by an operator",
    lift: Annotated[bool, typer.Option("--lift", help="Hand it out again.")] = False,
    socket: Socket = None,
    config: ConfigOption = None,
    as_json: Json = False,
) -> None:
    """Hand a generation to nobody, without giving its memory up."""
    socket = socket_of(socket, config)
    request = messages.Quarantine(generation=_full_name(socket, generation), reason=reason, lift=lift)
    facts = ask_daemon(socket, request)
    told = f"generation {facts['generation']} is {'quarantined: ' + reason if facts['quarantined'] else 'handed out'}"
    typer.echo(json.dumps(facts) if as_json else told)


@app.command()
def explain(
    model: Annotated[str, typer.Argument(help="A checkpoint's folder.")],
    dtype: Dtype = None,
    tp_size: Annotated[int, typer.Option(min=1, help="How many ranks share the model.")] = 1,
    tp_rank: Annotated[int, typer.Option(min=0, help="Which of them asks.")] = 0,
    device: Device = None,
    socket: Socket = None,
    config: ConfigOption = None,
    as_json: Json = False,
) -> None:
    """Say whether a transformers engine would hit now, and if not, why.

    Both sides of every field that differs are shown. Of any other engine readmit status says it, by what its slot asked
    for last.
    """
    socket = socket_of(socket, config)
    wanted, gpu = _wanted(model, dtype, device, tp_size, tp_rank)
    facts = ask_daemon(socket, messages.Explain(config=wanted, device=gpu))
    if as_json:
        typer.echo(json.dumps({**facts, "config": wanted}, indent=1))
    elif facts["would_hit"]:
        typer.echo(f"hit: generation {facts['generation']}")
    else:
        typer.echo(told(facts))
        if facts["differences"]:
            Console().print(_differences(facts["differences"]))
    if not facts["would_hit"]:
        raise typer.Exit(1)


def _wanted(
    model: str, dtype: str | None, device: str | None, tp_size: int, tp_rank: int
) -> tuple[dict[str, Any], str | None]:
    """The identity that a transformers engine asks for, as that computes it, and the UUID of its GPU."""
    from weightcache.checkpoint import Folder  # not at the top: seconds, and only here
    from weightcache.device import uuid
    from weightcache.identity import digest_of
    from weightcache.integrations.transformers import cache_config, place_of, skeleton
    from weightcache.parity import resident_layout

    folder, place = Folder.open(model), place_of(device or "cpu")
    model_ = skeleton(folder, dtype, tp_size, tp_rank)
    config = cache_config(folder, model_, digest_of(folder).digest, place, tp_size, tp_rank)
    return resident_layout(config).to_dict(), uuid(place.index) if place.type == "cuda" else None


def _full_name(socket: Path | None, start: str) -> str:
    names = [each["generation"] for each in ask_daemon(socket, messages.Status())["generations"]]
    matching = [name for name in names if name.startswith(start)]
    if len(matching) != 1:
        there = ", ".join(names) or "none"
        raise typer.BadParameter(f"{start!r} names {len(matching)} generations; resident: {there}")
    return str(matching[0])


def _generation(each: dict[str, Any]) -> str:
    """A generation in lines that need no width: paths are long."""
    config = each["config"]
    leases = ", ".join(f"{lease['slot'] or 'pid'} {lease['pid']}" for lease in each["leases"]) or "none"
    state = f"quarantined: {each['quarantined']}" if each["quarantined"] else "stored" if each["stored"] else "held"
    dtype = config["quant_method"] if config["quant_method"] != "none" else config["dtype"]
    return (
        f"[bold]{each['generation'][:12]}[/bold] {escape(config['model_path'])}\n"
        f"  rank {config['tp_rank']}/{config['tp_size']}, {dtype}, {_mib(each['bytes'])} in {each['tensors']} tensors, "
        f"{each['device'] or each['arena']}, {state}; leases: {leases}; hits: {each['hits']}"
    )


def told(miss: dict[str, Any]) -> str:
    """Why an engine would miss. Where every difference is shown with it, it need not say how to see them."""
    message = miss["message"].removesuffix(f" {miss['remedy']}.") if miss["differences"] else miss["message"]
    return f"miss, reason {miss['reason']}: {message}"


def _on(each: dict[str, Any]) -> str:
    """Of replicas: which; a daemon of an earlier release does not say it."""
    return f" on {each['device']}" if each.get("device") else ""


def _differences(differences: list[dict[str, Any]]) -> Table:
    shown = table("field", "this model", "resident")
    for each in differences:
        shown.add_row(each["field"], str(each["expected"]), str(each["found"]))
    return shown


def _mib(size: int | None) -> str:
    if not size:
        return "0 MiB"
    return f"{size / 2**30:.1f} GiB" if size >= 10 * 2**30 else f"{size / 2**20:.0f} MiB"
