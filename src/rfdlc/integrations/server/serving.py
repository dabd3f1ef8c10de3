"""serve: listen, and refuse to do so where anybody could ask without a token."""

import ipaddress
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from rfdlc.decide.utility import Utility
from rfdlc.errors import InputError
from rfdlc.integrations.server.backends import open_backend
from rfdlc.integrations.server.limits import Limits
from rfdlc.integrations.server.logs import log, start_logging

if TYPE_CHECKING:
    from uvicorn import Config

    from rfdlc.integrations.server.door import Door

SHORTEST_TOKEN = 16
BACKLOG = 2048


def serve(
    model: str | Path,
    *,
    utility: Utility | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    token_file: str | Path | None = None,
    limits: Limits | None = None,
    quiet: bool = False,
) -> None:
    """Serve a run folder or an exported file until SIGTERM or Ctrl-C; then answer what was accepted, and end."""
    token = None if token_file is None else read_token(token_file)
    check_host(host, token)
    try:
        import uvicorn

        from rfdlc.integrations.server.application import make_app
    except ImportError:
        raise InputError('serving needs fastapi and uvicorn: pip install "rfdlc[serve]"') from None
    chosen = limits or Limits()
    app = make_app(open_backend(model, utility), chosen, token)
    listening = listen(host, port)
    start_logging(quiet)
    log("listening", host=host, port=listening.getsockname()[1], token=token is not None)
    uvicorn.Server(configured(app, chosen)).run(sockets=[listening])


def configured(app: "Door", limits: Limits) -> "Config":
    """How uvicorn serves the application."""
    from uvicorn import Config

    from rfdlc.integrations.server.protocol import bounded

    return Config(
        app,
        http=bounded(limits),
        ws="none",
        access_log=False,
        log_config=None,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=int(2 * limits.seconds) + 1,
    )


def check_host(host: str, token: str | None) -> None:
    """Loopback is for this machine alone; everything else needs a token."""
    if token is None and not _is_loopback(host):
        raise InputError(
            f"host {host!r} can be reached from other machines: give --token-file FILE, or listen on 127.0.0.1"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_token(path: str | Path) -> str:
    """One line of visible characters, long enough not to be guessed."""
    try:
        token = Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        raise InputError(f"{path}: the token cannot be read; expected a file with one line of ASCII text") from None
    if len(token) < SHORTEST_TOKEN or not token.isprintable() or " " in token:
        raise InputError(
            f"{path}: expected one line of {SHORTEST_TOKEN} or more characters without spaces, such as "
            "`openssl rand -hex 32` prints"
        )
    return token


def listen(host: str, port: int) -> socket.socket:
    """Bound here, so that a taken port is one clear line."""
    if not 0 <= port < 2**16:  # the system would take what is left of it by 65,536
        raise InputError(f"port {port} is out of range: expected 0 (any that is free) to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(BACKLOG)  # from now on whoever connects is only waiting
    except OSError as error:
        raise InputError(
            f"cannot listen on {host}:{port} ({error.strerror}): choose another --host or --port"
        ) from None
    return listening
