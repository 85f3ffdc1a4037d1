"""``readmit config``: check a node's configuration, or print what is in force."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from readmit.commands import Json, application
from readmit.config import DEFAULT_FILE, load

app = application(no_args_is_help=True)

File = Annotated[Path | None, typer.Argument(metavar="CONFIG", help="The file; readmit.toml if absent.")]


@app.command("check")
def check(file: File = None, as_json: Json = False) -> None:
    """Say whether a configuration can be used.

    Ports, programs and files are looked at by readmit up --check.
    """
    config = load(file or DEFAULT_FILE)
    if config.slot and config.gate.enabled:
        config.gate_settings()  # which refuses what can never work
    if as_json:
        typer.echo(config.model_dump_json(indent=2))
    else:
        typer.echo(f"{config.file}: good, slots: {', '.join(slot.name for slot in config.slot) or 'none'}")


@app.command("show")
def show(file: File = None, as_json: Json = False) -> None:
    """Print every key with the value in force.

    It is the environment's, else the file's, else the default.
    """
    config = load(file)
    if as_json:
        typer.echo(config.model_dump_json(indent=2))
        return
    data = config.model_dump(mode="json")
    data["slo"] = dataclasses.asdict(config.objectives)
    for section in ("node", "cache", "gate", "telemetry", "slo"):
        _table(f"[{section}]", data[section])
    for slot in data["slot"]:
        _table("[[slot]]", slot)


def _table(title: str, values: dict[str, object]) -> None:
    typer.echo(title)
    for key, value in values.items():
        typer.echo(f"{key} = {_toml(value)}" if value is not None else f"# {key} is not set")
    typer.echo()


def _toml(value: object) -> str:
    """A value as TOML; strings, numbers and booleans are written as in JSON."""
    import json

    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)
