"""``readmit restart``: restart a slot on purpose, with its cause on record."""

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from readmit.commands import Json, application, tell, user
from readmit.config import DEFAULT_FILE, load
from readmit.gate.operator import SOCKET, order
from readmit.node import renewed_spec, spec_in_place
from readmit.recovered import LIMIT_S, check_asked, wait
from readmit.where import ConfigOption, Where
from weightcache.errors import ConfigError
from weightcache.keeper.control import ask
from weightcache.keeper.handover import TRIAL_LIMIT_S
from weightcache.keeper.slot import ORDERED_CAUSES
from weightcache.keeper.spec import KeeperSpec
from weightcache.keeper.state import spec_path
from weightcache.keeper.succession import REST_LIMIT_S

app = application()

KEEPER: Final = "keeper"
PLANNED: Final = ("upgrade", "config_change")
"""Causes for which nobody is in a hurry: requests go to another slot first, if one is ready."""
DRAIN_LIMIT_S: Final = 60.0
"""How long requests of an engine that is to be restarted may take to end."""
GATE_LIMIT_S: Final = 60.0
"""How long a gate that is killed meanwhile may take to come back: a slot must not stay drained."""
ANSWER_S: Final = 60.0
"""For the answer itself, on a machine that has much else to do."""
_LOOK_S: Final = 0.05


@app.command("restart")
def command(
    slot: Annotated[str, typer.Argument(help="The slot, or daemon, gate or keeper.")],
    cause: Annotated[
        str, typer.Option(help=f"Why an engine is restarted, for the record: {', '.join(ORDERED_CAUSES)}.")
    ] = "drill",
    wait_for_it: Annotated[
        bool, typer.Option("--wait", help="Until it is up: for an engine, until its first correct answer.")
    ] = False,
    config: ConfigOption = None,
    as_json: Json = False,
) -> None:
    """Restart a slot's engine, the daemon, the gate or the keeper. A slot that was given up starts anew.

    For the causes upgrade and config_change its requests go to another slot first, if one is ready, and those under way
    end, for which they have 60 s.

    A keeper goes on in its process as the release of this command, by the configuration as it is now: slots that are
    new start, and are let in once the gate has been restarted too. What runs does not notice. Where that release cannot
    run, the old keeper stays and the reason is printed. With --wait, exits 1 when the engine does not come back.
    """
    where = Where.find(config)
    facts: dict[str, Any] = {"slot": slot, "episode": None}
    ready = True
    if slot == KEEPER:
        tell(reexec(where, config), as_json=as_json)
    else:
        before = child(where, slot)
        if wait_for_it:
            check_asked(where, slot)
        episode = facts["episode"] = restarted(where, slot, cause)
        tell(f"{slot} is restarting" + (f", episode {episode}" if episode else ""), as_json=as_json)
        if wait_for_it and episode is None:
            tell(up(where, before), as_json=as_json)
        elif wait_for_it and episode is not None:
            recovered = wait(where, episode)
            tell(str(recovered), as_json=as_json)
            facts, ready = recovered.to_dict(), recovered.ready
    if as_json:
        typer.echo(json.dumps(facts))
    raise typer.Exit(0 if ready else 1)


def restarted(where: Where, name: str, cause: str) -> str | None:
    """Have a child restarted; returns the episode of an engine's recovery.

    Raises:
        ConfigError: ``no_keeper``; ``keeper_refused``.
    """
    request, before = {"restart": name, "cause": cause}, child(where, name)
    episode: str | None
    if before["role"] != "engine" or cause not in PLANNED:
        episode = ask(where.runtime_dir, request).get("episode")
        return episode
    with _aside(where, name) as moved:
        episode = ask(where.runtime_dir, request).get("episode")
        while moved and before["pid"] is not None and child(where, name)["pid"] == before["pid"]:
            time.sleep(_LOOK_S)  # the old one would be asked again
    return episode


@contextlib.contextmanager
def _aside(where: Where, slot: str) -> Iterator[bool]:
    """Send a slot's requests elsewhere for the block, and let those under way end; whether another slot takes them."""
    path, by = f"/api/slots/{slot}/drain", {"user": user()}
    try:
        facts: dict[str, Any] | None = order(where.runtime_dir, "POST", path, {**by, "force": False})
    except ConfigError as error:
        if error.reason == "gate_refused" or not (where.runtime_dir / SOCKET).exists():
            yield False  # no other slot is ready, or there is no gate: then requests wait, or are told to
            return
        facts = None  # it was killed just now, perhaps with the order in its journal
    try:
        deadline = time.monotonic() + DRAIN_LIMIT_S
        while facts is not None and facts["in_flight"] and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
            slots = order(where.runtime_dir, "GET", "/api/status", patience_s=GATE_LIMIT_S)["slots"]
            facts = next(it for it in slots if it["slot"] == slot)
        yield facts is not None
    finally:
        try:
            order(where.runtime_dir, "DELETE", path, by, patience_s=GATE_LIMIT_S)
        except ConfigError as error:
            if facts is not None and error.reason != "gate_refused":  # it is not drained, by somebody else's order
                raise


def reexec(where: Where, config: Path | None) -> str:
    """Have the keeper go on as this release, by the configuration as it is now, if there is one; returns what it says.

    Raises:
        ConfigError: ``no_keeper``; ``keeper_refused``, with why the old one goes on; the configuration cannot be used.
    """
    keeper = ask(where.runtime_dir, {"status": True})
    if "release" not in keeper:
        raise ConfigError(
            "keeper_refused",
            f"the keeper (pid {keeper['pid']}) is of a release that cannot go on as another one",
            remedy=f"kill -9 {keeper['pid']}, then readmit up: the next keeper adopts what runs",
        )
    running = {each["role"] for each in keeper["children"]}
    request = {"reexec": True, "python": sys.executable}
    with contextlib.ExitStack() as stack:
        configured = config is not None or DEFAULT_FILE.exists()
        if configured and not KeeperSpec.load(spec_path(where.runtime_dir)).foreground:  # one of readmit run has none
            stack.enter_context(spec_in_place(renewed_spec(load(config or DEFAULT_FILE), running)))
        answer = ask(where.runtime_dir, request, timeout_s=TRIAL_LIMIT_S + REST_LIMIT_S + ANSWER_S)
    return f"the keeper (pid {answer['pid']}) goes on as release {answer['release']}, before {answer['previous']}"


def up(where: Where, before: dict[str, Any]) -> str:
    """Wait until another process of a child is up; returns what can be said of it.

    Raises:
        ConfigError: ``not_up``, when that takes longer than `LIMIT_S`.
    """
    began = time.monotonic()
    while time.monotonic() - began < LIMIT_S:
        now = child(where, before["name"])
        if now["ready"] and now["pid"] not in (None, before["pid"]):
            return f"{now['name']} is up after {time.monotonic() - began:.2f} s, pid {now['pid']}"
        time.sleep(_LOOK_S)
    raise ConfigError(
        "not_up",
        f"{before['name']} is not up within {LIMIT_S:g} s",
        remedy="readmit logs and readmit status show why",
    )


def child(where: Where, name: str, role: str | None = None) -> dict[str, Any]:
    """What the keeper says of one child, of a role if one is given.

    Raises:
        ConfigError: ``no_keeper``; ``no_such_child``.
    """
    there = {
        it["name"]: it for it in ask(where.runtime_dir, {"status": True})["children"] if role in (None, it["role"])
    }
    if name not in there:
        raise ConfigError(
            "no_such_child",
            f"there is no {name!r} here",
            expected=", ".join(there) or "none",
            found=name,
            remedy="readmit status shows what runs here",
        )
    found: dict[str, Any] = there[name]
    return found
