"""Admission: what requests may hold and take, one for all routes.

Every request passes `Admission.admit` before its route is called, which gets a body
that was read within the limits. Routes share limits by what they do (`Share`).
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope

from rfdlc.serving.backend import Limits
from rfdlc.serving.requests import CLOSE, HEADERS

NO_BODY = (
    "expected no body: only POST /decide, /feedback and /v2/models/NAME/infer accept"
    " one"
)
FEEDBACK_BODY = 2**21  # bytes of labels in one request
FEW = 16  # requests at once, to other routes than those that decide
REST = 9  # times as long as a request took, until the next one of a paced share begins


@dataclass
class Share:
    """What the requests to some routes hold together.

    Those of a paced share begin one after another, with rests that leave nine tenths of
    the time to others, however many are sent.
    """

    requests: int  # admitted and not answered yet; more get 429
    body: int = 0  # bytes of one body
    most_held: int = 0  # bytes of all bodies in memory; more get 429
    paced: bool = True
    # What is counted: by default the time of the event loop, not waits for a processor.
    clock: Callable[[], float] = time.thread_time
    waiting: int = 0
    held: int = 0
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _rests_until: float = 0.0

    async def begin(self) -> None:
        """Wait until a request may begin."""
        if not self.paced:
            return
        await self._turn.acquire()
        try:
            rest = self._rests_until - asyncio.get_running_loop().time()
            if rest > 0:
                await asyncio.sleep(rest)
        except asyncio.CancelledError:
            self._turn.release()
            raise

    def end(self, began: float) -> None:
        """The answer of a request that began then, by the clock, is ready."""
        if not self.paced:
            return
        now = asyncio.get_running_loop().time()
        self._rests_until = now + REST * (self.clock() - began)
        self._turn.release()


class Admitted:
    """A request that was admitted; it counts until its answer begins."""

    # What still uses the body in a thread: bytes are held until that ends.
    work: "Future[Any] | None" = None

    def __init__(self, share: Share, length: int) -> None:
        self.body = b""
        self.answering = asyncio.timeout(None)
        self._share, self._length = share, length
        self._loop = asyncio.get_running_loop()
        self._began: float | None = None
        self._counts = True
        share.waiting += 1
        share.held += length

    async def receive(self) -> Message:
        """The body, as routes read it."""
        return {"type": "http.request", "body": self.body, "more_body": False}

    async def begin(self) -> None:
        """Wait for the turn of this request."""
        await self._share.begin()
        self._began = self._share.clock()

    def answered(self) -> None:
        """The answer begins; writing it has a limit of its own (`Connection`)."""
        self.answering.reschedule(None)
        self.release()

    def release(self) -> None:
        """The request counts no longer."""
        if not self._counts:
            return
        self._counts = False
        self.body = b""
        self._share.waiting -= 1
        if self._began is not None:
            self._share.end(self._began)
        if self.work is None:
            self._drop()
        else:
            self.work.add_done_callback(
                lambda _: self._loop.call_soon_threadsafe(self._drop)
            )

    def _drop(self) -> None:
        self._share.held -= self._length


class Admission:
    """The shares of all routes, and the time of every request."""

    def __init__(self, limits: Limits) -> None:
        self.seconds = limits.seconds
        self.decisions = Share(limits.requests, limits.body, limits.held, paced=False)
        # Labels are read and estimates are made elsewhere: all of that counts.
        most_held = FEW * FEEDBACK_BODY
        self.feedback = Share(FEW, FEEDBACK_BODY, most_held, clock=time.monotonic)
        self.probes = Share(limits.connections)  # of health, without a token
        self.others = Share(FEW)
        self.refusals = Share(limits.requests)

    @asynccontextmanager
    async def admit(
        self, share: Share, length: int, scope: Scope, receive: Receive
    ) -> AsyncIterator[Admitted]:
        """A request with its body of `length` bytes, whose answer begins in time."""
        if length and not share.body:
            raise HTTPException(413, NO_BODY)
        if length > share.body:
            raise HTTPException(
                413, f"the body is too large: expected at most {share.body:,} bytes"
            )
        if share.waiting >= share.requests or share.held + length > share.most_held:
            raise HTTPException(
                429,
                "too many requests are waiting: try again in a moment",
                HEADERS[429],
            )
        admitted = Admitted(share, length)
        try:
            if length:
                admitted.body = await self._read(scope, receive)
            async with self._in_time(admitted):
                yield admitted
        finally:
            admitted.release()

    @asynccontextmanager
    async def refuse(self) -> AsyncIterator[Admitted]:
        """A request that was not admitted, or failed: its answer is paced as well."""
        refused = Admitted(self.refusals, 0)
        try:
            async with self._in_time(refused):
                yield refused
        finally:
            refused.release()

    @asynccontextmanager
    async def _in_time(self, admitted: Admitted) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self.seconds) as admitted.answering:
                await admitted.begin()
                yield
        except TimeoutError:
            reason = f"no answer within {self.seconds:g} s: try again later"
            raise HTTPException(503, reason, HEADERS[503]) from None

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        try:
            async with asyncio.timeout(self.seconds):
                return await Request(scope, receive).body()
        except ClientDisconnect:
            status = 400
            reason = "the connection was closed before the body was complete"
        except TimeoutError:
            status = 408
            reason = (
                f"the body was not complete within {self.seconds:g} s: try again later"
            )
        raise HTTPException(status, reason, CLOSE)
