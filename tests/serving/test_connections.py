"""Connections that hold on, send without end or do not read: each has a bound in time
and bytes.
"""

import json
import socket
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

import rfdlc
from rfdlc.serving.backend import Limits

pytest.importorskip("fastapi", reason='server tests need pip install "rfdlc[serve]"')

HEAD = b"POST /decide HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


def closed_after(connection, send=b"", seconds=6.0):
    """Seconds until the server closes the connection, while `send` is sent every 50 ms;
    None if it does not.
    """
    began = time.monotonic()
    connection.settimeout(0.05)
    while time.monotonic() - began < seconds:
        try:
            if send:
                connection.sendall(send)
            if not connection.recv(65536):
                return time.monotonic() - began
        except TimeoutError:
            continue
        except ConnectionError:
            return time.monotonic() - began
    return None


@pytest.mark.parametrize(
    ("request_bytes", "dribble"),
    [
        (b"", b"\r\n"),  # never a request
        (HEALTH + b"\r\n", b"\r\n"),  # empty lines after a response
        (HEALTH + b"\r\n", b""),
        (HEAD + b"Content-Length: 3000000\r\nHost: a\r\n\r\n", b"x"),  # after a refusal
        (HEAD + b"Content-Length: 100000\r\n\r\n", b"x"),
    ],
)
def test_no_connection_is_held_forever(start, backend, request_bytes, dribble):
    with start(backend, Limits(seconds=0.5)) as served:
        with socket.create_connection(("127.0.0.1", served.port)) as connection:
            connection.sendall(request_bytes)
            assert closed_after(connection, dribble) is not None
        assert served.ask(method="GET", path="/health")[0] == 200


def test_chunked_bodies_and_their_trailers(start, backend):
    with (
        start(backend) as served,
        socket.create_connection(("127.0.0.1", served.port), timeout=5) as connection,
    ):
        connection.sendall(
            HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 1000
        )
        assert connection.recv(4096).startswith(b"HTTP/1.1 411")
        assert closed_after(connection, b"a: b\r\n" * 1000) is not None


def test_trailers_and_many_headers_are_not_parsed(start, backend):
    """Trailers count as headers where they are parsed (60 KB give 431); a valid request
    with a body follows.
    """
    chunked = HEAD + b"transfer-Encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 10_000
    with start(backend) as served:
        for pieces in (
            (chunked,),
            (chunked[:90], chunked[90:]),
            (chunked[:105], chunked[105:]),
        ):
            with socket.create_connection(
                ("127.0.0.1", served.port), timeout=5
            ) as connection:
                for piece in pieces:
                    connection.sendall(piece)
                    time.sleep(0.1)
                assert connection.recv(4096).startswith(b"HTTP/1.1 411")
        with socket.create_connection(
            ("127.0.0.1", served.port), timeout=5
        ) as connection:
            connection.sendall(HEALTH + b"a: b\r\n" * 200 + b"\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
            connection.sendall(HEALTH + b"a: b\r\n" * 300)
            assert closed_after(connection) is not None
        lines = json.dumps({"probabilities": [[0.1] * 10] * 40}, indent=1).encode()
        assert lines.count(b"\n") > 256
        assert served.ask(lines, X="transfer-encoding: chunked")[0] == 200


def test_a_body_where_none_is_expected(served):
    assert served.ask(b"x" * 1000, method="GET", path="/health")[0] == 413


def test_readers_that_do_not_read(start, backend):
    """An answer of megabytes that nobody reads is dropped."""
    wide = replace(
        backend,
        compute=lambda inputs: (np.full((len(inputs), 10), 0.1), np.zeros(len(inputs))),
    )
    utility = {
        "matrix": [[0.1234567 * i for i in range(1000)]] * 10,
        "actions": [f"action {i}" for i in range(1000)],
    }
    # 256 samples x 1,000 expected utilities
    body = json.dumps(
        {"probabilities": [[0.1] * 10] * 256, "utility": utility}
    ).encode()
    with start(wide, Limits(seconds=2)) as served, socket.socket() as connection:
        size = len(served.ask(body, path="/decide?full=true")[2])
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", served.port))
        full = HEAD.replace(b"/decide", b"/decide?full=true")
        connection.sendall(full + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        connection.settimeout(20)
        received = len(connection.recv(1))  # the answer begins
        time.sleep(5)
        try:
            while piece := connection.recv(65536):
                received += len(piece)
        except ConnectionError:
            pass
        assert received < size


def test_only_so_many_idle_connections(start, backend):
    with start(backend, Limits(connections=5)) as served:
        for _ in range(10):  # connections that were closed are not idle
            socket.create_connection(("127.0.0.1", served.port)).close()
        time.sleep(0.3)
        idle = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(20)]
        time.sleep(0.3)
        assert served.ask(method="GET", path="/health")[0] == 200
        assert closed_after(idle[0], seconds=1) is not None
        for connection in idle:
            connection.close()


def test_hosts(start, backend):
    """Without a token only local names are answered: a web page cannot point its own
    name at this server.
    """
    with start(backend) as served:
        for host in ("localhost", "127.0.0.1:80", "[::1]:8000", "LOCALHOST:1"):
            assert served.ask(method="GET", path="/health", Host=host)[0] == 200
        for host in (
            "example.org",
            "localhost.example.org",
            "127.0.0.1.example.org:80",
            "",
        ):
            assert served.ask(method="GET", path="/health", Host=host)[0] == 400


def test_large_utilities_and_odd_actions(served):
    def ask(actions, columns):
        utility = {"matrix": [[0.0] * columns] * 10, "actions": actions}
        return served.ask({"probabilities": [[0.1] * 10], "utility": utility})[0]

    began = time.monotonic()
    assert ask([f"action {i}" for i in range(50_000)], 50_000) == 422
    assert time.monotonic() - began < 5
    body = (
        b'{"probabilities": [[%s]], "utility": {"matrix": [%s], "actions":'
        b' ["\\ud800"]}}'
    )
    assert (
        served.ask(body % (b",".join([b"0.1"] * 10), b",".join([b"[1]"] * 10)))[0]
        == 400
    )


def test_pixels_of_all_images_together(start, backend):
    from tests.serving.test_malformed import coded, image_file

    with start(backend, Limits(total_pixels=1000)) as served:
        assert served.ask({"images": [coded(image_file((20, 20)))] * 2})[0] == 200
        assert served.ask({"images": [coded(image_file((20, 20)))] * 3})[0] == 413


def test_a_model_that_is_not_finite_is_not_served(run, tmp_path):
    import shutil

    from safetensors.numpy import load_file, save_file

    from rfdlc.serving.backend import open_backend

    shutil.copytree(run, tmp_path / "run")
    weights = load_file(run / "model.safetensors")
    save_file(
        {name: np.full_like(values, np.nan) for name, values in weights.items()},
        tmp_path / "run/model.safetensors",
    )
    with pytest.raises(
        rfdlc.InputError, match="cannot be served: its probabilities are not finite"
    ):
        open_backend(tmp_path / "run")


def test_an_unread_log_does_not_stop_the_server(file):
    process = subprocess.Popen(
        [sys.executable, "-m", "rfdlc", "serve", str(file), "--port", "0"],
        stderr=subprocess.PIPE,
    )
    try:
        port = json.loads(process.stderr.readline())["port"]
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            for _ in range(64):  # more lines than a pipe of 64 KiB holds
                connection.sendall((HEALTH + b"\r\n") * 16)
                answers = b""
                while answers.count(b"HTTP/1.1 200") < 16 or not answers.endswith(b"}"):
                    piece = connection.recv(65536)
                    assert piece
                    answers += piece
    finally:
        process.kill()
        process.communicate()
