"""``readmit up``: run a node from its configuration."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from readmit.commands import application
from readmit.config import DEFAULT_FILE, LogFormat, load
from readmit.node import addresses, become_keeper, check, check_gate, keeper_spec
from weightcache.errors import ConfigError

app = application()


class Role(StrEnum):
    """Kinds of a node's processes."""

    DAEMON = "daemon"
    ENGINE = "engine"
    GATE = "gate"


@app.command("up")
def command(
    file: Annotated[Path | None, typer.Argument(metavar="CONFIG", help="The file; readmit.toml if absent.")] = None,
    only: Annotated[
        list[Role] | None, typer.Option(help="Only processes of this kind, where others run elsewhere; repeatable.")
    ] = None,
    check_only: Annotated[bool, typer.Option("--check", help="Only say whether it could start.")] = False,
    log_format: Annotated[LogFormat | None, typer.Option(help="Of all logs, instead of the configuration's.")] = None,
) -> None:
    """Run a node: the weight cache daemon, its engines and the gate, under a keeper that restarts them.

    Runs until SIGTERM or Ctrl-C, which end everything in good order. A keeper that was killed is replaced by running
    the same command again: it adopts what still runs.
    """
    config = load(file or DEFAULT_FILE)
    if not config.slot and not config.cache.enabled:
        raise ConfigError(
            "config",
            "there is nothing to run",
            expected="a [[slot]], or the cache enabled",
            found="neither",
            remedy="deploy/readmit.toml is an example",
        )
    if config.gate.enabled and config.slot and (not only or Role.GATE in only):
        check_gate(config.gate_settings())
    spec = keeper_spec(config)
    if only:
        spec = spec._replace(children=tuple(child for child in spec.children if child.role in only))
    names = [child.name for child in spec.children]
    check(spec, {name: address for name, address in addresses(config).items() if name in names})
    for child in spec.children:
        # Only said: the folder may be one that the command sees, in a container of its own.
        if child.model is not None and Path(child.model).is_absolute() and not Path(child.model).exists():
            typer.echo(f"readmit: slot {child.name}: there is no {child.model} here, its model", err=True)
    if check_only:
        typer.echo(f"can start: {', '.join(names)}")
        return
    become_keeper(spec, log_format or config.telemetry.log_format)
