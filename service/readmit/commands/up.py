"""``readmit up``: run a node from its configuration."""

from pathlib import Path
from typing import Annotated

import typer

from readmit.config import DEFAULT_FILE, load
from readmit.node import addresses, become_keeper, check, check_probes, keeper_spec
from weightcache.errors import ConfigError

app = typer.Typer()


@app.command("up")
def command(
    file: Annotated[Path | None, typer.Argument(metavar="CONFIG", help="The file; readmit.toml if absent.")] = None,
    check_only: Annotated[bool, typer.Option("--check", help="Only say whether it could start.")] = False,
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
    if config.gate.enabled and config.slot:
        check_probes(config.gate.probes, config.gate_settings().unverified_ok)
    spec = keeper_spec(config)
    check(spec, addresses(config))
    if check_only:
        typer.echo(f"{len(spec.children)} processes can start: {', '.join(child.name for child in spec.children)}")
        return
    become_keeper(spec)
