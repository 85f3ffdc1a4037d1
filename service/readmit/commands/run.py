"""``readmit run``: keep one engine running, without a node's configuration."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from readmit.commands import application
from readmit.config import LogFormat, Slot, unusable
from readmit.gate.settings import GateSettings, SlotSettings
from readmit.node import GATE_STOP_S, become_keeper, check, check_probes, engine, search_path
from readmit.observe.engines import Engine, url_of
from weightcache import paths
from weightcache.errors import ConfigError
from weightcache.journal import Context
from weightcache.keeper.spec import BACKOFF_S, LIMIT, STOP_S, WINDOW_S, ChildSpec, KeeperSpec

app = application()


@app.command("run", context_settings={"allow_interspersed_args": False})
def command(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="The engine and its arguments.")],
    name: Annotated[str, typer.Option(help="The slot's name in journal, metrics and reports.")] = "a",
    url: Annotated[str | None, typer.Option(help="The engine's base URL: a gate then stands before it.")] = None,
    probes: Annotated[
        Path | None, typer.Option(help="Golden answers that the engine must give before traffic.")
    ] = None,
    gate: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the gate listens.")] = "127.0.0.1:8000",
    unverified_ok: Annotated[bool, typer.Option("--unverified-ok", help="A gate without golden answers.")] = False,
    max_restarts: Annotated[
        int, typer.Option(min=-1, help="Restarts without becoming ready before giving up; -1 for never.")
    ] = LIMIT - 1,
    window: Annotated[float, typer.Option(min=0, help="Seconds within which restarts count.")] = WINDOW_S,
    backoff: Annotated[
        str, typer.Option(help="Seconds before each restart, the last for all further ones.")
    ] = ",".join(f"{pause:g}" for pause in BACKOFF_S),
    stop_limit: Annotated[float, typer.Option(min=0, help="Seconds from SIGTERM to SIGKILL.")] = STOP_S,
    model: Annotated[
        str | None, typer.Option(help="Folder of its model: what is cached of it is part of a starting state.")
    ] = None,
    observe: Annotated[
        bool, typer.Option("--observe", help="Nobody changed the engine: learn of its start from its log and port.")
    ] = False,
    kind: Annotated[
        Engine | None, typer.Option("--engine", help="Whose lines an observed log has, where its command is a wrapper.")
    ] = None,
    log_format: Annotated[LogFormat | None, typer.Option(help="Of the logs; READMIT_LOG_FORMAT if absent.")] = None,
    preload: Annotated[
        str | None, typer.Option(metavar="MODULE", help="Hold the command's python -m MODULE imported, for restarts.")
    ] = None,
) -> None:
    """Keep one engine running and account for its recoveries.

    Its output is shown here and kept in files (readmit logs). With --url and --probes a gate lets traffic in only once
    the answers are right; without, an engine counts as up when it says READY=1 (sd_notify), unverified.
    Exits 1 when the engine is given up.
    """
    runtime_dir = paths.runtime_dir(create=False)
    url = url or (url_of(command, kind) if observe else None)
    if kind and not observe:
        raise ConfigError("usage", "--engine goes with --observe: whose log is read", remedy="Give --observe too")
    if observe and url is None:
        raise ConfigError(
            "usage",
            "nothing says where the observed engine will listen",
            expected="--port in its command",
            found="none",
            remedy="Give --url",
        )
    try:
        slot = Slot(
            name=name,
            command=tuple(command),
            url=url,
            model=model,
            cwd=Path.cwd(),
            backoff_s=backoff.split(","),  # type: ignore[arg-type]  # pydantic reads the numbers
            limit=max_restarts + 1,
            window_s=window,
            stop_s=stop_limit,
            preload=preload,
        )
    except ValidationError as error:
        raise unusable("the command line", error) from error
    env = {"PATH": search_path()}
    children = list(engine(slot, env, runtime_dir))
    if observe:
        options = ["--slot", slot.name, "--address", slot.address or "", *(["--engine", kind] if kind else [])]
        argv = (sys.executable, "-m", "readmit.observe", *options, "--", *slot.argv)
        children.append(ChildSpec(f"{slot.name}-observer", "other", argv, env))
    listening = {slot.name: slot.address} if slot.address else {}
    if url is not None:
        check_probes(probes, unverified_ok)
        _ = GateSettings((SlotSettings(slot.name, url),), listen=gate).address  # which refuses what is none
        if gate == slot.address:
            raise ConfigError(
                "usage",
                f"gate and engine cannot both listen on {gate}",
                remedy="Give the gate another address (--gate), or the engine another port",
            )
        options = ["--slot", f"{slot.name}={url}", "--listen", gate, "--runtime-dir", str(runtime_dir)]
        options += ["--probes", str(probes)] if probes else []
        options += ["--unverified-ok"] if unverified_ok else []
        argv = (sys.executable, "-m", "readmit.gate", *options)
        children.append(ChildSpec("gate", "gate", argv, env, stop_s=GATE_STOP_S))
        listening["gate"] = gate
    elif probes is not None:
        raise ConfigError("usage", "--probes needs --url: golden answers are asked for over HTTP", remedy="Give --url")
    spec = KeeperSpec(
        node=Context.from_environment().node,
        runtime_dir=runtime_dir,
        state_dir=paths.state_dir(create=False),
        journal=paths.journal_path(),
        children=tuple(children),
        closes_episodes=url is None,
        foreground=True,
    )
    check(spec, listening)
    become_keeper(spec, log_format)
