"""The FastAPI application: routes, access middleware, and the life of a request from its body to its answer."""

import asyncio
import hmac
import logging
import re
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from itertools import chain
from typing import Any

import numpy as np
from fastapi import FastAPI, Request, Security
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic_core import to_json
from starlette.requests import ClientDisconnect

from rfdlc import __version__
from rfdlc.decide.uncertainty import mutual_information
from rfdlc.errors import InputError
from rfdlc.integrations.server.backend import Answer, Backend
from rfdlc.integrations.server.batching import Batcher
from rfdlc.integrations.server.limits import Limits, Refused
from rfdlc.integrations.server.metrics import Metrics
from rfdlc.integrations.server.requests import IMAGE_TYPES, DecideResponse, Question, Reader, Refusal

LOGGER, REQUESTS = logging.getLogger("rfdlc.serve"), logging.getLogger("rfdlc.serve.requests")
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

OPEN = ("/health", "/ready")  # without a token
PATHS = (*OPEN, "/decide", "/metrics", "/docs", "/openapi.json")
PORT, LOCAL_HOSTS = re.compile(rb":\d+$"), (b"localhost", b"127.0.0.1", b"[::1]")
PARSED_INLINE = 32_768  # bytes of JSON that are parsed on the event loop; larger bodies are parsed in a thread
DRAINED = 3  # times the largest body: an upload up to this size is read and dropped, so that the client sees the 413
DECODERS = 2  # threads that decode images and parse large bodies
FULL = {b"": False, b"full=false": False, b"full=true": True}
CLOSE, LATER = {"connection": "close"}, {"retry-after": "1"}  # after CLOSE the rest of the body is not read
HEADERS = {401: {"www-authenticate": "Bearer"}, 408: CLOSE, 411: CLOSE, 429: LATER, 503: LATER}  # of refusals
STATUSES = (400, 401, 408, 411, 413, 415, 422, 429, 503)  # of refusals


class Service:
    """One model, its queue and its metrics."""

    def __init__(self, backend: Backend, limits: Limits) -> None:
        self.backend, self.limits = backend, limits
        self.metrics, self.reader = Metrics(backend.decider), Reader(backend, limits)
        self.readers = {b"application/json": self.reader.read_json}
        self.readers |= {kind.encode(): self.reader.read_image for kind in IMAGE_TYPES}
        self.held = 0  # bytes of bodies in memory
        self.batcher: Batcher | None = None
        self._decoders = ThreadPoolExecutor(DECODERS, "decode")

    @asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        """Started with the server; at its end all accepted requests are computed first."""
        decider, compute = self.backend.decider, self.backend.compute
        self.batcher = batcher = Batcher(lambda samples: Answer.of(decider, *compute(samples)), self.limits.batch)
        _log(LOGGER, "ready", model=self.backend.name, classes=len(self.metrics.classes))
        try:
            yield
        finally:
            self.batcher = None
            await batcher.close()
            self._decoders.shutdown()
            _log(LOGGER, "stopped", accepted=self.metrics.accepted, answered=self.metrics.answered)
            for handler in LOGGER.handlers:
                handler.flush()

    async def respond(self, scope: Message, receive: Receive) -> bytes:
        """Admit a request, read its body and answer it as JSON, each within its limits."""
        headers, metrics, limits, loop = dict(scope["headers"]), self.metrics, self.limits, asyncio.get_running_loop()
        full, length = FULL.get(scope["query_string"]), _content_length(headers)
        if full is None:
            raise Refused(422, "query: expected nothing, full=true or full=false")
        read = self.readers.get(headers.get(b"content-type", b"").partition(b";")[0].strip().lower())
        if read is None:
            raise Refused(415, f"expected content type application/json or one of {', '.join(IMAGE_TYPES)}")
        if length > limits.body:
            raise Refused(413, f"the body is too large: expected at most {limits.body:,} bytes")
        if metrics.waiting >= limits.requests or self.held + length > limits.held:
            raise Refused(429, "too many requests are waiting: try again in a moment")
        metrics.accepted += 1
        self.held += length
        late = Refused(408, f"the body was not complete within {limits.seconds:g} s")
        reading: Future[Question] | None = None
        try:
            async with asyncio.timeout(limits.seconds) as timeout:
                body = await Request(scope, receive).body()
                timeout.reschedule(loop.time() + limits.seconds)
                late = Refused(503, f"no answer within {limits.seconds:g} s: try again later")
                if length <= PARSED_INLINE and read == self.reader.read_json and b'"images"' not in body:
                    question = read(body, 0.0)
                else:
                    reading = self._decoders.submit(read, body, time.monotonic() + limits.seconds)
                    question = await asyncio.wrap_future(reading)
                answer = await self._answer(question)
        except ClientDisconnect:
            raise Refused(400, "the connection was closed before the body was complete") from None
        except TimeoutError:
            raise late from None
        finally:
            metrics.answered += 1
            if reading is None:
                self._release(length)
            else:  # a request that is given up counts as held until the thread drops its body
                reading.add_done_callback(lambda _: loop.call_soon_threadsafe(self._release, length))
        metrics.count_decisions(answer)
        return to_json(answer.to_dict(full))

    async def _answer(self, question: Question) -> Answer:
        utility, decider = question.pop("utility", None), self.backend.decider
        ((kind, values),) = question.items()
        try:
            if kind == "probabilities":
                answer = Answer.of(decider, np.asarray(decider.probabilities(values)), mutual_information(values))
            else:
                assert self.batcher is not None
                answer = await self.batcher.submit(values)
        except InputError:  # types and shapes were checked: what remains is overflow
            message = "the samples hold numbers too large to compute with: expected numbers like the training data's"
            raise Refused(422, message) from None
        if utility is None:
            return answer
        return Answer.of(decider.replace(utility=utility), answer.probabilities, answer.disagreement)

    def _release(self, length: int) -> None:
        self.held -= length


class AccessMiddleware:
    """Token, Host and header checks; metrics and one log line per request; a response whatever happens."""

    def __init__(self, app: Any, service: Service, token: str | None) -> None:
        self.app, self.service = app, service
        self._expected = None if token is None else b"Bearer " + token.encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.perf_counter(), 0
        connection, headers = scope.get("state", {}).get("connection"), dict(scope["headers"])

        async def send_and_note(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        if connection is not None:
            connection.begin_request(min(_content_length(headers), DRAINED * self.service.limits.body))
        try:
            self._check(scope, headers)
            app = self.app
            if scope["path"] == "/decide" and scope["method"] == "POST":  # past the router, whose layers cost a third
                app = Response(await self.service.respond(scope, receive), media_type="application/json")
            await app(scope, receive, send_and_note)
        except Exception as error:
            if not isinstance(error, Refused):  # the message is left out: it may quote what was sent
                frames = traceback.extract_tb(error.__traceback__)[-6:]
                where = [f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}" for frame in frames]
                _log(LOGGER, "failure", logging.ERROR, error=type(error).__name__, where=where)
            if not status:
                await _refusal(error)(scope, receive, send_and_note)
        finally:
            if connection is not None:
                connection.end_request()
        path, seconds = scope["path"] if scope["path"] in PATHS else "other", time.perf_counter() - began
        self.service.metrics.count_request(path, status, seconds)
        fields = {"method": scope["method"][:8], "path": path, "status": status, "ms": round(1000 * seconds, 2)}
        _log(REQUESTS, "request", logging.INFO if status < 500 else logging.ERROR, **fields)

    def _check(self, scope: Message, headers: dict[bytes, bytes]) -> None:
        limits, path, host = self.service.limits, scope["path"], headers.get(b"host", b"")
        if sum(map(len, chain.from_iterable(scope["headers"]))) > limits.headers:
            raise Refused(431, f"expected at most {limits.headers:,} bytes of headers")
        if self._expected is None:
            if PORT.sub(b"", host).lower() not in LOCAL_HOSTS:  # a web page whose name was pointed at this machine
                raise Refused(400, "expected the Host localhost, 127.0.0.1 or [::1]; other names need a token")
        elif path not in OPEN and not hmac.compare_digest(headers.get(b"authorization", b""), self._expected):
            raise Refused(401, "expected the header Authorization: Bearer TOKEN, with the server's token")
        if b"transfer-encoding" in headers:  # a chunked body has no announced size, and trailers without a bound
            raise Refused(411, "expected a Content-Length, not a chunked body")
        if _content_length(headers) and path in PATHS and path != "/decide":
            raise Refused(413, "expected no body: only POST /decide accepts one")


def create_app(backend: Backend, limits: Limits | None = None, token: str | None = None) -> FastAPI:
    """The application, ready for any ASGI server."""
    service = Service(backend, limits or Limits())
    app = FastAPI(
        title="rfdlc",
        version=__version__,
        lifespan=service.lifespan,
        redoc_url=None,
        dependencies=[Security(HTTPBearer(auto_error=False))] if token else [],  # checked by the middleware
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.add_middleware(AccessMiddleware, service=service, token=token)
    content = {"application/json": {"schema": service.reader.model.model_json_schema()}}
    if backend.files:
        content |= {kind: {"schema": {"type": "string", "format": "binary"}} for kind in IMAGE_TYPES}

    @app.post(
        "/decide",
        response_model=DecideResponse,
        responses={status: {"model": Refusal} for status in STATUSES},
        openapi_extra={"requestBody": {"required": True, "content": content}},
    )
    async def decide(request: Request, full: bool = False) -> Response:
        """Decide images, arrays, rows of a table, or probabilities of any model."""
        return Response(await service.respond(request.scope, request.receive), media_type="application/json")

    @app.get("/health")
    async def health() -> dict[str, str]:
        """The process answers."""
        return {"status": "ok"}

    @app.get("/ready", responses={503: {"description": "not ready"}})
    async def ready() -> JSONResponse:
        """The model is loaded and accepts requests."""
        running = service.batcher is not None
        return JSONResponse({"ready": running}, 200 if running else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Metrics in Prometheus' text format."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return app


def _refusal(error: Exception) -> JSONResponse:
    refused = error if isinstance(error, Refused) else Refused(500, "the server failed; the failure was logged")
    return JSONResponse({"detail": refused.message}, refused.status, HEADERS.get(refused.status))


def _content_length(headers: dict[bytes, bytes]) -> int:
    text = headers.get(b"content-length", b"")
    return int(text) if text.isdigit() and len(text) < 20 else 0


def _log(logger: logging.Logger, event: str, level: int = logging.INFO, **fields: Any) -> None:
    logger.log(level, event, extra={"fields": fields})
