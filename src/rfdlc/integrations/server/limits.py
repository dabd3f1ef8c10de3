"""The bounds of the server: on one request, on all requests together, and on a connection."""

import asyncio
from dataclasses import dataclass
from typing import Any

MEBIBYTE = 2**20
READ_AHEAD = 2**16  # bytes of a body that uvicorn reads before the application runs


@dataclass(frozen=True)
class Limits:
    """Bounds on what clients may send, hold and wait for."""

    requests: int = 256  # accepted and not answered yet; more get 429
    batch: int = 128  # samples computed together
    samples: int = 256  # per request
    actions: int = 1000  # of a utility in a request, where the model has fewer classes
    body: int = 16 * MEBIBYTE  # bytes per request
    held: int = 256 * MEBIBYTE  # bytes of all bodies in memory; more get 429
    pixels: int = 25_000_000  # per image, checked before it is decoded
    total_pixels: int = 100_000_000  # of all images of a request
    headers: int = 32_768  # bytes
    connections: int = 512  # idle ones; the one that has been idle longest is closed
    seconds: float = 10.0  # to send a request, to answer it, and to read the answer


class Connection(asyncio.Protocol):
    """One TCP connection: uvicorn's protocol parses HTTP, this one bounds time and bytes around it.

    Outside a request a client has `seconds` to send the headers of the next one and to read the last answer; a write
    that stalls ends after `seconds` as well. The middleware reports when a request begins and ends.
    """

    def __init__(self, limits: Limits, idle: "dict[Connection, None]", *, app_state: dict[str, Any], **uvicorn: Any):
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

        self.http = HttpToolsProtocol(app_state={**app_state, "connection": self}, **uvicorn)
        self.limits, self.idle = limits, idle  # `idle` is shared by all connections, in the order they became idle
        self._allowance = self._body = 0  # bytes that the client may still send, and those of the body
        self._lost = False
        self._timers: dict[str, asyncio.TimerHandle] = {}  # each ends the connection

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.http.connection_made(transport)
        self.end_request()
        if len(self.idle) > self.limits.connections:
            next(iter(self.idle)).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._stop("idle")
        self._stop("stalled")
        self.http.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._allowance < 0:  # by earlier pieces alone: this one may belong to a request that is about to begin
            self.transport.abort()
            return
        self._allowance -= len(data)
        self.http.data_received(data)

    def pause_writing(self) -> None:
        self._start("stalled")
        self.http.pause_writing()

    def resume_writing(self) -> None:
        self._stop("stalled")
        self.http.resume_writing()

    def begin_request(self, body: int) -> None:
        """Headers are complete, and `body` bytes follow."""
        self._stop("idle")
        self.idle.pop(self, None)
        self._body = body
        self._allowance += body

    def end_request(self) -> None:
        """The answer was written; what is left of the body is read and dropped."""
        self._allowance = self.limits.headers + READ_AHEAD + min(max(self._allowance, 0), self._body)
        if not self._lost:
            self._start("idle")
            self.idle[self] = None

    def _start(self, timer: str) -> None:
        self._timers[timer] = asyncio.get_running_loop().call_later(self.limits.seconds, self.transport.abort)

    def _stop(self, timer: str) -> None:
        if timer in self._timers:
            self._timers.pop(timer).cancel()
