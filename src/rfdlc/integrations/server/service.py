"""Service: one model, its queue and its figures. Each request is accepted or refused, read, computed, answered.

Requests are read from ASGI itself: for a small model most of the work is HTTP, and every layer costs.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from rfdlc.errors import InputError
from rfdlc.integrations.server.backends import Backend
from rfdlc.integrations.server.batching import Batcher
from rfdlc.integrations.server.deciding import Answer, decide_samples, decide_scores
from rfdlc.integrations.server.door import Message, Receive, Send
from rfdlc.integrations.server.figures import Figures
from rfdlc.integrations.server.limits import Limits, Refused
from rfdlc.integrations.server.logs import log
from rfdlc.integrations.server.reading import FORMATS, Question, read_image_body, read_json_body

AT_ONCE = 32_768  # bytes of JSON that are parsed on the event loop; more go to a thread
HEARD_OUT = 3  # times the largest body: a client that sends more is cut off before it can read why
DECODERS = 2  # threads that decode images and parse large bodies
IMAGE_TYPES = tuple(f"image/{name.lower()}" for name in FORMATS)
FULL = {b"": False, b"full=false": False, b"full=true": True}

Reader = Callable[[bytes, Backend, Limits], Question]


@dataclass
class Body:
    """What has come of a request so far."""

    pieces: list[bytes] = field(default_factory=list)
    size: int = 0
    held: int = 0


class Service:
    """Everything about POST /decide but the HTTP around it."""

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

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """As an ASGI application."""
        body = await self.decide(scope, receive)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def decide(self, scope: Message, receive: Receive) -> bytes:
        """The answer as JSON."""
        full = FULL.get(scope["query_string"])
        if full is None:
            raise Refused(422, "the query: expected nothing, full=true or full=false")
        reader = _reader(_header(scope, b"content-type"))
        figures, body = self.figures, Body()
        if figures.waiting >= self.limits.requests:
            raise Refused(429, "too many requests are waiting: try again in a moment", retry_after=1)
        figures.accepted += 1
        try:
            answer = await self._in_time(scope, receive, reader, body)
        finally:
            self.held -= body.held
            figures.answered += 1
        figures.decided(answer)
        return json.dumps(answer.to_dict(full), ensure_ascii=False).encode()

    async def _in_time(self, scope: Message, receive: Receive, reader: Reader, body: Body) -> Answer:
        """So many seconds to send a request, and again to answer it."""
        seconds, late = self.limits.seconds, Refused(408, f"the body did not come within {self.limits.seconds:g} s")
        try:
            async with asyncio.timeout(seconds) as deadline:
                data = await self._collect(scope, receive, body)
                deadline.reschedule(asyncio.get_running_loop().time() + seconds)
                late = Refused(503, f"no answer within {seconds:g} s: try again later", retry_after=1)
                question = await self._read(reader, data)
                answer = await self._decided(question)
        except TimeoutError:
            raise late from None
        return answer if question.utility is None else answer.by(question.utility)

    async def _collect(self, scope: Message, receive: Receive, body: Body) -> bytes:
        """All of the body. One that is too large is heard out within reason, but not kept."""
        limit, more = self.limits.body, True
        announced = _header(scope, b"content-length")
        too_large = announced.isdigit() and int(announced) > HEARD_OUT * limit
        while more and not too_large:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Refused(400, "the connection ended before the body did")
            piece, more = message.get("body", b""), message.get("more_body", False)
            body.size += len(piece)
            too_large = body.size > HEARD_OUT * limit
            if body.size <= limit:
                self._hold(piece, body)
        if body.size > limit or too_large:
            raise Refused(413, f"the body is too large: at most {limit:,} bytes are allowed")
        return body.pieces[0] if len(body.pieces) == 1 else b"".join(body.pieces)

    def _hold(self, piece: bytes, body: Body) -> None:
        body.pieces.append(piece)
        body.held += len(piece)
        self.held += len(piece)
        if self.held > self.limits.held:
            raise Refused(429, "too much is being sent at once: try again in a moment", retry_after=1)

    async def _read(self, reader: Reader, data: bytes) -> Question:
        if reader is read_json_body and len(data) <= AT_ONCE and b'"images"' not in data:
            return reader(data, self.backend, self.limits)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._decoders, reader, data, self.backend, self.limits)

    async def _decided(self, question: Question) -> Answer:
        """By the model's own utility, together with others."""
        if question.samples is None:
            return decide_scores(self.backend, question)
        assert self.batcher is not None
        try:
            return await self.batcher.submit(question.samples)
        except InputError:  # kinds and shapes were checked: what is left is that numbers overflow on their way
            told = "the samples hold numbers too large to compute with: give numbers of the size of the training data"
            raise Refused(422, told) from None


def _header(scope: Message, wanted: bytes) -> bytes:
    return next((value for name, value in scope["headers"] if name == wanted), b"")


def _reader(content_type: bytes) -> Reader:
    kind = content_type.partition(b";")[0].strip().lower().decode("latin-1")
    if kind == "application/json":
        return read_json_body
    if kind in IMAGE_TYPES:
        return read_image_body
    raise Refused(415, f"expected content type application/json or one of {', '.join(IMAGE_TYPES)}")
