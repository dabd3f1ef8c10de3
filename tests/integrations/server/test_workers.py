"""Reading that takes too long is killed with its process, and the next request gets a new one."""

import base64
import io
import os
import signal
import time

import numpy as np
import pytest

from rfdlc.integrations.server.backend import Limits

pytest.importorskip("fastapi", reason='server tests need pip install "rfdlc[serve]"')


def picture(side):
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(np.zeros((side, side), np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def worker(backend):
    from rfdlc.integrations.server.workers import Worker

    worker = Worker(backend, Limits(), "digits", "1")
    yield worker
    worker.close()


def test_a_process_that_is_late_is_killed_and_replaced(worker, backend):
    from fastapi import HTTPException

    small = picture(8)
    assert worker.call("image", small, time.monotonic() + 20)["images"].shape == (1, 1, 8, 8)
    first = worker._process.pid
    large = base64.b64encode(picture(4900)).decode()
    body = f'{{"images": [{", ".join([f"{chr(34)}{large}{chr(34)}"] * 4)}]}}'.encode()
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        worker.call("json", body, began + 0.05)
    assert time.monotonic() - began < 1
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    assert worker.call("image", small, time.monotonic() + 20)["images"].shape == (1, 1, 8, 8)
    second = worker._process
    assert second.pid != first
    second.send_signal(signal.SIGKILL)
    second.wait()
    with pytest.raises(HTTPException, match="not valid JSON"):  # of another process
        worker.call("json", b"[", time.monotonic() + 20)
    with pytest.raises(TimeoutError):  # of a request that has waited too long already
        worker.call("image", small, time.monotonic() - 1)


def test_an_overdue_request_frees_its_place(start, backend):
    """The answer is a 503 in time, what it held is released, and others are answered."""
    large = base64.b64encode(picture(4900)).decode()
    with start(backend, Limits(seconds=1.5)) as served:
        image = {"Content_Type": "image/png"}
        while served.ask(picture(8), **image)[0] != 200:  # until a process has started
            pass
        began = time.monotonic()
        status, headers, _ = served.ask({"images": [large] * 4, "utility": {"matrix": np.eye(10).tolist()}})
        assert status in (200, 503)
        assert time.monotonic() - began < 5
        assert status == 200 or headers["retry-after"] == "1"
        assert served.ask(picture(8), **image)[0] in (200, 503)
        page = served.ask(path="/metrics", method="GET")[2]
        assert b"rfdlc_waiting_requests 0.0" in page


def test_a_process_imports_nothing_from_the_current_folder(worker, tmp_path, monkeypatch):
    (tmp_path / "fastapi.py").write_text("from pathlib import Path\nPath('ran').touch()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert worker.call("image", picture(8), time.monotonic() + 20)["images"].shape == (1, 1, 8, 8)
    assert not (tmp_path / "ran").exists()


def test_a_failure_of_ours_is_a_500_and_logged(start, backend, worker, monkeypatch, caplog):
    """Not a 422, which says that the client is wrong; the process goes on."""
    from rfdlc.integrations.server.workers import Worker

    small, deadline = picture(8), time.monotonic() + 20
    worker.call("image", small, deadline)
    first = worker._process.pid
    with pytest.raises(RuntimeError, match="KeyError"):
        worker.call("absent", small, deadline)
    assert worker.call("image", small, deadline)["images"].shape == (1, 1, 8, 8)
    assert worker._process.pid == first

    def broken(*_):
        raise RuntimeError("KeyError")

    monkeypatch.setattr(Worker, "starts", lambda self: False)
    monkeypatch.setattr(Worker, "call", broken)
    with start(backend) as served:
        assert served.ask(small, Content_Type="image/png")[0] == 500
    assert [record.getMessage() for record in caplog.records] == ["failure", "request"]
