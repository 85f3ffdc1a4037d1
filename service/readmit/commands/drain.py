"""``readmit drain``: send a slot's requests elsewhere, and take it back."""

import json
import time
from typing import Annotated, Any, Final

import typer

from readmit.commands import Json, application, user
from readmit.gate.operator import order
from readmit.where import ConfigOption, Where

app = application()

_LOOK_S: Final = 0.2


@app.command("drain")
def command(
    slot: Annotated[str, typer.Argument(help="The slot.")],
    undo: Annotated[bool, typer.Option("--undo", help="Take it back, once it answers correctly.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also when no other slot is ready.")] = False,
    limit: Annotated[float, typer.Option(min=0, help="Seconds to wait for the requests under way.")] = 60.0,
    config: ConfigOption = None,
    as_json: Json = False,
) -> None:
    """Give a slot no more requests, let those under way finish, and keep it so until --undo. Its engine goes on.

    Refuses where no other slot is ready. Exits 1 when requests are still under way at the end of the limit.
    """
    where, by = Where.find(config), {"user": user()}
    path = f"/api/slots/{slot}/drain"
    if undo:
        facts = order(where.runtime_dir, "DELETE", path, by)
        told = f"{slot} is asked again, and takes requests once it answers correctly"
    else:
        facts = _drained(where, slot, order(where.runtime_dir, "POST", path, {**by, "force": force}), limit)
        left = facts["in_flight"]
        told = f"{slot} is drained" if not left else f"{slot} takes no more requests, but {left} are still under way"
    typer.echo(json.dumps(facts) if as_json else told)
    raise typer.Exit(1 if facts["in_flight"] and not undo else 0)


def _drained(where: Where, slot: str, facts: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """What the gate says of the slot once nothing is under way there, or at the end of the limit."""
    deadline = time.monotonic() + limit_s
    while facts["in_flight"] and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        slots = order(where.runtime_dir, "GET", "/api/status")["slots"]
        facts = next(it for it in slots if it["slot"] == slot)
    return facts
