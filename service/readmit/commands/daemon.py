"""Options of commands that ask the weight cache daemon."""

from pathlib import Path
from typing import Annotated

import typer

Socket = Annotated[Path | None, typer.Option("--socket", help="The daemon's socket (default: the runtime folder's).")]
Dtype = Annotated[str | None, typer.Option(help="Of the weights in memory (default: the checkpoint's).")]
