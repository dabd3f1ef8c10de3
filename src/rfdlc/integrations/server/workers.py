"""Processes that read what clients send (images, large JSON): work that takes too long is killed, and ends for good."""

import os
import pickle
import subprocess
import sys
import time
import warnings
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fastapi import HTTPException

import rfdlc
from rfdlc.integrations.server.backend import Backend, Limits
from rfdlc.integrations.server.requests import Reader

MOST_MEMORY = 2**32  # bytes of address space that a process may take; a larger request gets 422
LATE, FAILED, TOO_MUCH = 0, 1, "the body needs more memory than a request may take"


class Worker:
    """One process, started when it is first needed and again after it was killed."""

    _pipe: Any  # a connection to the process
    _ready = False  # whether it has answered since it was started
    _known = False  # whether one has ever answered

    def __init__(self, backend: Backend, limits: Limits, name: str, version: str) -> None:
        known = {name: getattr(backend.inputs, name) for name in ("input_shape", "encoder", "resizing")}
        light = replace(backend, inputs=SimpleNamespace(**known), compute=None)  # type: ignore[arg-type]
        self._model = pickle.dumps((light, limits, name, version))
        self._process: subprocess.Popen[bytes] | None = None

    def call(self, kind: str, body: bytes, deadline: float) -> dict[str, Any]:
        """The question in a body; raises TimeoutError at the deadline, and kills the process that still reads it."""
        found: Any
        if time.monotonic() >= deadline:  # the request has been answered with 503
            raise TimeoutError
        try:
            if self._process is None or self._process.poll() is not None:
                self.start()
            if not self._ready:  # one that is still starting is not killed
                if not self._pipe.poll(deadline - time.monotonic()):
                    raise TimeoutError
                self._ready = self._known = bool(self._pipe.recv())
            self._pipe.send((kind, body, deadline - time.monotonic()))
            done = self._pipe.poll(max(0.0, deadline - time.monotonic()))
            status, found = self._pipe.recv() if done else (LATE, None)
        except TimeoutError:  # which is an OSError
            raise
        except (OSError, EOFError):  # the process was killed for its memory, crashed, or did not start
            status, found = (422, TOO_MUCH) if self._ready else (FAILED, "a process did not start")
            self.close()
        if status == LATE:
            if not done:
                self.close()
            raise TimeoutError
        if status == FAILED:
            raise RuntimeError(found)  # logged, and answered with 500
        if status != 200:
            raise HTTPException(status, found)
        return found

    def starts(self) -> bool:
        """Whether the first process is still starting: a server that has just begun reads in a thread meanwhile."""
        if self._process is None and not self._known:
            self.start()
        return not self._known and self._process is not None and not self._pipe.poll(0)

    def close(self) -> None:
        """End the process, whatever it does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._pipe.close()
            self._process = None

    def start(self) -> None:
        """Start the process; it is ready a little later."""
        self._ready = False
        self._pipe, child = Pipe()
        words = [sys.executable, "-P", "-c", f"from {__name__} import run; run({child.fileno()})"]
        known = [str(Path(rfdlc.__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        paths = os.pathsep.join(filter(None, known))  # never the current folder, which anybody may write to
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}  # no payload in a log
        self._process = subprocess.Popen(words, pass_fds=[child.fileno()], env=environment, **pipes)
        child.close()
        self._pipe.send_bytes(self._model)


def run(place: int) -> None:
    """Read bodies until the server ends; messages come from it alone."""
    import signal

    from rfdlc.integrations.server.inference import Inference

    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which still answers
    with suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    pipe = Connection(place)
    backend, limits, name, version = pickle.loads(pipe.recv_bytes())  # noqa: S301 - sent by the server
    reads = Inference(name, version, Reader(backend, limits)).reads
    with suppress(EOFError, OSError):
        pipe.send(True)
        while True:
            kind, body, seconds = pipe.recv()
            answer: tuple[int, Any]
            try:
                answer = 200, reads[kind](body, time.monotonic() + seconds)
            except HTTPException as error:
                answer = error.status_code, error.detail
            except TimeoutError:
                answer = LATE, None
            except MemoryError:
                answer = 422, TOO_MUCH
            except Exception as error:  # a failure of ours
                answer = FAILED, type(error).__name__
            del body
            pipe.send(answer)
