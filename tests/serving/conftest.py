"""A trained digits model, and servers of it on 127.0.0.1, in a thread or in a process
of their own.
"""

import http.client
import json
import threading
import time
import warnings
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest

import rfdlc


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "digits"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rfdlc.train("digits-lt", out=folder, epochs=5, device="cpu")
    return folder


@pytest.fixture(scope="session")
def file(run, tmp_path_factory):
    """An exported digits model: a process loads it sooner than a run, for tests of the
    process.
    """
    place = tmp_path_factory.mktemp("exported") / "model.onnx"
    return rfdlc.export(run, place).path


@pytest.fixture(scope="session")
def model(run):
    return rfdlc.Model.load(run, device="cpu")


@pytest.fixture(scope="session")
def samples(model):
    return rfdlc.load("digits-lt").test.inputs[:40]


@dataclass(frozen=True)
class Served:
    port: int

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def ask(self, body=b"", path="/decide", method="POST", **headers):
        """(status, headers, body) of one request; headers with `_` for `-`."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        given = {"Content-Type": "application/json"} | {
            name.replace("_", "-"): text for name, text in headers.items()
        }
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, body, given)
        response = connection.getresponse()
        answer = response.status, dict(response.getheaders()), response.read()
        connection.close()
        return answer


@contextmanager
def serving(backend, limits=None, token=None, **options):
    """A server in a thread: the same protocol, door and application as `rfdlc
    serve`.
    """
    import uvicorn

    from rfdlc.serving.app import create_app
    from rfdlc.serving.backend import Limits
    from rfdlc.serving.serve import configured, listen

    limits = limits or Limits()
    listening = listen("127.0.0.1", 0)
    server = uvicorn.Server(
        configured(create_app(backend, limits, token, **options), limits)
    )
    thread = threading.Thread(
        target=server.run, kwargs={"sockets": [listening]}, daemon=True
    )
    thread.start()
    for _ in range(500):
        if server.started:
            break
        time.sleep(0.01)
    try:
        yield Served(listening.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(timeout=20)


@pytest.fixture(scope="session")
def start():
    return serving


@pytest.fixture(scope="session")
def backend(run):
    from rfdlc.serving.backend import open_backend

    return open_backend(run)


@pytest.fixture(scope="session")
def served(backend):
    with serving(backend) as found:
        yield found


@pytest.fixture(scope="session")
def by_hand(backend):
    """A backend whose model is a function of the test's own: uniform probabilities
    after `before()`.
    """
    from dataclasses import replace

    def make(before):
        def compute(inputs):
            before()
            return np.full((len(inputs), 10), 0.1), np.zeros(len(inputs))

        return replace(backend, compute=compute)

    return make
