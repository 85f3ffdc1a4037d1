"""The commands of ``readmit``, one a file, and what they have in common."""

import getpass
import os
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def application(**about: Any) -> typer.Typer:
    """A command, or a group of them: plain help, and completion left to ``readmit`` itself."""
    return typer.Typer(add_completion=False, rich_markup_mode=None, **about)


def tell(text: str, *, as_json: bool) -> None:
    """A line for people, who read it on stderr where stdout has JSON."""
    typer.echo(text, err=as_json)


def user() -> str:
    """Who gives an order, for the record: a number where nobody has a name, as in most containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"
