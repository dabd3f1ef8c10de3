"""Processes of the server: readers of bodies, which also write large answers, and the
model.

What takes too long is killed with them.
"""

import asyncio
import gc
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fastapi import HTTPException
from numpy.typing import NDArray

import rfdlc
from rfdlc.errors import InputError, end_with_parent
from rfdlc.imports import import_own, known_here
from rfdlc.serving.backend import Backend, Limits, Unavailable, open_backend
from rfdlc.serving.requests import Reader

MOST_MEMORY = (
    2**32
)  # bytes of address space that a reader may take; a larger request gets 422
LATE, FAILED, INVALID, TOO_MUCH = (
    0,
    1,
    2,
    "the body needs more memory than a request may take",
)
NICE = 5  # of readers: what one large request costs must not keep small ones waiting
LOADING = 300.0  # seconds, to load a model again
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class Child:
    """A process that does some work (`run`), and the pipe to it."""

    pipe: Any

    def __init__(self, work: str, given: Any, environment: dict[str, str]) -> None:
        self._work, self._given, self._environment = (
            work,
            pickle.dumps(given),
            environment,
        )
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Start the process; it is ready a little later."""
        self.pipe, child = Pipe()
        given = f"{self._work!r}, {child.fileno()}, {known_here()!r}"
        words = [
            sys.executable,
            "-P",
            "-c",
            f"from {__name__} import run; run({given})",
        ]
        known = [
            str(Path(rfdlc.__file__).parents[1]),
            *os.environ.get("PYTHONPATH", "").split(os.pathsep),
        ]
        paths = os.pathsep.join(
            filter(None, known)
        )  # never the current folder, which anybody may write to
        environment = {**os.environ, "PYTHONPATH": paths, **self._environment}
        pipes: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "stderr": subprocess.DEVNULL,
        }  # no payload in a log
        self.process = subprocess.Popen(
            words, pass_fds=[child.fileno()], env=environment, **pipes
        )
        child.close()
        self.pipe.send_bytes(self._given)

    def kill(self) -> None:
        """End the process, whatever it does; from any thread."""
        if self.process is not None:
            self.process.kill()

    def close(self) -> None:
        """End the process, and wait until it has."""
        if self.process is not None:
            self.kill()
            self.process.wait()
            self.pipe.close()
            self.process = None


class Worker:
    """A reader of bodies, in a process that is started when it is first needed and
    again after it was killed.
    """

    _ready = False  # whether the process has answered since it was started
    _known = False  # whether one has ever answered

    def __init__(
        self, backend: Backend, limits: Limits, name: str, version: str
    ) -> None:
        self.child = Child(
            "read", (lightened(backend), limits, name, version), ONE_THREAD
        )
        self.close = self.child.close

    def call(self, kind: str, given: Any, deadline: float) -> Any:
        """The question in a body, or an answer as JSON; raises TimeoutError at the
        deadline, and kills the process.
        """
        found: Any
        child = self.child
        if time.monotonic() >= deadline:  # the request has been answered with 503
            raise TimeoutError
        try:
            if not child.alive:
                self.start()
            if not self._ready:  # one that is still starting is not killed
                if not child.pipe.poll(deadline - time.monotonic()):
                    raise TimeoutError
                self._ready = self._known = bool(child.pipe.recv())
            child.pipe.send((kind, given, deadline - time.monotonic()))
            done = child.pipe.poll(max(0.0, deadline - time.monotonic()))
            status, found = child.pipe.recv() if done else (LATE, None)
        except TimeoutError:  # which is an OSError
            raise
        except (
            OSError,
            EOFError,
        ):  # the process was killed for its memory, crashed, or did not start
            status, found = (
                (422, TOO_MUCH) if self._ready else (FAILED, "a process did not start")
            )
            child.close()
        if status == LATE:
            if not done:
                child.close()
            raise TimeoutError
        if status == INVALID:
            raise InputError("the samples or the utility cannot be used")
        if status == FAILED:
            raise RuntimeError(found)  # logged, and answered with 500
        if status != 200:
            raise HTTPException(status, found)
        return found

    def starts(self) -> bool:
        """Whether the first process is still starting: a server that has just begun
        reads in a thread meanwhile.
        """
        if self.child.process is None and not self._known:
            self.start()
        return (
            not self._known
            and self.child.process is not None
            and not self.child.pipe.poll(0)
        )

    def start(self) -> None:
        """Start the process; it is ready a little later."""
        self._ready = False
        self.child.start()


class ModelProcess:
    """The model, in a process of its own: it can be killed while it computes, and is
    loaded again.
    """

    def __init__(self, path: str | Path, *decided_by: Any) -> None:
        """`decided_by` as of `open_backend`: the utility, the target prior, the decider
        and the limits.
        """
        self.child = Child("compute", (Path(path).absolute(), *decided_by), {})
        self.kill = self.child.kill
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = (
            None  # of the event loop
        )

    def open(self) -> Backend:
        """Load the model; raises what is wrong with it, and repeats warnings."""
        try:
            self.child.start()
            found = self.child.pipe.recv()
        except (OSError, EOFError):
            found = InputError(
                "the process of the model ended while it loaded: there may not be"
                " enough memory"
            )
        if isinstance(found, InputError):
            self.close()
            raise found
        backend, told = found
        for message in told:
            warnings.warn(message, stacklevel=2)
        return replace(backend, process=self)

    def start(self) -> bool:
        """Load the model again, in a new process; False where that fails."""
        self.child.close()
        with suppress(
            OSError, EOFError
        ):  # also of a machine without memory for a new process
            self.child.start()
            return self.child.pipe.poll(LOADING) and not isinstance(
                self.child.pipe.recv(), InputError
            )
        return False

    async def compute(self, samples: NDArray[Any]) -> Any:
        """`Backend.compute`; raises `Unavailable` where the process has ended."""
        try:
            if self._streams is None:
                end = socket.socket(fileno=os.dup(self.child.pipe.fileno()))
                self._streams = await asyncio.open_unix_connection(sock=end)
            reader, writer = self._streams
            content = pickle.dumps(samples, 5)
            size = len(content)
            head = (
                struct.pack("!i", size)
                if size < 2**31
                else struct.pack("!iQ", -1, size)
            )  # as `Connection` does
            writer.writelines((head, content))
            await writer.drain()
            (size,) = struct.unpack("!i", await reader.readexactly(4))
            found = pickle.loads(await reader.readexactly(size))  # noqa: S301 - sent by our own process
        except (OSError, EOFError):
            self._disconnect()
            raise Unavailable from None
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        """End the process, and wait until it has."""
        self._disconnect()
        self.child.close()

    def _disconnect(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


def lightened(backend: Backend) -> Backend:
    """What readers need of a model."""
    known = {
        name: getattr(backend.inputs, name)
        for name in ("input_shape", "encoder", "resizing")
    }
    return replace(backend, inputs=SimpleNamespace(**known), compute=None, process=None)  # type: ignore[arg-type]


def run(work: str, place: int, imports: Sequence[str] = ()) -> None:
    """In a process: `read` or `compute` until the server ends. Messages come from it
    alone.
    """
    warnings.simplefilter("ignore")
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # they are for the server, which still answers
        signal.signal(number, signal.SIG_IGN)
    end_with_parent("")
    import_own(imports)
    with suppress(EOFError, OSError):
        {"read": read, "compute": compute}[work](Connection(place))


def compute(pipe: Any) -> None:
    """Load the model and compute batches."""
    given = pickle.loads(pipe.recv_bytes())  # noqa: S301 - sent by the server
    try:
        with warnings.catch_warnings(record=True, action="always") as told:
            backend = open_backend(*given)
    except InputError as error:
        pipe.send(error)
        return
    gc.freeze()
    pipe.send((lightened(backend), [str(each.message) for each in told]))
    while True:
        samples: NDArray[Any] = pipe.recv()
        found: Any
        try:
            found = backend.compute(samples)
        except InputError as error:
            found = error
        except (
            Exception
        ) as error:  # a failure of ours; what it says may quote the request
            found = RuntimeError(type(error).__name__)
        pipe.send(found)


def read(pipe: Any) -> None:
    """Read bodies and write large answers, after what other requests need of the
    processors.
    """
    from rfdlc.serving.inference import Inference

    with suppress(AttributeError, OSError):
        os.nice(NICE)
    with suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    backend, limits, name, version = pickle.loads(pipe.recv_bytes())  # noqa: S301 - sent by the server
    work = Inference(name, version, Reader(backend, limits)).work
    pipe.send(True)
    while True:
        kind, given, seconds = pipe.recv()
        answer: tuple[int, Any]
        try:
            answer = 200, work[kind](given, time.monotonic() + seconds)
        except HTTPException as error:
            answer = error.status_code, error.detail
        except TimeoutError:
            answer = LATE, None
        except MemoryError:
            answer = 422, TOO_MUCH
        except InputError:
            answer = INVALID, None
        except Exception as error:  # a failure of ours
            answer = FAILED, type(error).__name__
        del given
        pipe.send(answer)
