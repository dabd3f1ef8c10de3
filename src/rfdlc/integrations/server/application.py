"""The application: what each path answers, and the OpenAPI document. Its door (`door.py`) stands before it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from rfdlc import __version__
from rfdlc.integrations.server.backends import Backend
from rfdlc.integrations.server.door import Door
from rfdlc.integrations.server.limits import Limits
from rfdlc.integrations.server.schema import described
from rfdlc.integrations.server.service import IMAGE_TYPES, Service


def make_app(backend: Backend, limits: Limits | None = None, token: str | None = None) -> Door:
    """The whole application, ready for any ASGI server."""
    service = Service(backend, limits or Limits())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with service.running():
            yield

    app = FastAPI(title="rfdlc", version=__version__, lifespan=lifespan, redoc_url=None)

    @app.post("/decide", **described(backend, service.limits, IMAGE_TYPES, token is not None))
    async def decide(request: Request) -> Response:
        """Decide images, arrays, rows of a table, or probabilities of any model."""
        return Response(await service.decide(request.scope, request.receive), media_type="application/json")

    @app.get("/health")
    async def health() -> dict[str, str]:
        """The process answers."""
        return {"status": "ok"}

    @app.get("/ready", responses={503: {"description": "not ready"}})
    async def ready() -> JSONResponse:
        """The model is loaded and takes requests."""
        return JSONResponse({"ready": service.ready, "model": backend.name}, 200 if service.ready else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> PlainTextResponse:
        """Figures in Prometheus' text format."""
        return PlainTextResponse(service.figures.text(), media_type="text/plain; version=0.0.4")

    return Door(app, service, service.figures, token)
