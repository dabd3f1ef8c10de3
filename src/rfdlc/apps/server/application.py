"""The application: what each path answers. Its door (`door.py`) stands before it."""

import asyncio
import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from rfdlc import __version__
from rfdlc.apps.server.backends import Backend
from rfdlc.apps.server.batching import Batcher
from rfdlc.apps.server.deciding import Answer, decide_samples, decide_scores
from rfdlc.apps.server.door import Door, Message, Receive, Send
from rfdlc.apps.server.figures import Figures
from rfdlc.apps.server.limits import Limits, Refused
from rfdlc.apps.server.logs import log
from rfdlc.apps.server.reading import FORMATS, Question, read_image_body, read_json_body
from rfdlc.apps.server.schema import described

AT_ONCE = 32_768  # bytes of JSON that are parsed on the event loop; more go to a thread
HEARD_OUT = 3  # times the largest body: a client that sends more is cut off before it can read why
DECODERS = 2  # threads that decode images and parse large bodies
IMAGE_TYPES = tuple(f"image/{name.lower()}" for name in FORMATS)


class Service:
    """One model, its queue and its figures."""

    def __init__(self, backend: Backend, limits: Limits) -> None:
        self.backend, self.limits = backend, limits
        self.figures = Figures(backend.decider)
        self.held = 0  # bytes of requests that are not answered yet
        self.ready = False
        self.batcher: Batcher | None = None
        self._decoders = ThreadPoolExecutor(DECODERS, "decode")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Started with the server; at its end what was accepted is computed first."""
        self.batcher = Batcher(partial(decide_samples, self.backend), self.limits.batch)
        self.batcher.start()
        self.ready = True
        log("ready", model=self.backend.name, classes=len(self.figures.classes))
        try:
            yield
        finally:
            self.ready = False
            await self.batcher.close()
            self._decoders.shutdown()
            log("stopped", accepted=self.figures.accepted, answered=self.figures.answered)

    async def respond(self, request: Request) -> Response:
        """The reply to POST /decide."""
        answer = await self.decide(request)
        return Response(json.dumps(answer, ensure_ascii=False).encode(), media_type="application/json")

    async def decide(self, request: Request) -> dict[str, Any]:
        """Accept or refuse, read, compute, answer."""
        full = _flag(request.query_params.get("full"))
        reader = _reader(request.headers.get("content-type", ""))
        waiting = self.figures.accepted - self.figures.answered
        if waiting >= self.limits.requests:
            raise Refused(429, "too many requests are waiting: try again in a moment", retry_after=1)
        self.figures.accepted += 1
        try:
            body = await self._body(request)
            question = await self._read(reader, body)
            answer = await self._answer(question)
        finally:
            self.held -= getattr(request.state, "held", 0)
            self.figures.answered += 1
        self.figures.decided(answer)
        return answer.to_dict(full)

    async def _body(self, request: Request) -> bytes:
        """All of the body, as far as size, memory and time allow."""
        limit = self.limits.body
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > HEARD_OUT * limit:
            raise _too_large(limit)
        pieces: list[bytes] = []
        try:
            async with asyncio.timeout(self.limits.seconds):
                size = await self._collect(request, pieces)
        except TimeoutError:
            raise Refused(408, f"the body did not come within {self.limits.seconds:g} s") from None
        if size > limit:
            raise _too_large(limit)
        return b"".join(pieces)

    async def _collect(self, request: Request, pieces: list[bytes]) -> int:
        """The size of the body. One that is too large is heard out within reason, but not kept."""
        size, limit = 0, self.limits.body
        async for piece in request.stream():
            size += len(piece)
            if size > HEARD_OUT * limit:
                break
            if size > limit:
                pieces.clear()
                continue
            self.held += len(piece)
            request.state.held = size
            if self.held > self.limits.held:
                raise Refused(429, "too much is being sent at once: try again in a moment", retry_after=1)
            pieces.append(piece)
        return size

    async def _read(self, reader: Any, body: bytes) -> Question:
        if reader is read_json_body and len(body) <= AT_ONCE and b'"images"' not in body:
            return reader(body, self.backend, self.limits)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._decoders, reader, body, self.backend, self.limits)

    async def _answer(self, question: Question) -> Answer:
        """By the model's utility together with others, then by the request's own where it has one."""
        try:
            async with asyncio.timeout(self.limits.seconds):
                answer = await self._decided(question)
        except TimeoutError:
            raise Refused(503, f"no answer within {self.limits.seconds:g} s: try again later", retry_after=1) from None
        return answer if question.utility is None else answer.by(question.utility)

    async def _decided(self, question: Question) -> Answer:
        if question.samples is None:
            return decide_scores(self.backend, question)
        assert self.batcher is not None
        return await self.batcher.submit(question.samples)


def make_app(backend: Backend, limits: Limits | None = None, token: str | None = None) -> Door:
    """The whole application, ready for any ASGI server."""
    service = Service(backend, limits or Limits())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with service.running():
            yield

    app = FastAPI(title="rfdlc", version=__version__, lifespan=lifespan, redoc_url=None)

    description = described(backend, service.limits, IMAGE_TYPES, token is not None)

    @app.post("/decide", **description)
    async def decide(request: Request) -> Response:
        """Decide images, arrays, rows of a table, or probabilities of any model."""
        return await service.respond(request)

    async def decide_at_once(scope: Message, receive: Receive, send: Send) -> None:
        response = await service.respond(Request(scope, receive))
        await response(scope, receive, send)

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
        waiting = service.figures.accepted - service.figures.answered
        return PlainTextResponse(service.figures.text(waiting), media_type="text/plain; version=0.0.4")

    return Door(app, decide_at_once, service.figures, token)


def _reader(content_type: str) -> Any:
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "application/json":
        return read_json_body
    if kind in IMAGE_TYPES:
        return read_image_body
    raise Refused(415, f"expected content type application/json or one of {', '.join(IMAGE_TYPES)}")


def _too_large(limit: int) -> Refused:
    return Refused(413, f"the body is too large: at most {limit:,} bytes are allowed")


def _flag(text: str | None) -> bool:
    if text not in (None, "true", "false"):
        raise Refused(422, "full: expected true or false")
    return text == "true"
