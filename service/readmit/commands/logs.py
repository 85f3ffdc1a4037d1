"""``readmit logs``: what a slot's engine, the daemon or the gate printed."""

import re
import sys
import time
from pathlib import Path
from typing import Annotated, BinaryIO, Final

import typer

from readmit.where import ConfigOption, Where
from weightcache.errors import ConfigError

app = typer.Typer()

_LOOK_EVERY_S: Final = 0.2
_TAIL_BYTES: Final = 1 << 20


@app.command("logs")
def command(
    slot: Annotated[str, typer.Argument(help="The slot, or daemon or gate.")],
    tail: Annotated[int | None, typer.Option(min=0, help="Only so many last lines.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, over restarts.")] = False,
    config: ConfigOption = None,
) -> None:
    """Print the output of the latest attempt."""
    folder = Where.find(config).state_dir / "output"
    path = _latest(folder, slot)
    if path is None:
        names = sorted({_slot(file) for file in folder.glob("*.log")}) if folder.is_dir() else []
        raise ConfigError(
            "no_output",
            f"{slot} has printed nothing yet",
            expected=f"one of {', '.join(names) or 'no slot so far'}",
            found=slot,
            remedy="readmit status lists the slots",
        )
    try:
        _print(folder, slot, path, tail, follow)
    except KeyboardInterrupt:
        raise typer.Exit from None


def _print(folder: Path, slot: str, path: Path, tail: int | None, follow: bool) -> None:
    with open(path, "rb") as file:
        if tail is not None:
            _skip_to_last(file, tail)
        position = _copy(file)
        while follow and _latest(folder, slot) == path:
            time.sleep(_LOOK_EVERY_S)
            if path.stat().st_size < position:  # the keeper has cut it
                file.seek(0)
            position = _copy(file)
    newer = _latest(folder, slot) if follow else None
    if newer is not None:
        _print(folder, slot, newer, None, follow)


def _copy(file: BinaryIO) -> int:
    while data := file.read(1 << 16):
        sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
    return file.tell()


def _skip_to_last(file: BinaryIO, lines: int) -> None:
    size = file.seek(0, 2)
    file.seek(max(0, size - _TAIL_BYTES))
    last = file.read().splitlines(keepends=True)[-lines:] if lines else []
    file.seek(size - sum(map(len, last)))


def _latest(folder: Path, slot: str) -> Path | None:
    files = [file for file in folder.glob("*.log") if _slot(file) == slot]
    return max(files, key=lambda file: file.stat().st_mtime_ns, default=None)


def _slot(file: Path) -> str:
    """Whose output a file is: ``daemon.log``, or slot, episode and attempt of an engine."""
    return re.sub(r"-[0-9a-f]{8}-\d+$", "", file.stem)
