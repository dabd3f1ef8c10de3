"""A server under pressure: queue, time, tokens, hosts, and the end."""

import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest

import rfdlc
from rfdlc.cli import main
from rfdlc.serving import serve as serving
from rfdlc.serving.backend import Limits
from rfdlc.serving.serve import (
    HEADER_LINES,
    check_host,
    listen,
    read_token,
    serve,
)

pytest.importorskip("fastapi", reason='server tests need pip install "rfdlc[serve]"')

TOKEN = "0123456789abcdef-token"
QUESTION = {"arrays": [[[[0] * 8] * 8]]}


def in_threads(count, work):
    threads = [
        threading.Thread(target=work, args=(i,), daemon=True) for i in range(count)
    ]
    for thread in threads:
        thread.start()
    return threads


def test_a_full_queue_gives_429(start, by_hand):
    go, statuses = threading.Event(), []
    with start(by_hand(lambda: go.wait(10)), Limits(requests=3)) as served:
        waiting = in_threads(3, lambda _: statuses.append(served.ask(QUESTION)[0]))
        time.sleep(0.5)
        status, headers, body = served.ask(QUESTION)
        assert status == 429
        assert headers["retry-after"] == "1"
        assert b"waiting" in body
        assert served.ask(method="GET", path="/health")[0] == 200
        go.set()
        for thread in waiting:
            thread.join(10)
        assert statuses == [200, 200, 200]
        assert served.ask(QUESTION)[0] == 200


def test_bodies_that_are_given_up_count_as_held_until_they_are_dropped(
    start, backend, monkeypatch
):
    """A client that asks again and again after a 503 cannot fill the memory with bodies
    that are still read.
    """
    from rfdlc.serving.workers import Worker

    go, body = (
        threading.Event(),
        json.dumps({"arrays": QUESTION["arrays"] * 250}).encode(),
    )
    monkeypatch.setattr(Worker, "starts", lambda self: False)
    monkeypatch.setattr(Worker, "call", lambda *_: go.wait(10) or {})
    with start(backend, Limits(seconds=0.3, held=5 * len(body) // 2)) as served:
        assert [served.ask(body)[0] for _ in range(4)] == [503, 503, 429, 429]
        assert (
            b"rfdlc_waiting_requests 0.0"
            in served.ask(method="GET", path="/metrics")[2]
        )
        monkeypatch.undo()
        go.set()
        for _ in range(100):
            if (status := served.ask(body)[0]) != 429:
                break
            time.sleep(0.05)
        assert status in (200, 503)


def test_the_client_asks_again(start, by_hand):
    go = threading.Event()
    with start(by_hand(lambda: go.wait(10)), Limits(requests=1)) as served:
        waiting = in_threads(1, lambda _: served.ask(QUESTION))
        time.sleep(0.3)
        threading.Timer(0.5, go.set).start()
        assert rfdlc.Client(served.url).decide(arrays=QUESTION["arrays"])["action"]
        waiting[0].join(10)


def test_one_request_does_not_spoil_the_answers_of_others(
    start, by_hand, backend, samples
):
    from dataclasses import replace

    pauses = [0.5]  # so that the requests after the first wait, and become a batch
    held = by_hand(lambda: time.sleep(pauses.pop() if pauses else 0))

    def compute(inputs):
        if (inputs == 255).all(axis=(1, 2, 3)).any():
            raise rfdlc.InputError("too large")
        return held.compute(inputs)

    answers = {}
    bodies = [{"arrays": samples[i : i + 1].tolist()} for i in range(4)]
    bodies[2] = {"arrays": [[[[255] * 8] * 8]]}
    with start(replace(backend, compute=compute)) as served:

        def ask(i):
            time.sleep(0.1 * (i > 0))
            answers[i] = served.ask(bodies[i])

        for thread in in_threads(4, ask):
            thread.join(10)
        alone = [served.ask(body) for body in bodies]
    assert [answers[i][0] for i in range(4)] == [200, 200, 422, 200]
    assert [answers[i][2] for i in range(4)] == [answer for _, _, answer in alone]


def test_waiting_requests_become_one_batch(start, by_hand, backend):
    from dataclasses import replace

    go, sizes = threading.Event(), []
    slow = by_hand(lambda: go.wait(10))

    def compute(inputs):
        sizes.append(len(inputs))
        return slow.compute(inputs)

    with start(replace(backend, compute=compute), Limits(batch=6)) as served:
        waiting = in_threads(1, lambda _: served.ask(QUESTION))
        time.sleep(0.3)
        waiting += in_threads(8, lambda _: served.ask(QUESTION))
        time.sleep(0.5)
        go.set()
        for thread in waiting:
            thread.join(10)
    assert sizes == [1, 6, 2]


def test_an_answer_that_takes_too_long(start, by_hand):
    go = threading.Event()
    with start(by_hand(lambda: go.wait(10)), Limits(seconds=0.3)) as served:
        status, headers, _ = served.ask(QUESTION)
        go.set()
        assert (status, headers["retry-after"]) == (503, "1")
        assert served.ask(QUESTION)[0] == 200


def test_a_failure_is_a_500_that_tells_nothing_and_the_server_goes_on(
    start, by_hand, caplog
):
    failures = [RuntimeError("secret")]

    def fail_once():
        if failures:
            raise failures.pop()

    with start(by_hand(fail_once)) as served:
        status, _, body = served.ask(QUESTION)
        assert status == 500
        assert b"secret" not in body
        assert served.ask(QUESTION)[0] == 200
    assert "secret" not in caplog.text


def test_the_page_of_limits_has_their_defaults(pytestconfig):
    page = (pytestconfig.rootpath / "docs" / "limits.md").read_text()
    row = {
        line.split("|")[1].strip(): line.split("|")[2].strip()
        for line in page.splitlines()
        if line.startswith("| ")
    }
    limits = Limits()
    assert row["requests that are not answered yet"] == str(limits.requests)
    assert row["bodies in memory, of all requests"] == f"{limits.held >> 20} MiB"
    assert row["body"] == f"{limits.body >> 20} MiB"
    assert row["samples per request"] == str(limits.samples)
    assert row["samples computed together"] == str(limits.batch)
    millions = [
        f"{pixels // 10**6} million" for pixels in (limits.pixels, limits.total_pixels)
    ]
    assert row["pixels per image, per request"] == ", ".join(millions)
    assert row["actions of a utility in a request"].startswith(f"{limits.actions:,},")
    assert row["headers"] == f"{limits.headers >> 10} KiB"
    assert row["lines of headers"] == str(HEADER_LINES)
    for name in (
        "send a body",
        "answer",
        "compute a batch",
        "read an answer, and until the next request",
    ):
        assert row[f"time to {name}"] == f"{limits.seconds:g} s"
    assert row["idle connections"] == str(limits.connections)
    assert row["requests accepted after SIGTERM"] == f"for {limits.drain:g} s"


def raw(served, data, wait=3.0):
    with socket.create_connection(
        ("127.0.0.1", served.port), timeout=wait
    ) as connection:
        try:
            connection.sendall(data)
            return connection.recv(4096)
        except ConnectionError:
            return b""


def test_slow_and_endless_senders(start, backend):
    with start(backend, Limits(seconds=0.5)) as served:
        head = (
            b"POST /decide HTTP/1.1\r\nHost: localhost\r\nContent-Type:"
            b" application/json\r\n"
        )
        assert raw(served, head + b"Content-Length: 50\r\n\r\n{").startswith(
            b"HTTP/1.1 408"
        )
        assert raw(served, head) == b""  # headers that never end: closed
        assert raw(served, head + b"X: " + b"y" * 4_000_000) == b""
        assert raw(served, b"nonsense\r\n\r\n").startswith(b"HTTP/1.1 400")
        assert served.ask(method="GET", path="/health")[0] == 200


def test_tokens(start, backend, samples):
    with start(backend, token=TOKEN) as served:
        for wrong in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": TOKEN},
            {"Authorization": "Bearer \xff"},
        ):
            status, headers, _ = served.ask(QUESTION, **wrong)
            assert (status, headers["www-authenticate"]) == (401, "Bearer")
        for path in ("/metrics", "/openapi.json", "/docs"):
            assert served.ask(path=path, method="GET")[0] == 401
        assert served.ask(path="/health", method="GET")[0] == 200
        assert served.ask(path="/ready", method="GET")[::2] == (
            200,
            b'{"ready":true}',
        )  # without the model's name
        assert rfdlc.Client(served.url, token=TOKEN).decide(arrays=samples[:1])[
            "action"
        ]
        with pytest.raises(rfdlc.InputError, match="401"):
            rfdlc.Client(served.url, token="no").metrics()


@pytest.mark.parametrize("port", [-1, 65536, 99999])
def test_ports_out_of_range(port):
    with pytest.raises(rfdlc.InputError, match=f"port {port} is out of range"):
        listen("127.0.0.1", port)


def test_loopback_unless_there_is_a_token():
    for host in ("127.0.0.1", "::1", "localhost"):
        check_host(host, None)
    for host in ("0.0.0.0", "::", "192.168.1.4", "example.org"):
        check_host(host, TOKEN)
        with pytest.raises(rfdlc.InputError, match="--token-file"):
            check_host(host, None)


@pytest.mark.parametrize(
    "text", ["", "short", "with a space in the middle", "ümlaut-and-long-enough"]
)
def test_poor_tokens(tmp_path, text):
    (tmp_path / "token").write_text(text, encoding="utf-8")
    with pytest.raises(rfdlc.InputError, match="expected"):
        read_token(tmp_path / "token")


def command(*words):
    return [sys.executable, "-m", "rfdlc", "serve", *map(str, words)]


def test_bad_wishes_end_with_2(run, tmp_path, monkeypatch, capsys):
    for words in (
        [run, "--host", "0.0.0.0"],
        [tmp_path / "nothing"],
        [run, "--token-file", tmp_path / "none"],
    ):
        monkeypatch.setattr(sys, "argv", ["rfdlc", "serve", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        told = capsys.readouterr().err
        assert (ended.value.code, told.count("\n")) == (2, 1), told


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["1="], "--version '1': expected V=MODEL"),
        (["=model.onnx"], "--version 'model.onnx': expected V=MODEL"),
        (["1=model.onnx"], "--version 1 is there twice (MODEL is version 1)"),
        (["2=a.onnx", "2=b.onnx"], "--version 2 is there twice"),
    ],
)
def test_versions_have_a_name_and_a_model_each(
    run, monkeypatch, capsys, given, message
):
    words = [word for each in given for word in ("--version", each)]
    monkeypatch.setattr(sys, "argv", ["rfdlc", "serve", str(run), *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def ask_with_secrets(port):
    """Three requests whose words no log may repeat."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        body = b'{"arrays": "secret"}'
        head = (
            b"POST /decide?full=secret HTTP/1.1\r\nHost: [::1]:1\r\nX:"
            b" secret\r\nContent-Type: application/json\r\n"
        )
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        connection.recv(4096)
        connection.sendall(b"GET /secret HTTP/1.1\r\nHost: localhost\r\n\r\n")
        connection.recv(4096)
        utility = {"matrix": [[0.0]] * 10, "actions": ["a secret"]}
        body = json.dumps({"probabilities": [[0.1] * 10], "utility": utility}).encode()
        connection.sendall(
            head.replace(b"full=secret", b"")
            + b"Content-Length: %d\r\n\r\n" % len(body)
            + body
        )
        received = b""
        while b'"a secret"' not in received:
            received += connection.recv(4096)


def test_term_under_load_loses_nothing_and_logs_are_json_without_payloads(
    tmp_path,
):
    """Every accepted request is answered whole; what came too late gets no answer at
    all, never half of one.

    Nor do logs hold a client's words in warnings: of an action that is named almost
    like a class, for example.
    """
    digits = rfdlc.load("digits-lt").train
    data = {
        "x": digits.array,
        "y": digits.labels,
        "names": [*map(str, range(9)), "a secre"],
    }
    rfdlc.train(data, out=tmp_path / "run", epochs=1, device="cpu")
    process = subprocess.Popen(
        command(tmp_path / "run", "--port", "0"), stderr=subprocess.PIPE, text=True
    )
    texts = []
    try:
        for line in process.stderr:
            texts.append(line)
            if json.loads(line)["event"] == "ready":
                break
        drain = threading.Thread(
            target=lambda: texts.extend(process.stderr), daemon=True
        )
        drain.start()
        port = next(
            line["port"]
            for line in map(json.loads, texts)
            if line["event"] == "listening"
        )
        ask_with_secrets(port)
        whole, halves = [], []

        def ask_until_the_end(_):
            body, answer = json.dumps(QUESTION).encode(), b""
            head = (
                "POST /decide HTTP/1.1\r\nHost: [::1]\r\nContent-Type:"
                " application/json\r\n"
            )
            head += f"Content-Length: {len(body)}"
            try:
                connection = socket.create_connection(("127.0.0.1", port), timeout=10)
                while True:
                    connection.sendall(head.encode() + b"\r\n\r\n" + body)
                    answer = b""
                    while not answer.endswith(b"}"):
                        piece = connection.recv(65536)
                        if not piece:
                            halves.extend([answer] if answer else [])
                            return
                        answer += piece
                    (whole if answer.startswith(b"HTTP/1.1 200") else halves).append(
                        answer
                    )
            except OSError:
                halves.extend([answer] if answer else [])

        threads = in_threads(16, ask_until_the_end)
        end = time.monotonic() + 20
        while len(whole) < 100 and time.monotonic() < end:
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGTERM)
        for thread in threads:
            thread.join(20)
        process.wait(20)
        drain.join(10)
    finally:
        process.kill()
    assert "secret" not in "".join(texts)
    told = [json.loads(line) for line in texts]
    asked = [
        (line["path"], line["status"]) for line in told if line["event"] == "request"
    ]
    assert asked[:3] == [("/decide", 422), ("other", 404), ("/decide", 200)]
    assert set(asked[3:]) == {("/decide", 200)}
    stopped = next(line for line in told if line["event"] == "stopped")
    assert not halves
    assert len(whole) > 50
    assert (
        stopped["accepted"] == stopped["answered"] == len(whole) + 1
    )  # the others of the three are refused at once


@pytest.mark.skipif(
    shutil.which("openssl") is None, reason="openssl makes the certificate"
)
def test_tls_and_a_drain_phase_that_answers_new_connections(
    file, backend, tmp_path, monkeypatch
):
    """After SIGTERM /ready says no, so that a balancer looks elsewhere, and late
    requests are answered.
    """
    made = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    made += ["-keyout", "key.pem", "-out", "cert.pem", "-subj", "/CN=localhost"]
    made += ["-addext", "subjectAltName=DNS:localhost"]
    subprocess.run(made, cwd=tmp_path, check=True, capture_output=True)
    files = [
        "--tls-certificate",
        tmp_path / "cert.pem",
        "--tls-key",
        tmp_path / "key.pem",
    ]
    trusted = ssl.create_default_context(cafile=tmp_path / "cert.pem")
    process = subprocess.Popen(
        command(file, *files, "--drain", "2", "--port", "0"),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        port = json.loads(process.stderr.readline())["port"]
        assert json.loads(process.stderr.readline())["event"] == "ready"

        def ask(path, body=None):
            request = urllib.request.Request(f"https://localhost:{port}{path}", body)
            request.add_header("Content-Type", "application/json")
            try:
                return urllib.request.urlopen(
                    request, timeout=10, context=trusted
                ).status
            except urllib.error.HTTPError as error:
                return error.code

        assert ask("/ready") == 200
        process.terminate()
        time.sleep(0.3)
        assert ask("/ready") == 503
        assert ask("/health") == 200
        assert ask("/decide", json.dumps(QUESTION).encode()) == 200
        assert process.wait(20) == -signal.SIGTERM
    finally:
        process.kill()
        process.communicate()
    monkeypatch.setattr(
        serving, "_opened", lambda *given: {"1": backend}
    )  # without a process of the model
    with pytest.raises(rfdlc.InputError, match=r"key.pem: cannot be used for TLS"):
        serve(file, certificate=tmp_path / "key.pem")
    with pytest.raises(rfdlc.InputError, match="needs its certificate"):
        serve(file, key=tmp_path / "key.pem")
