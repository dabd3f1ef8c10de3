"""The FastAPI application: routes, access middleware, and the life of a request from its body to its answer."""

import asyncio
import gc
import hmac
import logging
import re
import time
import traceback
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from itertools import chain
from typing import Any

import numpy as np
from fastapi import FastAPI, HTTPException, Request, Security
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic_core import to_json
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rfdlc import __version__
from rfdlc.decide.uncertainty import mutual_information
from rfdlc.errors import InputError
from rfdlc.integrations.server.backend import Answer, Backend, Batcher, Limits
from rfdlc.integrations.server.metrics import Metrics
from rfdlc.integrations.server.requests import IMAGE_TYPES, DecideResponse, Reader, Refusal, require

LOGGER, REQUESTS = logging.getLogger("rfdlc.serve"), logging.getLogger("rfdlc.serve.requests")
OPEN = ("/health", "/ready")  # without a token
PATHS = (*OPEN, "/decide", "/metrics", "/docs", "/openapi.json")
PORT, LOCAL_HOSTS = re.compile(rb":\d+$"), (b"localhost", b"127.0.0.1", b"[::1]")
PARSED_INLINE = 32_768  # bytes of JSON that are parsed on the event loop; larger bodies are parsed in a thread
DRAINED = 3  # times the largest body: an upload up to this size is read and dropped, so that the client sees the 413
DECODERS = 2  # threads that decode images and parse large bodies
FULL = {b"": False, b"full=false": False, b"full=true": True}
STATUSES = (400, 401, 408, 411, 413, 415, 422, 429, 503)  # of refusals
TOO_LARGE = "the samples hold numbers too large to compute with: expected numbers like the training data's"
NOTHING_LEFT = ", and samples that have some probability for a class whose target prior is not 0"
TYPES = f"expected content type application/json or one of {', '.join(IMAGE_TYPES)}"


class Service:
    """One model, its queue and its metrics."""

    def __init__(self, backend: Backend, limits: Limits) -> None:
        self.backend, self.limits = backend, limits
        self.metrics, self.reader = Metrics(backend.decider), Reader(backend, limits)
        self.held = 0  # bytes of bodies in memory
        self.batcher: Batcher | None = None
        self._decoders = ThreadPoolExecutor(DECODERS, "decode")

    @asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        """Started with the server; at its end all accepted requests are computed first."""
        self.batcher = batcher = Batcher(self.backend, self.limits.batch)
        gc.freeze()  # what is loaded stays: a full collection of it would hold all requests for a tenth of a second
        _log(LOGGER, "ready", model=self.backend.name, classes=len(self.metrics.classes))
        try:
            yield
        finally:
            self.batcher = None
            gc.unfreeze()
            await batcher.close()
            self._decoders.shutdown()
            _log(LOGGER, "stopped", accepted=self.metrics.accepted, answered=self.metrics.answered)
            for handler in LOGGER.handlers:
                handler.flush()

    async def respond(self, scope: Scope, receive: Receive) -> Response:
        """Admit a request, read its body and answer it, each within its limits."""
        headers, metrics, limits, loop = dict(scope["headers"]), self.metrics, self.limits, asyncio.get_running_loop()
        query, length = scope["query_string"], _content_length(headers)
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        require(query in FULL, "query: expected nothing, full=true or full=false")
        require(kind in self.reader.by_type, TYPES, 415)
        require(length <= limits.body, f"the body is too large: expected at most {limits.body:,} bytes", 413)
        free = metrics.waiting < limits.requests and self.held + length <= limits.held
        require(free, "too many requests are waiting: try again in a moment", 429)
        metrics.accepted += 1
        self.held += length
        late, read, reading = (408, "the body was not complete"), self.reader.by_type[kind], None
        try:
            async with asyncio.timeout(limits.seconds) as timeout:
                body = await Request(scope, receive).body()
                timeout.reschedule(loop.time() + limits.seconds)
                late = 503, "no answer"
                if length <= PARSED_INLINE and kind == b"application/json" and b'"images"' not in body:
                    question = read(body, 0.0)
                else:
                    reading = self._decoders.submit(read, body, time.monotonic() + limits.seconds)
                    question = await asyncio.wrap_future(reading)
                answer = await self._answer(question)
        except ClientDisconnect:
            raise HTTPException(400, "the connection was closed before the body was complete") from None
        except TimeoutError:
            require(False, f"{late[1]} within {limits.seconds:g} s: try again later", late[0])
        except InputError:  # types and shapes were checked: what remains is overflow, or nothing left to decide from
            prior = self.backend.decider.target_prior
            absent = "" if prior is None or prior.all() else NOTHING_LEFT
            raise HTTPException(422, TOO_LARGE + absent) from None
        finally:
            metrics.answered += 1
            if reading is None:
                self._release(length)
            else:  # a request that is given up counts as held until the thread drops its body
                reading.add_done_callback(lambda _: loop.call_soon_threadsafe(self._release, length))
        metrics.count_decisions(answer)
        return Response(to_json(answer.to_dict(FULL[query])), media_type="application/json")

    async def _answer(self, question: dict[str, Any]) -> Answer:
        utility, decider = question.pop("utility", None), self.backend.decider
        ((kind, values),) = question.items()
        if kind == "probabilities":
            answer = Answer.of(decider, np.asarray(decider.probabilities(values)), mutual_information(values))
        else:
            assert self.batcher is not None
            answer = await self.batcher.submit(values)
        if utility is None:
            return answer
        other = decider.replace(utility=utility, budget=None)  # a budget is for the utility that it was fitted with
        return Answer.of(other, answer.probabilities, answer.disagreement, answer.unfamiliar)

    def _release(self, length: int) -> None:
        self.held -= length


class AccessMiddleware:
    """Token, Host and header checks; metrics and one log line per request; a response whatever happens."""

    def __init__(self, app: ASGIApp, service: Service, token: str | None) -> None:
        self.app, self.service = app, service
        self._expected = None if token is None else b"Bearer " + token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status, app, path = time.perf_counter(), 0, self.app, scope["path"]
        connection, headers = scope.get("state", {}).get("connection"), dict(scope["headers"])

        async def send_and_note(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        if connection is not None:
            connection.begin_request(min(_content_length(headers), DRAINED * self.service.limits.body))
        try:
            self._check(path, headers, sum(map(len, chain.from_iterable(scope["headers"]))))
            if path == "/decide" and scope["method"] == "POST":  # past the router, whose layers cost a third
                app = await self.service.respond(scope, receive)
            await app(scope, receive, send_and_note)
        except Exception as error:
            if not isinstance(error, HTTPException):  # the message is left out: it may quote what was sent
                frames = traceback.extract_tb(error.__traceback__)[-6:]
                where = [f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}" for frame in frames]
                _log(LOGGER, "failure", logging.ERROR, error=type(error).__name__, where=where)
                error = HTTPException(500, "the server failed; the failure was logged")
            if not status:
                refusal = JSONResponse({"detail": error.detail}, error.status_code, error.headers)
                await refusal(scope, receive, send_and_note)
        finally:
            if connection is not None:
                connection.end_request()
        place, seconds = path if path in PATHS else "other", time.perf_counter() - began
        self.service.metrics.count_request(place, status, seconds)
        fields = {"method": scope["method"][:8], "path": place, "status": status, "ms": round(1000 * seconds, 2)}
        _log(REQUESTS, "request", logging.INFO if status < 500 else logging.ERROR, **fields)

    def _check(self, path: str, headers: dict[bytes, bytes], size: int) -> None:
        most = self.service.limits.headers
        require(size <= most, f"expected at most {most:,} bytes of headers", 431)
        if self._expected is None:  # or a web page could point its own name at this machine
            local = PORT.sub(b"", headers.get(b"host", b"")).lower() in LOCAL_HOSTS
            require(local, "expected the Host localhost, 127.0.0.1 or [::1]; other names need a token", 400)
        elif path not in OPEN:
            known = hmac.compare_digest(headers.get(b"authorization", b""), self._expected)
            require(known, "expected the header Authorization: Bearer TOKEN, with the server's token", 401)
        # A chunked body has no announced size, and trailers without a bound.
        require(b"transfer-encoding" not in headers, "expected a Content-Length, not a chunked body", 411)
        bodiless = path in PATHS and path != "/decide"
        require(not (bodiless and _content_length(headers)), "expected no body: only POST /decide accepts one", 413)


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
    app.state.draining = False  # since SIGTERM
    app.add_middleware(AccessMiddleware, service=service, token=token)
    content = {"application/json": {"schema": service.reader.schema}}
    if service.reader.files:
        content |= {kind: {"schema": {"type": "string", "format": "binary"}} for kind in IMAGE_TYPES}

    @app.post(
        "/decide",
        response_model=DecideResponse,
        responses={status: {"model": Refusal} for status in STATUSES},
        openapi_extra={"requestBody": {"required": True, "content": content}},
    )
    async def decide(request: Request, full: bool = False) -> Response:
        """Decide images, arrays, rows of a table, or probabilities of any model."""
        return await service.respond(request.scope, request.receive)

    @app.get("/health")
    async def health() -> dict[str, str]:
        """The process answers."""
        return {"status": "ok"}

    @app.get("/ready", responses={503: {"description": "not ready"}})
    async def ready() -> JSONResponse:
        """The model is loaded and accepts requests."""
        running = service.batcher is not None and not app.state.draining
        return JSONResponse({"ready": running}, 200 if running else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Metrics in Prometheus' text format."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return app


def _content_length(headers: dict[bytes, bytes]) -> int:
    text = headers.get(b"content-length", b"")
    return int(text) if text.isdigit() and len(text) < 20 else 0


def _log(logger: logging.Logger, event: str, level: int = logging.INFO, **fields: Any) -> None:
    logger.log(level, event, extra={"fields": fields})
