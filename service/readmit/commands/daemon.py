"""Options of commands that ask the weight cache daemon."""

import os
from pathlib import Path
from typing import Annotated

import typer

Socket = Annotated[
    Path | None,
    typer.Option("--socket", help="The daemon's socket (default: the configuration's, or the runtime folder's)."),
]
Device = Annotated[
    str | None, typer.Option(help="What the transformers engine computes on, as its own --device (default: cpu).")
]
Dtype = Annotated[str | None, typer.Option(help="Of the weights in memory (default: the checkpoint's).")]


def socket_of(socket: Path | None, config: Path | None) -> Path | None:
    """The daemon's socket: as told, else by a configuration. None: by the environment and the defaults.

    Raises:
        ConfigError: the configuration cannot be used.
    """
    if socket is not None:
        return socket
    if config is None and ("WEIGHTCACHE_SOCKET" in os.environ or not os.path.exists("readmit.toml")):
        return None
    from readmit.config import load  # not at the top: it costs more than all the rest of a question

    return load(config).socket
