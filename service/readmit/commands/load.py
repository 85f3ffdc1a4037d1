"""``readmit cache load`` and ``prepare``: weights made resident before an engine asks for them."""

import json
import os
import shlex
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from readmit.commands import Json
from readmit.commands.checkpoint import prove
from readmit.commands.daemon import Device, Dtype, Socket, socket_of
from readmit.commands.engines import Engine, Offline, offline
from readmit.daemon import ask_daemon, connect
from readmit.where import ConfigOption
from weightcache import identity, memory, messages
from weightcache.checkpoint import Checkpoint, Folder
from weightcache.errors import ProtocolError, ResourceError

TpSize = Annotated[int, typer.Option("--tp-size", min=1, help="Ranks that share the model: one load worker for each.")]
Wait = Annotated[float, typer.Option("--wait", min=0, max=messages.MAX_WAIT_S, help="Seconds until it is given up.")]


def load(
    model: Annotated[str | None, typer.Argument(help="A checkpoint's folder.")] = None,
    command: Annotated[
        str | None, typer.Option(help="Another engine's command that loads, publishes and exits.")
    ] = None,
    engine: Engine = "transformers",
    dtype: Dtype = None,
    device: Device = None,
    tp_size: TpSize = 1,
    wait_s: Wait = 1800.0,
    socket: Socket = None,
    config: ConfigOption = None,
    as_json: Json = False,
) -> None:
    """Load weights now, so that the next engine hits."""
    if (model is None) == (command is None):
        raise typer.BadParameter("name a model, or give --command")
    if command is not None and (tp_size > 1 or dtype is not None or device is not None):
        raise typer.BadParameter("--tp-size, --dtype and --device are for a model; the command has its own")
    if engine != "transformers" and device is not None:
        raise typer.BadParameter(f"{engine} takes the GPUs that it sees: set CUDA_VISIBLE_DEVICES for this command")
    if command is not None:
        workers = [_words(command)]
    else:
        workers = _workers(sys.executable, offline(engine), str(model), dtype, tp_size, device)
    done = _load_all(workers, wait_s, socket_of(socket, config))
    seconds = max(each["seconds"] for each in done)
    facts = done[0] if len(done) == 1 else {"seconds": seconds, "ranks": done}
    typer.echo(json.dumps(facts) if as_json else f"resident after {seconds} s")


def prepare(
    model: Annotated[str, typer.Argument(help="A checkpoint's folder.")],
    new: Annotated[Path, typer.Option(metavar="VENV", help="The coming version's virtual environment.")],
    engine: Engine = "transformers",
    dtype: Dtype = None,
    tp_size: TpSize = 1,
    wait_s: Wait = 1800.0,
    socket: Socket = None,
    config: ConfigOption = None,
    as_json: Json = False,
) -> None:
    """Load for a coming version of the engine, beside what is in use.

    Exits 2 where there is no room for both.
    """
    runs, python = offline(engine), new / "bin" / "python"
    if not os.access(python, os.X_OK):
        raise typer.BadParameter(f"{python} is no interpreter that can be run")
    socket = socket_of(socket, config)
    before = ask_daemon(socket, messages.Status())
    needed = Checkpoint.open(model).total_bytes
    require_room(before, needed)
    workers = [[*argv, "--beside"] for argv in _workers(str(python.absolute()), runs, model, dtype, tp_size)]
    done = _load_all(workers, wait_s, socket)
    after = ask_daemon(socket, messages.Status())
    old = {each["generation"] for each in before["generations"]}
    facts = {
        "seconds": max(each["seconds"] for each in done),
        "loaded": [each["generation"] for each in after["generations"] if each["generation"] not in old],
        "still_resident": sorted(old & {each["generation"] for each in after["generations"]}),
        "evicted": sorted(old - {each["generation"] for each in after["generations"]}),
        "resident_bytes": after["resident_bytes"],
        "capacity": after["capacity"],
    }
    facts["both_fit"] = not facts["evicted"]
    typer.echo(json.dumps(facts, indent=1) if as_json else _told(facts))


def _words(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise typer.BadParameter(f"--command cannot be read as a shell would: {error}") from error
    if not words:
        raise typer.BadParameter("--command is empty")
    return words


def _told(facts: dict[str, Any]) -> str:
    if not facts["loaded"]:
        return "nothing to do: what is resident serves the coming version too"
    loaded, kept = ", ".join(facts["loaded"]), ", ".join(facts["still_resident"]) or "nothing else"
    return f"loaded {loaded} after {facts['seconds']} s; beside it stays {kept}"


def require_room(status: dict[str, Any], needed: int) -> None:
    """Check that as much as `needed` fits beside what is resident.

    Raises:
        ResourceError: ``memory`` or ``capacity``, with both byte counts.
    """
    rooms = [("memory", memory.available().bytes)]
    if status["capacity"] is not None:
        rooms.append(("capacity", status["capacity"] - status["resident_bytes"]))
    detail, available = min(rooms, key=lambda room: room[1])
    if needed > available:
        raise ResourceError(
            "the weights of both versions do not fit at once",
            detail=detail,
            expected=f"{needed} bytes beside {status['resident_bytes']} that are resident",
            found=f"{available} bytes",
            remedy="Release what is not needed, raise --capacity, or let the upgrade cost one cold start",
            needed=needed,
            available=available,
        )


def _workers(
    python: str, engine: Offline, model: str, dtype: str | None, tp_size: int, device: str | None = None
) -> list[list[str]]:
    """The load workers' commands: a rank each, or one for all of them."""
    folder = os.path.abspath(model) if os.path.exists(model) else model
    argv = [python, "-m", engine.worker, folder]
    argv += [f"--dtype={dtype}"] if dtype else []
    argv += [f"--device={device}"] if device else []
    if not engine.rank_by_rank:
        return [[*argv, f"--tp-size={tp_size}"]]
    if tp_size == 1:
        return [argv]
    _know(Folder.open(folder))
    return [[*argv, f"--tp-size={tp_size}", f"--tp-rank={rank}"] for rank in range(tp_size)]


def _know(folder: Folder) -> None:
    """See to it that the files' digest is known: ranks read parts, which nobody can hash."""
    if identity.digest_of(folder).digest is None:
        began = time.monotonic()
        checkpoint = Checkpoint.open(folder)
        prove(checkpoint)
        seconds = time.monotonic() - began
        typer.echo(f"read {checkpoint.total_bytes} bytes for their digest in {seconds:.1f} s, once", err=True)


def _load_all(workers: list[list[str]], wait_s: float, socket: Path | None) -> list[dict[str, Any]]:
    """Run load workers at once, each to its end.

    Raises:
        CacheMiss: one of them failed; its last words are in the message.
    """
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:

        def run(rank: int) -> dict[str, Any]:
            task = progress.add_task(f"loading rank {rank}" if len(workers) > 1 else "loading", total=None)
            env = {**os.environ, **({"READMIT_RANK": str(rank)} if len(workers) > 1 else {})}
            request = messages.Load(argv=workers[rank], env=env, wait_s=wait_s)
            with closing(connect(socket)) as connection:
                for reply, _ in connection.ask_for_all(request, timeout_s=wait_s + 30.0):
                    if isinstance(reply, messages.Loading):
                        progress.update(task, completed=reply.done, total=reply.total or None)
                    elif isinstance(reply, messages.Done):
                        return reply.data
            raise ProtocolError("protocol", "the daemon ended the load without a word", expected="Done")

        with ThreadPoolExecutor(len(workers)) as pool:
            return list(pool.map(run, range(len(workers))))
