"""``readmit restart``: restart a slot on purpose, with its cause on record."""

from typing import Annotated

import typer

from readmit.where import ConfigOption, Where
from weightcache.keeper.control import ask

app = typer.Typer()


@app.command("restart")
def command(
    slot: Annotated[str, typer.Argument(help="The slot, or daemon or gate.")],
    cause: Annotated[str, typer.Option(help="Why: upgrade, config_change, preempted, drill, ...")] = "drill",
    config: ConfigOption = None,
) -> None:
    """Restart a slot's engine, or the daemon, or the gate. A slot that was given up starts anew."""
    answer = ask(Where.find(config).runtime_dir, {"restart": slot, "cause": cause})
    typer.echo(f"{slot} is restarting" + (f", episode {answer['episode']}" if answer.get("episode") else ""))
