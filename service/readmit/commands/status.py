"""``readmit status``: what runs here now, by the keeper's word and the journal's."""

import json
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import typer

from readmit.commands import Json, application
from readmit.gate.operator import order
from readmit.where import ConfigOption, Where
from weightcache.episodes import Replay
from weightcache.episodes.state import resumed
from weightcache.errors import ConfigError
from weightcache.keeper.control import ask
from weightcache.keeper.state import read
from weightcache.process import Process

app = application()


@app.command("status")
def command(
    alive: Annotated[
        bool, typer.Option("--alive", help="Only whether a keeper answers: quick, whatever the journal holds.")
    ] = False,
    config: ConfigOption = None,
    as_json: Json = False,
) -> None:
    """Show the processes of this node: state, pid, uptime, and for each slot its recovery and its place at the gate.

    Exits 1 when no keeper runs.
    """
    where = Where.find(config)
    try:
        keeper, problem = ask(where.runtime_dir, {"status": True}), None
    except ConfigError as error:
        keeper, problem = _left_behind(where), str(error)
    if alive:
        typer.echo(json.dumps({"pid": keeper["pid"], "problem": problem}) if as_json else problem or "a keeper answers")
        raise typer.Exit(1 if problem else 0)
    try:
        with where.reading() as journal:
            replay = resumed(journal.furthest_snapshot())
            replay.catch_up(journal)
    except ConfigError as error:
        replay, problem = Replay(), problem or str(error)
    gate = _gate(where)
    for child in keeper["children"]:
        child["recovery"] = _recovery(replay, child["name"]) if child["role"] == "engine" else None
        child["gate"] = gate.get(child["name"])
    if as_json:
        typer.echo(json.dumps({**keeper, "problem": problem}, indent=2))
    else:
        typer.echo(table(keeper["children"]))
        if problem:
            typer.echo(f"readmit: {problem}", err=True)
    raise typer.Exit(1 if problem else 0)


def _gate(where: Where) -> dict[str, dict[str, Any]]:
    """What the gate says of each slot; nothing where none answers."""
    try:
        slots = order(where.runtime_dir, "GET", "/api/status")["slots"]
    except ConfigError:
        return {}
    kept = ("state", "reason", "message", "active", "in_flight", "cost", "next_start")
    return {slot["slot"]: {key: slot[key] for key in kept} for slot in slots}


def _left_behind(where: Where) -> dict[str, Any]:
    """What a keeper that is gone left running."""
    children = []
    for record in read(where.runtime_dir)[1]:
        process = Process.open(record.pid, record.start_ticks) if record.pid else None
        if process is not None:
            process.close()
            children.append({**record._asdict(), "state": "unkept", "uptime_s": None, "status": "", "starts": None})
    return {"pid": None, "node": None, "children": children}


def _recovery(replay: Replay, name: str) -> dict[str, Any] | None:
    slot = replay.slots.get(name)
    if slot is None:
        return None
    episode = slot.episode or slot.last
    if episode is None:
        return None
    attempt, now_ns = episode.attempt, replay.clock.now()
    return {
        "slot_state": slot.state,
        "episode": episode.id,
        "open": episode.is_open,
        "cause": episode.cause,
        "path": episode.path,
        "outcome": episode.outcome,
        "verified": episode.verified,
        "seconds": round(episode.age_s(now_ns), 3),
        "attempt": attempt.number if attempt else None,
        "phase": attempt.phase if attempt else None,
    }


def table(children: Iterable[dict[str, Any]]) -> str:
    """A line for each process."""
    rows = [("NAME", "ROLE", "STATE", "PID", "UPTIME", "")]
    for child in children:
        recovery = child["recovery"]
        state = (recovery or {}).get("slot_state") if child["state"] == "running" else None
        if state == "stopped":  # the engine before this one; the gate has not looked at this one yet
            state = None
        rows.append(
            (
                child["name"],
                child["role"],
                state or child["state"],
                str(child["pid"] or "-"),
                _duration(child["uptime_s"]),
                "; ".join(filter(None, (_story(child), *_place(child.get("gate"))))),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _story(child: dict[str, Any]) -> str:
    recovery = child["recovery"]
    if recovery is None:
        return str(child["status"])
    if child["state"] == "stopped":
        return f"has yielded its place: readmit preempt {child['name']} --resume brings it back"
    seconds = f"{recovery['seconds']:.1f} s"
    if recovery["open"]:
        doing = f", in {recovery['phase']}" if recovery["phase"] else ""
        return f"recovering from {recovery['cause']} for {seconds}, attempt {recovery['attempt'] or 0}{doing}"
    if recovery["outcome"] == "ready":
        kind = "first correct answer" if recovery["verified"] else "up, unverified,"
        return f"{kind} {seconds} after {recovery['cause']} ({recovery['path']})"
    return f"{recovery['outcome']} {seconds} after {recovery['cause']}"


def _place(gate: dict[str, Any] | None) -> Iterator[str]:
    """What keeps a slot out; whether it serves or stands by, and what that costs; a next start that would miss."""
    if gate is None:
        return
    if gate["state"] == "verifying" and gate["message"]:
        yield gate["message"]
    if gate["state"] not in ("ready", "draining"):
        return
    place = "drained" if gate["state"] == "draining" else "serves" if gate["active"] else "stands by"
    cost = gate["cost"] or {}
    memory = f", {cost['private_bytes'] >> 20} MiB of its own" if cost.get("private_bytes") else ""
    tokens = f", room for {cost['kv_tokens']} tokens" if cost.get("kv_tokens") else ""
    yield place + memory + tokens
    if gate["next_start"] and not gate["next_start"]["would_hit"]:
        yield f"next start would miss ({gate['next_start']['reason']})"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}h"
    if hours:
        return f"{hours}h {minutes}m"
    return f"{minutes}m {rest}s" if minutes else f"{rest}s"
