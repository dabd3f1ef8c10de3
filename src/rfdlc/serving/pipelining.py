"""HTTP by uvicorn, with a bound on the requests that one connection may send ahead of
their answers.
"""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

PIPELINED = 16  # requests that wait on one connection


class TooMany(Exception):
    """Ends the parsing of what a client has sent."""


class Pipelined(HttpToolsProtocol):
    """Requests of one connection wait in a queue, which uvicorn fills without a bound.

    Here the connection ends at the first request too many, after the answers of those
    that wait: nothing more is read.
    """

    _full = False

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= PIPELINED:
            self._full = True
            raise TooMany
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        if not self._full:
            super().data_received(data)

    def send_400_response(self, msg: str) -> None:
        """Called where parsing ended."""
        if not self._full:
            super().send_400_response(msg)
            return
        self.cycle.keep_alive = False  # of the last one that waits
        # Past uvicorn's own control, which would read on after the next answer.
        self.flow.read_paused = False
        self.transport.pause_reading()
