"""``readmit preempt``: have an engine yield its place, and come back."""

import json
import time
from typing import Annotated, Any, Final

import typer

from readmit.commands import Json, application, tell
from readmit.commands.restart import child
from readmit.recovered import Recovered, check_asked, wait
from readmit.where import ConfigOption, Where
from weightcache.errors import ConfigError
from weightcache.keeper.control import ask

app = application()

_LOOK_S: Final = 0.05


@app.command("preempt")
def command(
    slot: Annotated[str, typer.Argument(help="The slot whose engine yields.")],
    pause: Annotated[
        float | None, typer.Option("--for", min=0, help="Seconds until it comes back; without, not by itself.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Bring back one that has yielded.")] = False,
    config: ConfigOption = None,
    as_json: Json = False,
) -> None:
    """End a slot's engine by SIGTERM, then SIGKILL, and keep its place; its weights stay resident.

    Requests it was answering are cut off; new ones go to other slots. Its return is an episode of cause preempted,
    measured from the order to the first correct answer. Exits 1 when that does not come.
    """
    where = Where.find(config)
    facts: dict[str, Any] = {"slot": slot}
    if not resume:
        try:
            facts["yielded_s"] = round(_yield(where, slot), 3)
            tell(f"{slot} has yielded after {facts['yielded_s']:.2f} s", as_json=as_json)
            time.sleep(pause or 0)
        except KeyboardInterrupt:
            typer.echo(f"{slot} stays away until readmit preempt {slot} --resume", err=True)
            raise
    if resume or pause is not None:
        recovered = _resume(where, slot)
        facts |= recovered.to_dict()
        tell(str(recovered), as_json=as_json)
    if as_json:
        typer.echo(json.dumps(facts))
    raise typer.Exit(0 if facts.get("outcome", "ready") == "ready" else 1)


def _yield(where: Where, slot: str) -> float:
    """Stop the engine and wait until all of it has gone; returns the seconds that took."""
    if child(where, slot, "engine")["state"] == "stopped":
        raise _refused(slot, "it has yielded already", "readmit preempt --resume brings it back")
    began = time.monotonic()
    ask(where.runtime_dir, {"stop": slot})
    while child(where, slot, "engine")["state"] != "stopped":
        time.sleep(_LOOK_S)
    return time.monotonic() - began


def _resume(where: Where, slot: str) -> Recovered:
    """Start the engine again and wait for the end of that recovery."""
    if child(where, slot, "engine")["state"] != "stopped":
        raise _refused(slot, "it has not yielded", "readmit restart restarts an engine that runs")
    check_asked(where, slot)
    return wait(where, ask(where.runtime_dir, {"restart": slot, "cause": "preempted"})["episode"])


def _refused(slot: str, problem: str, remedy: str) -> ConfigError:
    return ConfigError("preempt", f"slot {slot} is left as it is: {problem}", remedy=remedy)
