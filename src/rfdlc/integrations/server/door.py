"""The door before the application: token, latency, one log line a request, and an answer whatever happens."""

import hmac
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastapi.responses import JSONResponse

from rfdlc.integrations.server.figures import Figures
from rfdlc.integrations.server.limits import Refused
from rfdlc.integrations.server.logs import REQUESTS, log, log_failure

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Asgi = Callable[[Message, Receive, Send], Awaitable[None]]

OPEN = ("/health", "/ready")  # without a token: they tell whether, not what
KNOWN = (*OPEN, "/decide", "/metrics", "/docs", "/openapi.json")
SECURITY = [(b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store")]


class Door:
    """An ASGI application around two: POST /decide goes straight to `decide`, past routing that costs as much."""

    def __init__(self, app: Asgi, decide: Asgi, figures: Figures, token: str | None) -> None:
        self.app, self.decide, self.figures = app, decide, figures
        self._expected = None if token is None else b"Bearer " + token.encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.perf_counter(), 0

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), *SECURITY]
            await send(message)

        try:
            self._check_token(scope)
            asked = scope["path"] == "/decide" and scope["method"] == "POST"
            await (self.decide if asked else self.app)(scope, receive, noted)
        except Refused as refused:
            await refusal(refused)(scope, receive, noted)
        except Exception as error:
            log_failure(error)
            if not status:
                await refusal(Refused(500, "the server failed; the failure was logged"))(scope, receive, noted)
        path = scope["path"] if scope["path"] in KNOWN else "other"
        seconds = time.perf_counter() - began
        self.figures.request(path, status, seconds)
        level = logging.INFO if status < 500 else logging.ERROR
        fields = {"method": scope["method"][:8], "path": path, "status": status, "ms": round(1000 * seconds, 2)}
        log("request", level=level, logger=REQUESTS, **fields)

    def _check_token(self, scope: Message) -> None:
        if self._expected is None or scope["path"] in OPEN:
            return
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        if not hmac.compare_digest(given, self._expected):
            raise Refused(401, "expected the header Authorization: Bearer TOKEN, with the server's token")


def refusal(refused: Refused) -> JSONResponse:
    """The answer to a request that is refused."""
    headers: dict[str, str] = {}
    if refused.retry_after is not None:
        headers["retry-after"] = str(refused.retry_after)
    if refused.status == 401:
        headers["www-authenticate"] = "Bearer"
    if refused.status in (408, 413):  # the rest of the body is not read
        headers["connection"] = "close"
    return JSONResponse({"detail": refused.message}, refused.status, headers)
