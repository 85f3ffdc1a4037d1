"""The gate's ASGI application."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from prometheus_client import CollectorRegistry, disable_created_metrics
from prometheus_client.exposition import choose_encoder
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from readmit.gate import controls, health, page, status
from readmit.gate.access import Access
from readmit.gate.gate import Gate
from readmit.gate.guard import Guard
from readmit.gate.proxy import Proxy
from readmit.gate.settings import GateSettings


class _Application(FastAPI):
    """FastAPI but for ``/v1``: the framework's way to a route would cost a request as much again as the proxy."""

    proxied: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # As the client wrote it, and the engine will read it.
        passed_on = scope["type"] == "http" and (scope["raw_path"].startswith(b"/v1/") or scope["raw_path"] == b"/v1")
        await (self.proxied if passed_on else super().__call__)(scope, receive, send)


def create_app(settings: GateSettings, registry: CollectorRegistry | None = None) -> FastAPI:
    """An application with a gate of its own, which is ``app.state.gate``; several live in one process.

    Args:
        settings: what the operator chose.
        registry: for its metrics; a new one if None.

    Raises:
        ConfigError: ``token``: the token file holds none.
    """
    disable_created_metrics()  # type: ignore[no-untyped-call] # they would be a series of their own beside each counter
    access = Access(settings.token_file)
    gate = Gate(settings, registry or CollectorRegistry())
    proxy = Proxy(gate)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        gate.start()  # in the background: the server binds its port only when this has returned
        yield
        await gate.stop()
        await proxy.close()

    app = _Application(
        title="readmit gate", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )
    app.state.gate = gate
    app.proxied = Guard(proxy, access, settings.max_body_bytes)
    app.add_middleware(Guard, access=access, max_body_bytes=settings.max_body_bytes)
    app.include_router(health.routes(gate, access))
    app.include_router(controls.routes(gate, access))

    @app.get("/metrics")
    @app.get("/metrics/")
    async def metrics(request: Request) -> Response:
        gate.publish()
        encoder, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encoder(gate.metrics.registry), headers={"Content-Type": content_type})

    @app.get("/api/status")
    async def api_status() -> Response:
        return JSONResponse(status.report(gate), headers={"Cache-Control": "no-store"})

    @app.api_route("/", methods=["GET", "HEAD"])
    async def console() -> Response:
        return HTMLResponse(page.render(status.report(gate)), headers=page.HEADERS)

    return app
