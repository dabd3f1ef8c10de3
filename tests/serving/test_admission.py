"""One admission for all routes: requests in flight, bytes, and turns."""

import asyncio
import json
import re
import socket

import pytest

from rfdlc.serving.backend import Limits

pytest.importorskip("fastapi", reason='server tests need pip install "rfdlc[serve]"')

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def app(backend, tmp_path):
    from rfdlc.serving.app import create_app
    from rfdlc.serving.decision_log import DecisionLog

    app = create_app(backend, Limits(seconds=2), logs={"1": DecisionLog(tmp_path)})

    @app.post("/added")
    async def added() -> str:
        return "a route that nobody thought of"

    return app


def shares(app):
    admission = app.state.admission
    return (
        admission.decisions,
        admission.feedback,
        admission.probes,
        admission.others,
    )


def questions(app):
    """A method and a path of every route."""
    asked = [("POST", "/v2/models/x/infer"), ("GET", "/nothing")]
    for route in app.routes:
        path = re.sub(r"{\w+}", "x", route.path)
        asked += [(method, path) for method in route.methods]
    return asked


async def ask(app, method, path, length=0, body=None, kind=b"application/json"):
    """The status of a request; without `body`, one that never comes."""

    async def receive():
        if body is None:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message):
        sent.append(message)

    sent = []
    headers = [(b"host", b"localhost"), (b"content-type", kind)]
    headers.append((b"content-length", str(length).encode()))
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "http_version": "1.1",
        "scheme": "http",
        "server": ("localhost", 80),
        "client": None,
    }
    await app(scope, receive, send)
    return sent[0]["status"]


async def statuses(app, length=0):
    return {
        (method, path): await ask(app, method, path, length)
        for method, path in questions(app)
    }


def test_every_route_is_refused_while_too_many_requests_wait(app):
    before = asyncio.run(statuses(app))
    assert {"/decide", "/feedback", "/health", "/metrics", "/added"} <= {
        path for _, path in before
    }
    assert 429 not in before.values()
    for share in shares(app):
        assert (share.waiting, share.held) == (0, 0)
        share.waiting = share.requests
    assert set(asyncio.run(statuses(app)).values()) == {429}


def test_no_route_reads_more_than_its_share(app):
    """Bodies of these requests never come: an attempt to read one would give 408."""
    largest = max(share.body for share in shares(app))
    assert set(asyncio.run(statuses(app, largest + 1)).values()) == {413}
    for share in shares(app):
        share.held = share.most_held
    assert set(asyncio.run(statuses(app, 1)).values()) == {413, 429}


def test_labels_have_a_share_of_the_memory(app):
    size = 2**21

    async def attack():
        reading = [
            asyncio.create_task(ask(app, "POST", "/feedback", size)) for _ in range(16)
        ]
        await asyncio.sleep(0)
        status = await ask(app, "POST", "/feedback", size)
        held = app.state.admission.feedback.held
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        return status, held

    assert asyncio.run(attack()) == (429, 16 * size)
    assert app.state.admission.feedback.held == 0
    assert app.state.admission.feedback.waiting == 0


def test_labels_are_read_by_a_process(app, monkeypatch):
    from rfdlc.serving.workers import Worker

    kinds = []

    def call(worker, kind, *given):
        kinds.append(kind)
        raise TimeoutError

    monkeypatch.setattr(Worker, "starts", lambda worker: False)
    monkeypatch.setattr(Worker, "call", call)
    body = json.dumps({"ids": ["a"], "labels": ["0"]}).encode()
    assert asyncio.run(ask(app, "POST", "/feedback", len(body), body)) == 503
    assert kinds == ["labels"]


def test_requests_of_a_paced_share_rest_and_a_cancelled_one_gives_up_its_turn():
    from rfdlc.serving.admission import REST, Share

    async def run():
        share = Share(2)
        loop = asyncio.get_running_loop()
        await share.begin()
        share.end(share.clock() - 10)
        assert share._rests_until - loop.time() == pytest.approx(10 * REST, rel=0.1)
        waiting = asyncio.create_task(share.begin())
        await asyncio.sleep(0)
        assert share._turn.locked()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert not share._turn.locked()

    asyncio.run(run())


def test_only_so_many_requests_are_sent_ahead_of_their_answers(start, backend):
    from rfdlc.serving.pipelining import PIPELINED

    def answers(served, count):
        received = b""
        with socket.create_connection(("127.0.0.1", served.port), timeout=20) as sent:
            sent.sendall(HEALTH * count)
            try:
                while received.count(b"HTTP/1.1 200") < count:
                    if not (piece := sent.recv(65536)):
                        break
                    received += piece
            except ConnectionError:
                pass
        return received.count(b"HTTP/1.1 200")

    with start(backend) as served:
        assert answers(served, PIPELINED) == PIPELINED
        assert answers(served, 500) <= PIPELINED + 1
        assert served.ask(method="GET", path="/health")[0] == 200
