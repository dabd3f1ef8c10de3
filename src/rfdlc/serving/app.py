"""The FastAPI application: routes, access middleware, and the life of a request from
its body to its answer.
"""

import asyncio
import gc
import hmac
import logging
import re
import time
import traceback
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
from fastapi import FastAPI, HTTPException, Request, Security
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rfdlc import __version__
from rfdlc.decisions.decider import Decider
from rfdlc.errors import InputError
from rfdlc.monitoring.feedback import decider_version, on_top
from rfdlc.predicting.onnx_model import check_rule
from rfdlc.probabilities.uncertainty import mutual_information
from rfdlc.serving.admission import Admission, Admitted, Share
from rfdlc.serving.backend import (
    LOGGER,
    Answer,
    Backend,
    Batcher,
    Limits,
    Unavailable,
)
from rfdlc.serving.decision_log import (
    FEEDBACK_ROUTE,
    DeciderFile,
    DecisionLog,
)
from rfdlc.serving.inference import SERVER, Inference
from rfdlc.serving.metrics import Metrics
from rfdlc.serving.requests import (
    FORM,
    IMAGE_TYPES,
    DecideResponse,
    Reader,
    Refusal,
    require,
)
from rfdlc.serving.workers import Worker

REQUESTS = logging.getLogger("rfdlc.serve.requests")
OPEN = ("/health", "/ready", "/v2/health/live", "/v2/health/ready")  # without a token
PATHS = (*OPEN, "/decide", "/feedback", "/metrics", "/docs", "/openapi.json", "/v2")
INFER = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?/infer")
PORT, LOCAL_HOSTS = re.compile(rb":\d+$"), (b"localhost", b"127.0.0.1", b"[::1]")
# bytes of JSON that are parsed on the event loop; larger bodies are parsed in a process
PARSED_INLINE = 32_768
# times the largest body: an upload up to this size is read and dropped, so that the
# client sees the 413
DRAINED = 3
DECODERS = 2  # processes that decode images, parse large bodies and write large answers
STATUSES = (400, 401, 403, 408, 411, 413, 415, 422, 429, 503)  # of refusals
TOO_LARGE = (
    "the samples hold numbers too large to compute with: expected numbers like the"
    " training data's"
)
NOTHING_LEFT = (
    ", and samples that have some probability for a class whose target prior is not 0"
)
JSON, JSON_ONLY = b"application/json", "expected content type application/json"
QUERY = (
    "query: expected nothing, full=true or full=false, and optionally version=V of {}"
)
READ_AS = {JSON: "json", FORM.encode(): "form"} | {
    kind.encode(): "image" for kind in IMAGE_TYPES
}
TYPES = (
    f"expected content type application/json, {FORM} or one of {', '.join(IMAGE_TYPES)}"
)
BINARY = {"type": "string", "format": "binary"}
OF_FORM = {
    "type": "object",
    "properties": {"file": {"type": "array", "items": BINARY}},
    "required": ["file"],
}


class Service:
    """One version of a model, its queue and its metrics."""

    def __init__(
        self,
        backend: Backend,
        limits: Limits,
        name: str,
        version: str,
        log: DecisionLog | None = None,
        decider: Path | None = None,
    ) -> None:
        self.backend, self.limits, self.log, self._loaded = (
            backend,
            limits,
            log,
            backend,
        )
        self.metrics, self.reader = Metrics(backend.decider), Reader(backend, limits)
        self.inference = Inference(name, version, self.reader)
        self.batcher: Batcher | None = None
        self._decoders, self._free = (
            ThreadPoolExecutor(DECODERS, "decode"),
            SimpleQueue[Worker](),
        )
        self.workers = [Worker(backend, limits, name, version) for _ in range(DECODERS)]
        for worker in self.workers:
            self._free.put(worker)
        self._file = None if decider is None else DeciderFile(decider, self.take_up)

    def take_up(self, decider: Decider) -> None:
        """Decide by another decider from the next batch on; batches that are computed
        keep theirs.
        """
        revision = on_top(self._loaded.decider, decider)
        check_rule(decider)
        self.backend = replace(self._loaded, decider=decider, revision=revision)
        if self.batcher is not None:
            self.batcher.backend = self.backend
        self.metrics.follow(decider)

    async def _tend(self) -> None:
        while True:
            await asyncio.sleep(1)
            if self._file is not None:
                await self._file.tend()
            if self.log is not None:
                self.log.tend()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Started with the server; at its end all accepted requests are
        computed first.
        """
        self.batcher = batcher = Batcher(self.backend, self.limits)
        # what is loaded stays: a full collection of it would hold all requests for a
        # tenth of a second
        gc.freeze()
        _log(
            LOGGER, "ready", model=self.backend.name, classes=len(self.metrics.classes)
        )
        tending = asyncio.create_task(self._tend())
        try:
            yield
        finally:
            self.batcher = None
            tending.cancel()
            gc.unfreeze()
            await batcher.close()
            if self.log is not None:
                self.log.close()
            self._decoders.shutdown()
            for worker in self.workers:
                worker.close()
            _log(
                LOGGER,
                "stopped",
                accepted=self.metrics.accepted,
                answered=self.metrics.answered,
            )
            for handler in LOGGER.handlers:
                handler.flush()

    async def respond(
        self,
        headers: Mapping[bytes, bytes],
        admitted: Admitted,
        full: bool = False,
        infer: bool = False,
    ) -> Response:
        """Answer a request that was admitted."""
        body, metrics = admitted.body, self.metrics
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        require(
            kind in ((JSON,) if infer else READ_AS), JSON_ONLY if infer else TYPES, 415
        )
        require(
            not (infer and b"inference-header-content-length" in headers),
            "expected JSON without binary data",
            400,
        )
        how = "infer" if infer else READ_AS[kind]
        metrics.accepted += 1
        try:
            if len(body) <= PARSED_INLINE and kind == JSON and b'"images"' not in body:
                question = self.inference.work[how](body, 0.0)
            else:
                given: Any = (headers[b"content-type"], body) if how == "form" else body
                question = await self._by_worker(admitted, how, given)
            asked, utility = (
                question.pop("infer", None),
                question.pop("utility", None),
            )
            doubts = question.pop("warnings", [])
            answer = await self._answer(question)
            named: dict[str, Any] = {"decider": decider_version(answer.decider)}
            if doubts:
                named["warnings"] = doubts
                metrics.count_unseen(len(answer.probabilities))
            if (
                self.log is not None and utility is None
            ):  # others are not decisions of the decider
                named["id"] = self.log.add(answer)
            given = answer, utility, full, asked, named
            if answer.is_small(utility, full or infer):
                answer, content = self.inference.encode(given, 0.0)
            else:
                answer, content = await self._by_worker(admitted, "encode", given)
        except Unavailable:
            require(False, "the model is being loaded again: try again later", 503)
        except (
            InputError
            # types and shapes were checked: what remains is overflow, or nothing left
            # to decide from
        ):
            prior = self.backend.decider.model.target_prior
            absent = "" if prior is None or prior.all() else NOTHING_LEFT
            raise HTTPException(422, TOO_LARGE + absent) from None
        finally:
            metrics.answered += 1
        metrics.count_decisions(answer)
        return Response(content, media_type="application/json")

    async def _by_worker(self, admitted: Admitted, kind: str, given: Any) -> Any:
        """Work that a process does, while the event loop goes on."""
        deadline = time.monotonic() + self.limits.seconds
        admitted.work = self._decoders.submit(self._work, kind, given, deadline)
        return await asyncio.wrap_future(admitted.work)

    async def take_labels(self, admitted: Admitted) -> dict[str, Any]:
        """Keep the labels of a request: what decisions were worth, and what to do."""
        assert self.log is not None
        actions = self.backend.decider.utility.actions
        given = admitted.body, self.log.ids, actions
        labels = await self._by_worker(admitted, "labels", given)
        return await self.log.answer(labels, self.backend.decider, self.metrics)

    async def _answer(self, question: dict[str, Any]) -> Answer:
        ((kind, values),) = question.items()
        if kind != "probabilities":
            assert self.batcher is not None
            return await self.batcher.submit(values)
        decider = self.backend.decider
        return Answer.of(
            decider,
            np.asarray(decider.probabilities(values)),
            mutual_information(values),
        )

    def _work(self, kind: str, given: Any, deadline: float) -> Any:
        worker = self._free.get()
        try:
            work = (
                self.inference.work[kind]
                if worker.starts()
                else partial(worker.call, kind)
            )
            return work(given, deadline)
        finally:
            self._free.put(worker)


class AccessMiddleware:
    """Token, Host and header checks; metrics and one log line per request; a response
    whatever happens.
    """

    def __init__(
        self,
        app: ASGIApp,
        services: "dict[str, Service]",
        admission: Admission,
        name: str,
        token: str | None,
    ) -> None:
        self.app, self.services, self.admission, self.name, self.service = (
            app,
            services,
            admission,
            name,
            next(iter(services.values())),
        )
        versions = [
            (b"", self.service),
            *((f"version={each}".encode(), own) for each, own in services.items()),
        ]
        options = {b"": False, b"full=false": False, b"full=true": True}
        self._queries = {  # all that there are
            b"&".join(word for word in words if word): (own, full)
            for version, own in versions
            for option, full in options.items()
            for words in ((version, option), (option, version))
        }
        self._expected = None if token is None else b"Bearer " + token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status, path = time.perf_counter(), 0, scope["path"]
        connection, headers = (
            scope.get("state", {}).get("connection"),
            dict(scope["headers"]),
        )
        length = _content_length(headers)
        admitted: Admitted | None = None

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if admitted is not None:
                admitted.answered()
            status = message.get("status", status)
            await send(message)

        if connection is not None:
            most = DRAINED * self.service.limits.body
            connection.begin_request(min(length, most), b"transfer-encoding" in headers)
        try:
            self._check(
                path, headers, sum(map(len, chain.from_iterable(scope["headers"])))
            )
            share = self._share(scope["method"], path)
            async with self.admission.admit(share, length, scope, receive) as admitted:
                app = await self._answer(scope, headers, admitted)
                await app(scope, admitted.receive, send_and_note)
        except Exception as error:
            if not isinstance(
                error, HTTPException
            ):  # the message is left out: it may quote what was sent
                frames = traceback.extract_tb(error.__traceback__)[-6:]
                where = [
                    f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}"
                    for frame in frames
                ]
                _log(
                    LOGGER,
                    "failure",
                    logging.ERROR,
                    error=type(error).__name__,
                    where=where,
                )
                error = HTTPException(500, "the server failed; the failure was logged")
            if not status:
                name = "error" if path.startswith("/v2") else "detail"
                with suppress(HTTPException):  # too late for any answer
                    async with self.admission.refuse() as admitted:
                        refusal = JSONResponse(
                            {name: error.detail}, error.status_code, error.headers
                        )
                        await refusal(scope, receive, send_and_note)
        finally:
            if connection is not None:
                connection.end_request()
        place, seconds = path if path in PATHS else "other", time.perf_counter() - began
        place = "/v2/models" if path.startswith("/v2/models/") else place
        self.service.metrics.count_request(place, status, seconds)
        fields = {
            "method": scope["method"][:8],
            "path": place,
            "status": status,
            "ms": round(1000 * seconds, 2),
        }
        _log(
            REQUESTS,
            "request",
            logging.INFO if status < 500 else logging.ERROR,
            **fields,
        )

    def _share(self, method: str, path: str) -> Share:
        """The limits that a route shares with others like it."""
        if path in OPEN:
            return self.admission.probes
        if method == "POST" and (path == "/decide" or INFER.fullmatch(path)):
            return self.admission.decisions
        if method == "POST" and path == "/feedback":
            return self.admission.feedback
        return self.admission.others

    async def _answer(
        self, scope: Scope, headers: dict[bytes, bytes], admitted: Admitted
    ) -> ASGIApp:
        """What writes the answer: of routes that decide past the router, whose layers
        cost a third.
        """
        path = scope["path"]
        if scope["method"] == "POST" and path == "/decide":
            known = self._queries.get(scope["query_string"])
            if known is None:
                raise HTTPException(422, QUERY.format(", ".join(self.services)))
            return await known[0].respond(headers, admitted, known[1])
        if scope["method"] == "POST" and (found := INFER.fullmatch(path)):
            service = self._found(*found.groups())
            return await service.respond(headers, admitted, infer=True)
        scope["admitted"] = admitted
        return self.app

    def _found(self, name: str, version: str | None) -> Service:
        service = self.services.get(version) if version else self.service
        if name != self.name or service is None:
            raise HTTPException(
                404, "there is no such model or version: GET /v2/models/NAME lists them"
            )
        return service

    def _check(self, path: str, headers: dict[bytes, bytes], size: int) -> None:
        # A chunked body has no announced size, and trailers without a bound.
        require(
            b"transfer-encoding" not in headers,
            "expected a Content-Length, not a chunked body",
            411,
        )
        most = self.service.limits.headers
        require(size <= most, f"expected at most {most:,} bytes of headers", 431)
        if (
            self._expected is None
        ):  # or a web page could point its own name at this machine
            host = headers.get(b"host", b"").lower()
            local = PORT.sub(b"", host) in LOCAL_HOSTS
            require(
                local,
                "expected the Host localhost, 127.0.0.1 or [::1]; other names need a"
                " token",
                400,
            )
            # Of all that is accepted, browsers send forms alone to other origins
            # without asking.
            form = FORM.encode() in headers.get(b"content-type", b"").lower()
            own = headers.get(b"origin", host).rpartition(b"/")[2].lower() == host
            require(
                own or not form,
                "a web page of another origin cannot send forms: send images or JSON",
                403,
            )
        elif path not in OPEN:
            known = hmac.compare_digest(
                headers.get(b"authorization", b""), self._expected
            )
            require(
                known,
                "expected the header Authorization: Bearer TOKEN, with the server's"
                " token",
                401,
            )


def create_app(
    backend: Backend | Mapping[str, Backend],
    limits: Limits | None = None,
    token: str | None = None,
    name: str | None = None,
    logs: Mapping[str, DecisionLog] | None = None,
    decider: Path | None = None,
) -> FastAPI:
    """The application, ready for any ASGI server; of several versions of a model, the
    first is the default.
    """
    versions = backend if isinstance(backend, Mapping) else {"1": backend}
    limits, name = limits or Limits(), name or next(iter(versions.values())).name
    admission = Admission(limits)
    kept, files = (
        logs or {},
        {next(iter(versions)): decider},
    )  # of the default version alone
    each = {v: (limits, name, v, kept.get(v), files.get(v)) for v in versions}
    services = {v: Service(own, *each[v]) for v, own in versions.items()}
    service = next(iter(services.values()))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for own in services.values():
                await stack.enter_async_context(own.running())
            app.openapi()  # made once, before requests come
            yield

    app = FastAPI(
        title="rfdlc",
        version=__version__,
        lifespan=lifespan,
        redoc_url=None,
        dependencies=(
            [Security(HTTPBearer(auto_error=False))] if token else []
        ),  # checked by the middleware
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.state.draining = False  # since SIGTERM
    app.state.workers = [worker for own in services.values() for worker in own.workers]
    app.state.admission = admission
    app.add_middleware(
        AccessMiddleware,
        services=services,
        admission=admission,
        name=name,
        token=token,
    )
    content: dict[str, Any] = {"application/json": {"schema": service.reader.schema}}
    if service.reader.files:
        content |= {kind: {"schema": BINARY} for kind in IMAGE_TYPES} | {
            FORM: {"schema": OF_FORM}
        }

    @app.post(
        "/decide",
        response_model=DecideResponse,
        responses={status: {"model": Refusal} for status in STATUSES},
        openapi_extra={"requestBody": {"required": True, "content": content}},
    )
    async def decide(request: Request, full: bool = False) -> Response:
        """Decide images, arrays, rows of a table, or probabilities of any model."""
        headers, admitted = dict(request.scope["headers"]), request.scope["admitted"]
        return await service.respond(headers, admitted, full)

    @app.post("/feedback", **FEEDBACK_ROUTE)
    async def feedback(request: Request, version: str | None = None) -> JSONResponse:
        """Labels of earlier answers, by their ids; the realised utility, and what to
        do.
        """
        require(
            version is None or version in services,
            QUERY.format(", ".join(services)),
            404,
        )
        own = services.get(version or "", service)
        if own.log is None:
            raise HTTPException(
                404, "this server logs no decisions: start it with --log-decisions DIR"
            )
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        require(kind.encode() == JSON, JSON_ONLY, 415)
        return JSONResponse(await own.take_labels(request.scope["admitted"]))

    @app.get("/health")
    @app.get("/v2/health/live")
    async def health() -> dict[str, str]:
        """The process answers."""
        return {"status": "ok"}

    @app.get("/ready", responses={503: {"description": "not ready"}})
    @app.get("/v2/health/ready", responses={503: {"description": "not ready"}})
    async def ready() -> JSONResponse:
        """The model is loaded and accepts requests."""
        able = [
            own.batcher is not None and own.batcher.available
            for own in services.values()
        ]
        running = not app.state.draining and all(able)
        return JSONResponse({"ready": running}, 200 if running else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics(version: str | None = None) -> Response:
        """Metrics in Prometheus' text format, of one version of the model."""
        require(
            version is None or version in services,
            QUERY.format(", ".join(services)),
            404,
        )
        found = services.get(version or "", service)
        log = found.log
        if log is None:
            text = found.metrics.text()
        else:
            text = found.metrics.text(log.dropped, log.monitor)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    @app.get("/v2")
    async def about() -> dict[str, Any]:
        """The Open Inference Protocol: the server."""
        return SERVER

    @app.get("/v2/models/{model}")
    @app.get("/v2/models/{model}/versions/{version}")
    @app.get("/v2/models/{model}/ready")
    @app.get("/v2/models/{model}/versions/{version}/ready")
    async def describe(
        request: Request, model: str, version: str | None = None
    ) -> JSONResponse:
        """The Open Inference Protocol: a model, its inputs and outputs; or whether it
        is ready.
        """
        found = services.get(version) if version else service
        if model != name or found is None:
            return JSONResponse({"error": "there is no such model or version"}, 404)
        if request.url.path.endswith("/ready"):
            return await ready()
        return JSONResponse(found.inference.metadata(list(services)))

    return app


def _content_length(headers: dict[bytes, bytes]) -> int:
    text = headers.get(b"content-length", b"")
    return int(text) if text.isdigit() and len(text) < 20 else 0


def _log(
    logger: logging.Logger, event: str, level: int = logging.INFO, **fields: Any
) -> None:
    logger.log(level, event, extra={"fields": fields})
