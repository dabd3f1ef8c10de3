"""Reading or computing that takes too long is killed with its process, and there is a
new one afterwards.
"""

import base64
import errno
import io
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

import rfdlc
from rfdlc.serving.backend import Limits, open_backend

pytest.importorskip("fastapi", reason='server tests need pip install "rfdlc[serve]"')


def picture(side):
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(np.zeros((side, side), np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def worker(backend):
    from rfdlc.serving.workers import Worker

    worker = Worker(backend, Limits(), "digits", "1")
    yield worker
    worker.close()


def test_a_process_that_is_late_is_killed_and_replaced(worker, backend):
    from fastapi import HTTPException

    small = picture(8)
    assert worker.call("image", small, time.monotonic() + 20)["images"].shape == (
        1,
        1,
        8,
        8,
    )
    first = worker.child.process.pid
    large = base64.b64encode(picture(4900)).decode()
    body = f'{{"images": [{", ".join([f"{chr(34)}{large}{chr(34)}"] * 4)}]}}'.encode()
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        worker.call("json", body, began + 0.05)
    assert time.monotonic() - began < 1
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    assert worker.call("image", small, time.monotonic() + 20)["images"].shape == (
        1,
        1,
        8,
        8,
    )
    second = worker.child.process
    assert second.pid != first
    second.send_signal(signal.SIGKILL)
    second.wait()
    with pytest.raises(HTTPException, match="not valid JSON"):  # of another process
        worker.call("json", b"[", time.monotonic() + 20)
    with pytest.raises(TimeoutError):  # of a request that has waited too long already
        worker.call("image", small, time.monotonic() - 1)


def test_an_overdue_request_frees_its_place(start, backend):
    """The answer is a 503 in time, what it held is released, and others are
    answered.
    """
    large = base64.b64encode(picture(4900)).decode()
    with start(backend, Limits(seconds=1.5)) as served:
        image = {"Content_Type": "image/png"}
        while served.ask(picture(8), **image)[0] != 200:  # until a process has started
            pass
        began = time.monotonic()
        status, headers, _ = served.ask(
            {"images": [large] * 4, "utility": {"matrix": np.eye(10).tolist()}}
        )
        assert status in (200, 503)
        assert time.monotonic() - began < 5
        assert status == 200 or headers["retry-after"] == "1"
        assert served.ask(picture(8), **image)[0] in (200, 503)
        page = served.ask(path="/metrics", method="GET")[2]
        assert b"rfdlc_waiting_requests 0.0" in page


def test_a_process_imports_nothing_from_the_current_folder(
    worker, tmp_path, monkeypatch
):
    (tmp_path / "fastapi.py").write_text(
        "from pathlib import Path\nPath('ran').touch()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert worker.call("image", picture(8), time.monotonic() + 20)["images"].shape == (
        1,
        1,
        8,
        8,
    )
    assert not (tmp_path / "ran").exists()


def test_a_failure_of_ours_is_a_500_and_logged(
    start, backend, worker, monkeypatch, caplog
):
    """Not a 422, which says that the client is wrong; the process goes on."""
    from rfdlc.serving.workers import Worker

    small, deadline = picture(8), time.monotonic() + 20
    worker.call("image", small, deadline)
    first = worker.child.process.pid
    with pytest.raises(RuntimeError, match="KeyError"):
        worker.call("absent", small, deadline)
    assert worker.call("image", small, deadline)["images"].shape == (1, 1, 8, 8)
    assert worker.child.process.pid == first

    def broken(*_):
        raise RuntimeError("KeyError")

    monkeypatch.setattr(Worker, "starts", lambda self: False)
    monkeypatch.setattr(Worker, "call", broken)
    with start(backend) as served:
        assert served.ask(small, Content_Type="image/png")[0] == 500
    assert [record.getMessage() for record in caplog.records] == ["failure", "request"]


def test_large_answers_are_decided_and_written_in_a_process(
    start, backend, monkeypatch
):
    """With the same bytes as on the event loop, which is free meanwhile; what takes too
    long is killed.
    """
    from rfdlc.serving.backend import Answer
    from rfdlc.serving.workers import Worker

    rng, kinds, call = np.random.default_rng(0), [], Worker.call
    monkeypatch.setattr(Worker, "starts", lambda self: False)
    monkeypatch.setattr(
        Worker,
        "call",
        lambda self, kind, *given: kinds.append(kind) or call(self, kind, *given),
    )
    question = {"probabilities": rng.dirichlet(np.ones(10), 40).tolist()}
    utility = {
        "matrix": rng.normal(size=(10, 900)).tolist(),
        "actions": [f"a{i}" for i in range(900)],
    }
    wide = {**question, "utility": utility}
    tensor = {
        "name": "probabilities",
        "shape": [40, 10],
        "datatype": "FP64",
        "data": question["probabilities"],
    }
    asked = (
        (wide, "/decide?full=true"),
        (wide, "/decide"),
        ({"inputs": [tensor]}, "/v2/models/digits/infer"),
    )
    with start(backend) as served:
        found = []
        for limit in (10**9, 0):
            monkeypatch.setattr("rfdlc.serving.backend.SMALL", limit)
            found.append([served.ask(body, path) for body, path in asked])
    assert kinds.count("encode") == 3
    assert [each[2] for each in found[0]] == [each[2] for each in found[1]]
    assert {each[0] for each in found[0]} == {200}
    monkeypatch.undo()
    answer = Answer.of(backend.decider, np.full((256, 10), 0.1), np.zeros(256))
    assert answer.is_small(None, False)
    assert not answer.is_small(
        rfdlc.Utility(utility["matrix"], actions=utility["actions"]), False
    )


QUESTION = {"arrays": [[[[0] * 8] * 8]]}


def until(true, seconds=60):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_model_that_is_late_or_dies_is_loaded_again(
    start, run, file, samples, caplog
):
    """A stopped process stands for inference that does not end: requests get 503 at
    once until there is a new one.
    """
    from rfdlc.serving.workers import ModelProcess

    process = ModelProcess(file, None, None)
    with start(process.open(), Limits(seconds=2.0)) as served:
        ready = lambda: served.ask(path="/ready", method="GET")[0]  # noqa: E731
        right = served.ask({"arrays": samples.tolist()})
        with start(open_backend(file)) as beside:
            assert right[2] == beside.ask({"arrays": samples.tolist()})[2]
        first = process.child.process.pid
        os.kill(first, signal.SIGSTOP)
        answers = []
        asking = [
            threading.Thread(target=lambda: answers.append(served.ask(QUESTION)))
            for _ in range(5)
        ]
        began = time.monotonic()
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
        assert time.monotonic() - began < 3.5
        assert {(status, headers["retry-after"]) for status, headers, _ in answers} == {
            (503, "1")
        }
        until(lambda: ready() == 503)
        began = time.monotonic()
        assert served.ask(QUESTION)[0] == 503
        assert time.monotonic() - began < 0.5  # nobody waits for the model
        assert served.ask(path="/health", method="GET")[0] == 200
        until(lambda: ready() == 200)
        with pytest.raises(ProcessLookupError):
            os.kill(first, 0)
        assert served.ask({"arrays": samples.tolist()})[2] == right[2]
        process.child.process.kill()  # as for its memory
        until(lambda: served.ask(QUESTION)[0] == 200)
        assert (
            b"rfdlc_waiting_requests 0.0"
            in served.ask(path="/metrics", method="GET")[2]
        )
        last = process.child.process
    assert last.poll() is not None
    with pytest.raises(rfdlc.InputError, match="cannot be served"):
        ModelProcess(run / "config.json", None, None).open()


def test_a_process_that_cannot_be_started_is_tried_again(run, monkeypatch):
    """As where the machine has no memory for it: that must not end the attempts."""
    from rfdlc.serving import workers

    process = workers.ModelProcess(run, None, None)

    def fail(*given, **options):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(workers.subprocess, "Popen", fail)
    with pytest.raises(rfdlc.InputError, match="there may not be enough memory"):
        process.open()
    assert [process.start(), process.start()] == [False, False]
    process.close()


def test_batches_are_smaller_after_a_late_one(backend):
    import asyncio

    from rfdlc.serving.backend import Answer, Batcher, Unavailable

    sizes, fails = [], [True]

    class Process:
        kill = close = staticmethod(lambda: None)
        start = staticmethod(lambda: True)

        async def compute(self, samples):
            sizes.append(len(samples))
            if fails:
                fails.clear()
                raise Unavailable
            return np.full((len(samples), 10), 0.1), np.zeros(len(samples))

    async def work():
        batcher = Batcher(replace(backend, process=Process()), Limits(batch=8))
        for _ in range(3):
            while not batcher.available:
                await asyncio.sleep(0.01)
            asked = [batcher.submit(np.zeros((1, 2))) for _ in range(8)]
            yield [
                type(each)
                for each in await asyncio.gather(*asked, return_exceptions=True)
            ]
        await batcher.close()

    async def collect():
        return [kinds async for kinds in work()]

    first, *others = asyncio.run(collect())
    assert first == [Unavailable] * 8
    assert others == [[Answer] * 8] * 2
    assert sizes == [8, 4, 4, 6, 2]  # half, and one more after each that succeeds


@pytest.mark.usefixtures("quick_tables")
def test_the_first_large_request_imports_nothing(tmp_path, file):
    """Trees of many rows go through scikit-learn, which takes seconds to import."""
    rng = np.random.default_rng(0)
    lines = [
        f"{a:.3f},{'ill' if a + b > 0.5 else 'well'}"
        for a, b in rng.normal(size=(200, 2))
    ]
    (tmp_path / "rows.csv").write_text("\n".join(["age,kind", *lines]))
    options = {"data_options": {"target": "kind"}, "device": "cpu"}
    rfdlc.train(
        tmp_path / "rows.csv", "rf-dlc", tmp_path / "run", backbone="mixture", **options
    )
    code = """import sys
import numpy as np
from rfdlc.predicting.onnx_model import blank_sample
from rfdlc.serving.backend import Answer, Limits, open_backend
backend = open_backend(sys.argv[1], limits=Limits())
before = set(sys.modules)
for samples in (1, 40, 256):
    found = backend.compute(blank_sample(backend.inputs.input_shape, samples))
    Answer.of(backend.decider, *found).to_dict(True)
print(*sorted(set(sys.modules) - before))"""
    for model in (tmp_path / "run", file):
        done = subprocess.run(
            [sys.executable, "-c", code, str(model)],
            check=True,
            capture_output=True,
            text=True,
        )
        assert done.stdout.strip() == ""


def test_the_process_of_the_model_is_warm_before_it_is_ready(file, monkeypatch):
    from rfdlc.serving import backend, workers

    sizes, found = [], backend.OnnxModel.decide
    monkeypatch.setattr(
        backend.OnnxModel,
        "decide",
        lambda self, samples: sizes.append(len(samples)) or found(self, samples),
    )
    opened = backend.open_backend(file, None, None, None, Limits(samples=300))
    assert sizes == [1, 300]
    assert opened.name == file.name
    process = workers.ModelProcess(
        file, None, None, None, Limits(samples=300)
    )  # what a server starts, and restarts
    assert process.open().decider.utility.classes == opened.decider.utility.classes
    assert process.start()
    process.close()
