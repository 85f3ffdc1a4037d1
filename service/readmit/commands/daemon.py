"""Options of commands that ask the weight cache daemon."""

from pathlib import Path
from typing import Annotated

import typer

from readmit.daemon import ask_daemon as ask
from readmit.daemon import connect

Socket = Annotated[Path | None, typer.Option("--socket", help="The daemon's socket (default: the runtime folder's).")]
Dtype = Annotated[str | None, typer.Option(help="Of the weights in memory (default: the checkpoint's).")]

__all__ = ["Dtype", "Socket", "ask", "connect"]
