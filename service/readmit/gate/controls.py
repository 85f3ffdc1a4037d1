"""What operators may order by the API: overrides, and draining a slot. `readmit.gate.operator` is the other end."""

from typing import Annotated, TypeVar

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from readmit.gate.access import Access
from readmit.gate.gate import Gate
from readmit.gate.health import answer
from readmit.gate.override import LIMIT_S
from readmit.gate.problem import Problem

T = TypeVar("T")
_Words = Annotated[str, msgspec.Meta(min_length=1, max_length=500)]


class OverrideOrder(msgspec.Struct, forbid_unknown_fields=True):
    """Let engines in whatever they answer, for ``ttl_s`` seconds."""

    reason: _Words
    user: _Words
    ttl_s: Annotated[float, msgspec.Meta(gt=0, le=LIMIT_S)]


class LiftOrder(msgspec.Struct, forbid_unknown_fields=True):
    """End the override."""

    user: _Words


class DrainOrder(msgspec.Struct, forbid_unknown_fields=True):
    """Send requests to other slots; with ``force`` also when there is none."""

    user: _Words
    force: bool = False


def routes(gate: Gate, access: Access) -> APIRouter:
    """The orders of one gate. Each is in the journal before it is answered, for the next gate goes by it."""
    router = APIRouter(prefix="/api")

    @router.post("/override")
    async def begin_override(request: Request) -> Response:
        order = await _order(request, gate, access, OverrideOrder)
        if isinstance(order, Problem):
            return answer(order, request)
        override = gate.begin_override(order.reason, order.user, order.ttl_s)
        await gate.chronicle.flushed()
        return JSONResponse({**override.facts(), "ends_s": override.ends_s})

    @router.delete("/override")
    async def end_override(request: Request) -> Response:
        order = await _order(request, gate, access, LiftOrder)
        if isinstance(order, Problem):
            return answer(order, request)
        if gate.overrides.current is None:
            return answer(Problem(409, "no-override", "No override is in force."), request)
        gate.end_override("lifted", order.user)
        await gate.chronicle.flushed()
        return JSONResponse({"lifted": True})

    @router.post("/slots/{name}/drain")
    async def drain(request: Request, name: str) -> Response:
        order = await _order(request, gate, access, DrainOrder)
        if isinstance(order, Problem):
            return answer(order, request)
        if (problem := gate.withdraw(name, order.user, force=order.force)) is not None:
            return answer(problem, request)
        await gate.chronicle.flushed()
        return JSONResponse(gate.outlook(gate.slot(name)).to_dict())

    @router.delete("/slots/{name}/drain")
    async def undrain(request: Request, name: str) -> Response:
        order = await _order(request, gate, access, DrainOrder)
        if isinstance(order, Problem):
            return answer(order, request)
        if (problem := gate.readmit(name, order.user)) is not None:
            return answer(problem, request)
        await gate.chronicle.flushed()
        return JSONResponse(gate.outlook(gate.slot(name)).to_dict())

    return router


async def _order(request: Request, gate: Gate, access: Access, kind: type[T]) -> T | Problem:
    """What is ordered, or why this is no order."""
    if not access.may_order(request.scope):
        detail = "Orders come from the gate's own machine (readmit gate override, readmit drain), or with its token."
        return Problem(403, "operators-only", detail)
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        # A page of another site can make a browser post forms and text with its user's password, but not JSON.
        return Problem(415, "not-json", "An order is sent as application/json.")
    if not gate.remembers:
        return Problem(503, "starting", "This gate has only just been started, and reads what was ordered before.", 1)
    try:
        return msgspec.json.decode(await request.body(), type=kind)
    except msgspec.MsgspecError as error:
        return Problem(422, "bad-order", f"This is no order: {error}.")
