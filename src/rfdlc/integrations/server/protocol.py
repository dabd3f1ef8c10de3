"""HTTP as uvicorn speaks it by httptools, with an end to how much and how long a client may send headers."""

from asyncio import TimerHandle
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rfdlc.integrations.server.limits import Limits


def bounded(limits: Limits) -> type[HttpToolsProtocol]:
    """The protocol class that uvicorn makes one of for each connection."""

    class BoundedHeaders(HttpToolsProtocol):
        """Closes a connection whose headers are too long or too slow; neither parser nor server would."""

        _header_bytes = 0
        _deadline: TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._await_headers()

        def connection_lost(self, exc: Exception | None) -> None:
            self._headers_came()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._deadline is not None:
                if self._header_bytes > limits.headers:  # earlier pieces alone: this one may hold a body already
                    self.transport.close()
                    return
                self._header_bytes += len(data)
            super().data_received(data)

        def on_message_begin(self) -> None:
            self._await_headers()
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._headers_came()
            super().on_headers_complete()

        def _await_headers(self) -> None:
            self._headers_came()
            self._deadline = self.loop.call_later(limits.seconds, self.transport.close)

        def _headers_came(self) -> None:
            self._header_bytes = 0
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return BoundedHeaders
