"""serve: listen on a socket, and refuse to where others could send requests without a
token.
"""

import asyncio
import ipaddress
import json
import logging
import os
import queue
import re
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from rfdlc.decisions.decider import Decider
from rfdlc.decisions.utility import Utility
from rfdlc.errors import InputError, expect
from rfdlc.probabilities.predictions import Predictions
from rfdlc.probabilities.priors import PriorLike
from rfdlc.serving.backend import MONTH, Backend, Limits

SHORTEST_TOKEN = 16
URL_SAFE = re.compile(r"[A-Za-z0-9_.-]{1,100}")
READ_AHEAD = 2**16  # bytes of a body that uvicorn reads before the application runs
DRAINED_PER_SECOND = 2**24  # bytes of refused bodies, of all connections together
HEADER_LINES, CHUNKED = 256, b"\ntransfer-encoding:"
# that wait to be written; more are dropped, so that an unread pipe cannot stop the
# server
LOG_LINES = 10_000


def serve(
    model: str | Path,
    *,
    utility: Utility | None = None,
    target_prior: PriorLike | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    token_file: str | Path | None = None,
    limits: Limits | None = None,
    quiet: bool = False,
    certificate: str | Path | None = None,
    key: str | Path | None = None,
    versions: Mapping[str, str | Path] | None = None,
    name: str | None = None,
    log_decisions: str | Path | None = None,
    reference: str | Path | None = None,
    decider: str | Path | Decider | None = None,
    per_month: int = MONTH,
) -> None:
    """Serve a run folder or an exported file until SIGTERM or Ctrl-C; accepted requests
    are answered first.

    `versions` are more versions of the model, by name, beside `model`, which is version
    1 and the default; `name` is what the Open Inference Protocol calls the model.
    `log_decisions` is a folder for decisions, `reference` held-out predictions that
    they are watched beside (by default those of a run folder), `per_month` the
    decisions of a month (for the rate of false alarms), and `decider` a file of `rfdlc
    recalibrate`, which is taken up whenever it changes, or a `Decider` instead of the
    one of the run folder.
    """
    token = None if token_file is None else read_token(token_file)
    check_host(host, token)
    expect(
        key is None or certificate is not None,
        "a key (--tls-key) needs its certificate (--tls-certificate)",
    )
    try:
        import uvicorn

        from rfdlc.serving.app import create_app
    except ImportError:
        raise InputError(
            'serving needs fastapi and uvicorn: pip install "rfdlc[serve]"'
        ) from None
    limits = limits or Limits()
    taken = (
        "version 1 is the model itself: give the other one another name, such as"
        " 2=model.onnx"
    )
    expect("1" not in (versions or {}), taken)
    fixed = decider if isinstance(decider, Decider) else None
    expect(
        not (fixed and versions),
        "a decider was fitted for one model: serve other versions on ports of"
        " their own",
    )
    paths, live = (
        {"1": model, **(versions or {})},
        Path(decider) if isinstance(decider, str | Path) else None,
    )
    expect(
        reference is None or log_decisions is not None,
        "--reference is for --log-decisions DIR: give both",
    )
    backends = _opened(paths, utility, target_prior, fixed, limits)
    expect(
        name is None or URL_SAFE.fullmatch(name),
        f"name {name!r}: expected letters, digits, dots, - and _",
    )
    logs = {
        v: _decision_log(v, path, log_decisions, reference, per_month, backends)
        for v, path in paths.items()
    }
    known = name or re.sub(r"[^\w.-]+", "-", backends["1"].name, flags=re.ASCII)
    app = create_app(
        backends, limits, token, known, {v: log for v, log in logs.items() if log}, live
    )
    server = uvicorn.Server(
        configured(app, limits, ssl_certfile=certificate, ssl_keyfile=key)
    )
    try:
        server.config.load()
    except OSError as error:
        raise InputError(
            f"{certificate}: cannot be used for TLS ({error.strerror}): expected PEM"
            " files"
        ) from None
    server.handle_exit = partial(_drain, app, limits, server.handle_exit)  # type: ignore[method-assign]
    listening = listen(host, port)
    for worker in app.state.workers:
        worker.start()
    _log_as_json(quiet)
    fields = {
        "host": host,
        "port": listening.getsockname()[1],
        "token": token is not None,
    }
    logging.getLogger("rfdlc.serve").info("listening", extra={"fields": fields})
    with warnings.catch_warnings(
        action="ignore"
    ):  # they would quote utilities that clients send
        server.run(sockets=[listening])


def _opened(paths: Mapping[str, str | Path], *decided_by: Any) -> dict[str, Backend]:
    """The model of each version: all have the classes of the first."""
    from rfdlc.serving.workers import ModelProcess

    backends = {}
    for version, path in paths.items():
        expect(
            URL_SAFE.fullmatch(version),
            f"version {version!r}: expected letters, digits, dots, - and _",
        )
        backends[version] = ModelProcess(path, *decided_by).open()
    first = backends["1"].decider.utility
    for version, backend in backends.items():
        alike = backend.decider.utility.classes.names == first.classes.names
        expect(
            alike,
            f"version {version} has other classes than version 1: serve it on a port of"
            " its own",
        )
    return backends


def _drain(
    app: Any,
    limits: Limits,
    stop: Callable[[int, Any], object],
    number: int,
    frame: Any,
) -> None:
    """Handle a signal: /ready says no for a while, then the server stops."""
    wait = limits.drain if number == signal.SIGTERM and not app.state.draining else 0.0
    app.state.draining = True
    threading.Timer(wait, stop, (number, frame)).start()
    last = threading.Timer(
        wait + 2 * limits.seconds + 2, os._exit, (1,)
    )  # all have been answered, if by a 503
    last.daemon = True
    last.start()


def _log_as_json(quiet: bool) -> None:
    handler = JsonLines()
    for name, level in (
        ("rfdlc.serve", logging.INFO),
        ("uvicorn.error", logging.WARNING),
    ):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
    logging.getLogger("rfdlc.serve.requests").setLevel(
        logging.ERROR if quiet else logging.INFO
    )


def _decision_log(
    version: str,
    model: str | Path,
    folder: Any,
    reference: Any,
    per_month: int,
    backends: Mapping[str, Any],
) -> Any:
    """The log of one version, in a folder of its own unless it is the default one; None
    without a log.
    """
    if folder is None:
        return None
    try:
        from rfdlc.serving.decision_log import DecisionLog
    except ImportError:
        raise InputError(
            '--log-decisions needs pyarrow: pip install "rfdlc[serve]"'
        ) from None
    own = Path(model) / "held-out.npz"
    place = own if reference is None and own.is_file() else reference
    held = (
        None
        if place is None
        else Predictions.load(place, backends[version].decider.utility.classes)
    )
    labelled = held is None or held.targets is not None
    expect(
        labelled,
        f"--reference {place}: held-out predictions need labels: a column 'target'",
    )
    return DecisionLog(
        Path(folder) if version == "1" else Path(folder) / version, held, per_month
    )


def configured(app: Any, limits: Limits, **tls: Any) -> Any:
    """How uvicorn serves the application."""
    from uvicorn import Config

    return Config(
        app,
        http=partial(Connection, limits, {}, Drain()),  # type: ignore[arg-type]
        ws="none",
        access_log=False,
        log_config=None,
        proxy_headers=False,
        server_header=False,
        headers=[("x-content-type-options", "nosniff"), ("cache-control", "no-store")],
        timeout_keep_alive=5,
        timeout_graceful_shutdown=int(2 * limits.seconds) + 1,
        **tls,
    )


def check_host(host: str, token: str | None) -> None:
    """Loopback is for this machine only; every other address needs a token."""
    loopback = host == "localhost"
    with suppress(ValueError):
        loopback = ipaddress.ip_address(host).is_loopback
    reachable = (
        f"host {host!r} can be reached from other machines: give --token-file FILE, or"
        " listen on 127.0.0.1"
    )
    expect(loopback or token is not None, reachable)


def read_token(path: str | Path) -> str:
    """One line of printable characters, long enough not to be guessed."""
    token = ""
    with suppress(OSError, UnicodeDecodeError):
        token = Path(path).read_text(encoding="ascii").strip()
    expected = (
        f"expected a file with one line of {SHORTEST_TOKEN} or more ASCII characters"
        " without spaces"
    )
    good = len(token) >= SHORTEST_TOKEN and token.isprintable() and " " not in token
    expect(good, f"{path}: {expected}, such as `openssl rand -hex 32` prints")
    return token


def listen(host: str, port: int) -> socket.socket:
    """Bound here, so that a port in use gives one clear line."""
    expect(
        0 <= port < 2**16,
        f"port {port} is out of range: expected 0 (any free port) to 65535",
    )
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        message = (
            f"cannot listen on {host}:{port} ({error.strerror}): choose another --host"
            " or --port"
        )
        raise InputError(message) from None


class Drain:
    """What all connections together may read of bodies that were refused."""

    _until = 0.0

    def pause(self, size: int) -> float:
        """Seconds until a connection that has just dropped so many bytes reads on."""
        now = asyncio.get_running_loop().time()
        self._until = max(now, self._until) + size / DRAINED_PER_SECOND
        return self._until - now


class Connection(asyncio.Protocol):
    """One TCP connection: uvicorn's protocol parses HTTP, this one bounds time and
    bytes around it.

    Outside a request a client has `seconds` to send the headers of the next one and to
    read the last answer; a write that stalls ends after `seconds` as well. The
    middleware reports when a request begins and ends. What a client sends ahead of its
    answers counts until all have been written.
    """

    def __init__(
        self,
        limits: Limits,
        idle: "dict[Connection, None]",
        drain: Drain,
        *,
        app_state: dict[str, Any],
        **uvicorn: Any,
    ):
        from rfdlc.serving.pipelining import Pipelined

        self.http = Pipelined(app_state={**app_state, "connection": self}, **uvicorn)
        self.limits, self.idle = (
            limits,
            idle,
        )  # `idle` is shared by all connections, in the order they became idle
        self._drain, self._left = drain, 0  # bytes of a refused body
        self._allowance = self._body = (
            0  # bytes that the client may still send, and those of the body
        )
        self._lines, self._tail, self._chunked = (
            0,
            b"",
            False,
        )  # of the headers that are being sent
        self._outside, self._drops, self._lost = (
            True,
            False,
            False,
        )  # between requests; after a chunked body's headers
        self._timers: dict[str, asyncio.TimerHandle] = {}  # each ends the connection

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.http.connection_made(transport)
        self.end_request()
        if len(self.idle) > self.limits.connections:
            next(iter(self.idle)).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self.idle.pop(self, None)
        self._time("idle", False)
        self._time("stalled", False)
        self.http.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if (
            self._allowance < 0
            # by earlier pieces alone: this one may belong to a request that is about to
            # begin
        ):
            self.transport.abort()
            return
        self._allowance -= len(data)
        if self._left > 0:
            self._left -= len(data)
            self.transport.pause_reading()
            pause = self._drain.pause(len(data))
            asyncio.get_running_loop().call_later(pause, self._read_on)
        if self._drops:
            return
        if self._outside:
            seen, before = self._tail + data, len(self._tail)
            end = seen.find(b"\r\n\r\n")
            head = seen if end < 0 else seen[: end + 4]
            self._tail, self._lines = (
                head[-len(CHUNKED) :],
                self._lines + head.count(b"\n", before),
            )
            self._chunked = self._chunked or CHUNKED in head.lower()
            if (
                self._lines > HEADER_LINES
            ):  # each would be parsed before the request can be refused
                self.transport.abort()
                return
            if (
                end >= 0 and self._chunked
            ):  # refused: the parser must not see its trailers
                self._drops, data = True, head[before:]
        self.http.data_received(data)

    def pause_writing(self) -> None:
        self._time("stalled", True)
        self.http.pause_writing()

    def resume_writing(self) -> None:
        self._time("stalled", False)
        self.http.resume_writing()

    def begin_request(self, body: int, chunked: bool) -> None:
        """Headers are complete, and `body` bytes follow; those of a chunked body are
        dropped.
        """
        self._outside, self._drops = False, chunked
        self._time("idle", False)
        self.idle.pop(self, None)
        self._body = body
        self._allowance += body

    def end_request(self) -> None:
        """The answer was written; what is left of the body is read and dropped."""
        self._outside, self._lines, self._tail, self._chunked = True, 0, b"", False
        unread = self.http.cycle is not None and self.http.cycle.more_body
        self._left = self._body if unread else 0
        if not self.http.pipeline:
            rest = min(max(self._allowance, 0), self._body)
            self._allowance = self.limits.headers + READ_AHEAD + rest
        if not self._lost:
            self._time("idle", True)
            self.idle[self] = None

    def _read_on(self) -> None:
        if not self._lost and not self.transport.is_closing():
            self.transport.resume_reading()

    def _time(self, timer: str, start: bool) -> None:
        if timer in self._timers:
            self._timers.pop(timer).cancel()
        if start:
            self._timers[timer] = asyncio.get_running_loop().call_later(
                self.limits.seconds, self.transport.abort
            )


class JsonLines(logging.Handler):
    """One JSON object per line on standard error, written by a thread of its own:
    logging never blocks a request.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines: queue.Queue[str] = queue.Queue(LOG_LINES)
        threading.Thread(target=self._write, daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        stamp = (
            time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z"
        )
        table = {
            "time": stamp,
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        with suppress(queue.Full):
            self._lines.put_nowait(
                json.dumps({**table, **getattr(record, "fields", {})}) + "\n"
            )

    def flush(self) -> None:
        """Wait until all lines are written, for a second at most."""
        with self._lines.all_tasks_done:
            self._lines.all_tasks_done.wait_for(
                lambda: not self._lines.unfinished_tasks, timeout=1
            )

    def _write(self) -> None:
        while True:
            lines = [self._lines.get()]
            time.sleep(
                0.02
                # a burst is written at once: a wake-up for every line would slow the
                # requests
            )
            lines += [self._lines.get() for _ in range(self._lines.qsize())]
            sys.stderr.write("".join(lines))
            sys.stderr.flush()
            for _ in lines:
                self._lines.task_done()
