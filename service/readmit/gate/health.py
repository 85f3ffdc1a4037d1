"""``/livez``, ``/readyz`` and ``/startupz``, as the Kubernetes API server answers them.

Machines read the status code. ``?verbose`` explains it in lines, ``?exclude=CHECK`` leaves a check out. Nothing here
asks the engine: the verdict is there, and given at once.
"""

from collections.abc import Collection

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from readmit.gate.access import Access
from readmit.gate.gate import Gate
from readmit.gate.problem import Problem

_NO_STORE = {"Cache-Control": "no-store"}
_PROOF = {None: "", True: " (verified)", False: " (unverified: its answers are not known to be right)"}


def routes(gate: Gate, access: Access) -> APIRouter:
    """The three routes of one gate. Strangers are not told what golden questions found."""
    router = APIRouter()

    @router.api_route("/livez", methods=["GET", "HEAD"])
    async def livez() -> Response:
        # It depends on nothing: a slow recovery must not be ended by whoever asks whether the gate lives.
        return PlainTextResponse("ok\n", headers=_NO_STORE)

    @router.api_route("/readyz", methods=["GET", "HEAD"])
    async def readyz(request: Request, exclude: list[str] = Query([])) -> Response:  # noqa: B008 - FastAPI's form
        checks = {"drain": not gate.draining, "slots": any(slot.ready for slot in gate.slots)}
        failed = [name for name, passed in checks.items() if not passed and name not in exclude]
        if "verbose" in request.query_params:
            unknown = [name for name in exclude if name not in checks]
            told = access.may_look(request.scope)
            text = (
                _explained(gate, checks, exclude, unknown, told) + f"readyz check {'failed' if failed else 'passed'}\n"
            )
            return PlainTextResponse(text, 503 if failed else 200, headers=_NO_STORE)
        if not failed:
            # For people: an override lets in what has not been proved right.
            text = "ok (override)\n" if gate.overrides.active else "ok\n"
            return PlainTextResponse(text, headers=_NO_STORE)
        return answer(_draining() if "drain" in failed else gate.not_ready(), request)

    @router.api_route("/startupz", methods=["GET", "HEAD"])
    async def startupz(request: Request) -> Response:
        if gate.was_ready:
            return PlainTextResponse("ok\n", headers=_NO_STORE)
        return answer(gate.not_ready(), request)

    return router


def answer(problem: Problem, request: Request) -> Response:
    """A problem as a response."""
    headers = problem.headers()
    return Response(problem.body(request.url.path), problem.status, headers, headers.pop("Content-Type"))


def _draining() -> Problem:
    return Problem(503, "draining", "This gate is shutting down.", 1)


def _explained(
    gate: Gate, checks: dict[str, bool], exclude: Collection[str], unknown: Collection[str], told: bool
) -> str:
    lines = []
    for name, passed in checks.items():
        mark, verdict = ("+", "excluded: ok") if name in exclude else ("+", "ok") if passed else ("-", "failed")
        lines.append(f"[{mark}]{name} {verdict}")
    for slot in gate.slots:
        outlook = gate.outlook(slot)
        proof = _PROOF[outlook.verified]
        age = "" if outlook.last_correct_s is None else f", last correct answer {outlook.last_correct_s:.1f} s ago"
        why = f": {outlook.message}" if outlook.message and told else ""
        lines.append(f"  slot {slot.name} {slot.state}, {outlook.reason}, for {outlook.since_s:.1f} s{proof}{age}{why}")
    if gate.overrides.active:
        lines.append(f"  warning: {gate.overrides.current if told else 'an override is in force'}")
    if gate.probe_set_suspect:
        lines.append("  warning: several ready slots answer wrongly; the golden answers are doubted, not the engines")
    for slot in gate.slots:
        if slot.doubted:
            lines.append(
                f"  warning: slot {slot.name} answers wrongly among requests; it gets no more until it is asked alone"
            )
        if count := gate.neglect.requests(slot.name):
            lines.append(f"  warning: slot {slot.name} gave {count} different requests in a row no first byte")
    if gate.neglect.suspect:
        lines.append("  warning: no slot gives any request a first byte; the requests are doubted, not the engines")
    if told and (trouble := gate.probes_trouble) is not None:
        lines.append(f"  warning: {trouble}")
    if gate.chronicle.failure is not None and told:
        lines.append(f"  warning: the journal cannot be read: {gate.chronicle.failure}")
    if unknown:
        lines.append(f"  warning: no such checks to exclude: {', '.join(unknown)}")
    return "".join(f"{line}\n" for line in lines)
