"""The gate's ASGI application."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from prometheus_client import CollectorRegistry, disable_created_metrics
from prometheus_client.exposition import choose_encoder
from starlette.responses import HTMLResponse, JSONResponse, Response

from readmit.gate import health, page, status
from readmit.gate.gate import Gate
from readmit.gate.proxy import Proxy
from readmit.gate.settings import GateSettings


def create_app(settings: GateSettings, registry: CollectorRegistry | None = None) -> FastAPI:
    """An application with a gate of its own, which is ``app.state.gate``; several live in one process.

    Args:
        settings: what the operator chose.
        registry: for its metrics; a new one if None.
    """
    disable_created_metrics()  # type: ignore[no-untyped-call] # they would be a series of their own beside each counter
    gate = Gate(settings, registry or CollectorRegistry())
    proxy = Proxy(gate)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        gate.start()  # in the background: the server binds its port only when this has returned
        yield
        await gate.stop()
        await proxy.close()

    app = FastAPI(
        title="readmit gate", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )
    app.state.gate = gate
    app.include_router(health.routes(gate))
    app.mount("/v1", proxy)

    @app.get("/metrics")
    @app.get("/metrics/")
    async def metrics(request: Request) -> Response:
        gate.metrics.fleet(gate.slots, admitting=not gate.draining, probe_set_suspect=gate.probe_set_suspect)
        encoder, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encoder(gate.metrics.registry), headers={"Content-Type": content_type})

    @app.get("/api/status")
    async def api_status() -> Response:
        return JSONResponse(status.report(gate), headers={"Cache-Control": "no-store"})

    @app.api_route("/", methods=["GET", "HEAD"])
    async def console() -> Response:
        return HTMLResponse(page.render(status.report(gate)), headers=page.HEADERS)

    return app
