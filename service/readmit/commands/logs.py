"""``readmit logs``: what a slot's engine, the daemon or the gate printed."""

import re
import sys
import time
from pathlib import Path
from typing import Annotated, BinaryIO, Final

import typer

from readmit.commands import application
from readmit.report import last_words
from readmit.where import ConfigOption, Where
from weightcache.episodes import Episode, Replay
from weightcache.errors import ConfigError
from weightcache.journal import Event, Journal
from weightcache.keeper.output import TAIL_LINES

app = application()

_LOOK_EVERY_S: Final = 0.2
_OPENINGS: Final = (
    "WHERE slot IN (SELECT DISTINCT slot FROM events) AND kind = 'episode_open' AND instr(episode, ?) = 1 ORDER BY id"
)
_TAIL_BYTES: Final = 1 << 20


@app.command("logs")
def command(
    slot: Annotated[str | None, typer.Argument(help="The slot, or daemon or gate.")] = None,
    episode: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Instead: last words of the engines that a recovery lost; ID as in a 503."),
    ] = None,
    tail: Annotated[int | None, typer.Option(min=0, help="Only so many last lines.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, over restarts.")] = False,
    config: ConfigOption = None,
) -> None:
    """Print the output of the latest attempt, or of the engines that ended before and in a recovery."""
    where = Where.find(config)
    folder = where.state_dir / "output"
    names = sorted({_slot(file) for file in folder.glob("*.log")})
    if (slot is None) == (episode is None):
        kept = f" ({', '.join(names)})" if names else ""
        raise typer.BadParameter(f"name a slot{kept}, or a recovery with --episode")
    if episode is not None:
        _print_recovery(where, folder, episode)
        return
    assert slot is not None
    path = _latest(folder, slot)
    if path is None:
        raise ConfigError(
            "no_output",
            f"no output of {slot} is kept here",
            expected=f"one of {', '.join(names)}" if names else "output, of which there is none yet",
            found=slot,
            remedy="readmit status shows what runs here",
        )
    try:
        _print(folder, slot, path, tail, follow)
    except KeyboardInterrupt:
        raise typer.Exit from None


def _print_recovery(where: Where, folder: Path, id_: str) -> None:
    """The last words of the engine whose end began a recovery, and of those that ended in it."""
    with where.reading() as journal:
        found = journal.query(_OPENINGS, id_.lower()) if id_ else []
        if len(found) != 1:
            raise ConfigError(
                "no_episode",
                f"{id_} names no recovery" if not found else f"{id_} names {len(found)} recoveries",
                expected="the episode_id or trace_id of a 503, or the beginning of one in readmit report",
                found=id_,
                remedy="readmit report lists recoveries and what is kept of their engines",
            )
        episode = _episode(journal, found[0])
        earlier = journal.query(_OPENINGS, episode.previous) if episode.previous else []
        before = _episode(journal, earlier[0]) if earlier else None
    ended = [(before, before.attempt)] if before and before.attempt else []
    ended += [(episode, attempt) for attempt in episode.attempts if attempt.outcome not in (None, "ready")]
    for whose, attempt in ended:
        file = last_words(folder, whose, attempt)
        place = f"slot {whose.slot}, episode {whose.id[:8]}, attempt {attempt.number}"
        print(f"==> {place}: {file or 'no longer kept'} <==", flush=True)
        if file is not None:
            with open(file, "rb") as opened:
                _skip_to_last(opened, TAIL_LINES)
                _copy(opened)


def _episode(journal: Journal, opened: Event) -> Episode:
    """A recovery, by what was said of it until it closed. For one of them no journal is read from its beginning."""
    closing = "WHERE slot = ? AND kind = 'episode_close' AND id > ? AND episode = ? ORDER BY id LIMIT 1"
    closed = journal.query(closing, opened.slot, opened.id, opened.episode)
    until = closed[0].id if closed else journal.last_id()
    its_own = "WHERE id BETWEEN ? AND ? AND episode = ? ORDER BY id"
    replay = Replay()
    for event in journal.query(its_own, opened.id, until, opened.episode):
        replay.feed(event)
    (episode,) = replay.episodes
    return episode


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
