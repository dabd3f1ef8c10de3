"""The served model (a run folder or an exported file), its limits, its answers, and the
batches they are made in.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rfdlc.decisions.decider import Decider, chosen_decider
from rfdlc.decisions.utility import Utility
from rfdlc.errors import InputError, expect
from rfdlc.monitoring.feedback import revised
from rfdlc.predicting.onnx_model import OnnxModel, blank_sample, check_rule
from rfdlc.probabilities.priors import PriorLike
from rfdlc.probabilities.scores import Floats
from rfdlc.probabilities.uncertainty import (
    entropy,
    mutual_information,
    particle_probabilities,
)

DIGITS = 7  # after the decimal point, in answers
PAUSE = 1.0  # seconds between attempts to load a model again
DECIDED_INLINE = (
    2**15
    # samples x (classes + actions) of a batch that is decided on the event loop, in a
    # millisecond
)
SMALL = (
    2**13
    # cells of the tables of an answer that is written on the event loop, in a
    # millisecond
)
CHECKED = 50  # cells: what it costs to check an action of a utility
MONTH = 1_000_000  # decisions of a month, for the rate of false alarms
# of the event loop before a batch is formed, so that requests that have arrived are
# read first
TURNS = 3
Batch = list[
    tuple["asyncio.Future[Answer]", NDArray[Any]]
]  # samples of requests and their answers
LOGGER = logging.getLogger("rfdlc.serve")


@dataclass(frozen=True)
class Limits:
    """Bounds on what clients may send, hold and wait for."""

    requests: int = 256  # accepted and not answered yet; more get 429
    batch: int = 128  # samples computed together
    samples: int = 256  # per request
    actions: int = 1000  # of a utility in a request, where the model has fewer classes
    body: int = 2**24  # bytes per request
    held: int = 2**28  # bytes of all bodies in memory; more get 429
    pixels: int = 25_000_000  # per image, checked before it is decoded
    total_pixels: int = 100_000_000  # of all images of a request
    headers: int = 32_768  # bytes
    connections: int = 512  # idle ones; the one that has been idle longest is closed
    seconds: float = 10.0  # to send a request, to answer it, and to read the answer
    # seconds after SIGTERM in which /ready says no and requests are still accepted
    drain: float = 1.0

    def together(self, shape: tuple[int, ...]) -> int:
        """As many samples of this shape as are computed at once, of large images as
        many as they have pixels.

        >>> Limits().together((40,)), Limits().together((3, 1000, 1000))
        (256, 100)
        """
        images = (
            self.total_pixels // int(np.prod(shape[1:]))
            if len(shape) == 3
            else self.samples
        )
        return max(1, min(max(self.batch, self.samples), images))


class Process(Protocol):
    """A process with a model, which is ended when it takes too long."""

    def start(self) -> bool:
        """Start it, and wait for the model; False if it could not be loaded."""

    async def compute(self, samples: NDArray[Any]) -> Any:
        """What `Backend.compute` gives."""

    def kill(self) -> None:
        """End it at once."""

    def close(self) -> None:
        """End it, and what belongs to it."""


@dataclass(frozen=True)
class Backend:
    """A loaded model. `compute` maps raw samples (N, ...) to probabilities, mutual
    information, and what is strange.

    A decider that was taken up later revises the probabilities: log p_new = a log p +
    b.
    """

    name: str
    # InputSpec or OnnxModel: the shape of samples, and how images and rows become them
    inputs: Any
    decider: Decider
    compute: Callable[
        [NDArray[Any]], tuple[Floats, Floats, Any]
    ]  # corrected (N, C); (N,); unfamiliar (N,) or None
    process: Process | None = None  # where it computes; None: a thread of this process
    revision: tuple[float, Floats] | None = None  # a and b


class Unavailable(Exception):
    """The model cannot compute now: the request gets 503, and may be sent again."""


def open_backend(
    path: str | Path,
    utility: Utility | None = None,
    target_prior: PriorLike | None = None,
    decider: Decider | None = None,
    limits: Limits | None = None,
) -> Backend:
    """Load a run folder or a `.onnx` file, and check by one inference that it computes
    finite probabilities.

    With `limits` it also computes as many samples as they allow at once. Some models go
    another way for many rows, whose modules take seconds to import: no request should
    wait for these.
    """
    place = Path(path)
    exported = place.suffix == ".onnx"
    expected = (
        f"{path} cannot be served: expected a run folder, or a .onnx file written by"
        " `rfdlc export`"
    )
    expect(exported or place.is_dir(), expected)
    baked = (
        "an exported graph holds the prior that it decides for: export it again with"
        " --target-prior"
    )
    expect(target_prior is None or not exported, baked)
    try:
        if not exported:
            from rfdlc.training.building import sensible_threads
            from rfdlc.training.model import Model
    except ImportError:
        message = (
            'serving a run folder needs torch: pip install "rfdlc[train]", or serve an'
            " exported .onnx file"
        )
        raise InputError(message) from None
    model: Any = OnnxModel.load(place) if exported else Model.load(place)
    chosen, inputs = (
        chosen_decider(model.decider, utility, target_prior, decider),
        model if exported else model.inputs,
    )
    check_rule(chosen)

    def compute(samples: NDArray[Any]) -> tuple[Floats, Floats, Any]:
        if exported:
            decided = model.decide(samples)
            return decided.probabilities, decided.mutual_information, decided.unfamiliar
        with (
            sensible_threads(model.net, model.config)
            if model.embedding is None
            else nullcontext()
        ):
            predictions = model.predict(samples)
        probabilities = chosen.model(predictions)
        p = probabilities.array()
        strange = None
        if chosen.deferral.unfamiliar is not None:
            strange = chosen.deferral.flags(probabilities, p)
        return (
            p,
            mutual_information(particle_probabilities(predictions.scores.values, True)),
            strange,
        )

    finite = False
    with suppress(InputError):  # of scores that hold NaN
        for samples in sorted(
            {1, 1 if limits is None else limits.together(inputs.input_shape)}
        ):
            blank = blank_sample(inputs.input_shape, samples)
            finite = bool(np.isfinite(compute(blank)[0]).all())
    expect(
        finite,
        f"{path} cannot be served: its probabilities are not finite; train or export"
        " the model again",
    )
    return Backend(place.resolve().name, inputs, chosen, compute)


@dataclass(frozen=True)
class Answer:
    """Decisions for n samples, and what they were made from. Columns are made once per
    batch, then sliced.
    """

    decider: Decider
    probabilities: Floats  # (n, C), calibrated and corrected
    disagreement: Floats  # (n,) mutual information; NaN of one particle
    unfamiliar: Any  # (n,) which samples are, or None
    columns: dict[str, list[Any]]  # one entry per sample each

    @classmethod
    def of(
        cls,
        decider: Decider,
        probabilities: Floats,
        disagreement: Floats,
        unfamiliar: Any = None,
    ) -> "Answer":
        explained, names = (
            decider.explain_probabilities(probabilities, unfamiliar),
            decider.utility.classes.names,
        )
        columns: dict[str, list[Any]] = {
            "action": [explained.actions[i] for i in explained.action.tolist()],
            "expected_utility": _listed(explained.value),
            "reason": explained.reason.tolist(),
            "argmax": [names[i] for i in explained.argmax.tolist()],
            "probability": _listed(explained.probability),
            "uncertainty": _listed(entropy(probabilities, normalised=True)),
        }
        if not np.isnan(disagreement).any():
            columns["mutual_information"] = _listed(disagreement)
        if explained.sets is not None:
            columns["set"] = [
                list(decider.utility.classes.select(np.flatnonzero(each)))
                for each in explained.sets
            ]
        return cls(decider, probabilities, disagreement, unfamiliar, columns)

    def rows(self, rows: slice) -> "Answer":
        """The answer for some of the samples."""
        columns = {name: values[rows] for name, values in self.columns.items()}
        strange = None if self.unfamiliar is None else self.unfamiliar[rows]
        return Answer(
            self.decider,
            self.probabilities[rows],
            self.disagreement[rows],
            strange,
            columns,
        )

    def by(self, utility: Utility | None) -> "Answer":
        """The same samples decided for another utility; a budget is for the one that it
        was fitted with.
        """
        if utility is None:
            return self
        decider = self.decider.replace(utility=utility, budget=None)
        return Answer.of(
            decider, self.probabilities, self.disagreement, self.unfamiliar
        )

    def is_small(self, utility: Utility | None, full: bool) -> bool:
        """Whether it is decided for another utility and written within a millisecond or
        so.
        """
        classes, actions = (utility or self.decider.utility).matrix.shape
        written = len(self.probabilities) * (classes + actions) * full
        return (
            written
            + (
                0
                if utility is None
                else actions * (CHECKED + len(self.probabilities) // 4)
            )
            <= SMALL
        )

    def to_dict(self, full: bool) -> dict[str, Any]:
        """Ready for JSON; `full` adds the tables that were decided from."""
        if not full:
            return self.columns
        utility, expected = (
            self.decider.utility,
            self.probabilities @ self.decider.utility.matrix,
        )
        tables = {
            "probabilities": _listed(self.probabilities),
            "expected_utilities": _listed(expected),
        }
        return {
            **self.columns,
            "classes": utility.classes.names,
            "actions": utility.actions,
            **tables,
        }


def _listed(values: Floats) -> Any:
    return np.round(values.astype(np.float64), DIGITS).tolist()


class Batcher:
    """One batch is computed at a time; requests that wait become the next. No request
    waits for a batch to fill.

    A batch that is late is ended with the model's process, all requests get 503 until a
    new process has loaded the model, and the next batches are smaller.
    """

    def __init__(self, backend: Backend, limits: Limits) -> None:
        self.backend, self.limits, self.largest = backend, limits, limits.batch
        self.waiting: dict[
            asyncio.Future[Answer], NDArray[Any]
        ] = {}  # samples by the future of their answer
        self.available = True  # whether there is a model to compute with
        self._ends = False
        self._thread = ThreadPoolExecutor(1, "compute")
        self._task = asyncio.create_task(self._work())  # ends whenever nothing waits

    async def close(self) -> None:
        """Compute what is waiting, then end."""
        self._ends, process = True, self.backend.process
        if process is not None and not self.available:
            process.kill()  # nobody waits for one that starts
        await self._task
        self._thread.shutdown()
        if process is not None:
            process.close()

    async def submit(self, inputs: NDArray[Any]) -> Answer:
        """The answer for samples (n, ...). A request that is cancelled is dropped from
        the queue.
        """
        if not self.available:
            raise Unavailable
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.waiting[answer] = inputs
        if self._task.done():
            self._task = asyncio.create_task(self._work())
        try:
            return await answer
        finally:
            self.waiting.pop(answer, None)

    async def _work(self) -> None:
        """Compute batches while requests wait: as many as fit; one that is larger than
        a batch is computed alone.
        """
        while True:
            for _ in range(TURNS):
                await asyncio.sleep(0)
            batch: Batch = []
            size = 0
            for answer, inputs in list(self.waiting.items()):
                size += len(inputs)
                if batch and size > self.largest:
                    break
                batch.append((answer, self.waiting.pop(answer)))
            if not batch:
                return
            await self._answer(batch)

    async def _answer(self, batch: Batch) -> None:
        """All together; if that fails, one by one, so that one request cannot fail the
        others.
        """
        backend, loop = self.backend, asyncio.get_running_loop()
        joined = (
            np.concatenate([x for _, x in batch]) if len(batch) > 1 else batch[0][1]
        )
        late = (
            None
            if backend.process is None
            else loop.call_later(self.limits.seconds, backend.process.kill)
        )
        try:
            computed, start = await self._computed(backend, joined), 0
        except Unavailable:
            await self._restart(batch)
            return
        except Exception as error:  # the request fails, the server goes on
            for each in batch if len(batch) > 1 else ():
                await self._answer([each])
            if not batch[0][0].done():
                batch[0][0].set_exception(error)
            return
        finally:
            if late is not None:
                late.cancel()
        self.largest = min(
            self.largest + 1, self.limits.batch
        )  # after a late batch they grow again
        for answer, inputs in batch:
            if not answer.done():
                answer.set_result(computed.rows(slice(start, start + len(inputs))))
            start += len(inputs)

    async def _computed(self, backend: Backend, samples: NDArray[Any]) -> Answer:
        """A hop to a thread and back costs a request a tenth of its time: small answers
        are made here.
        """
        run, process = asyncio.get_running_loop().run_in_executor, backend.process
        found = await (
            run(self._thread, backend.compute, samples)
            if process is None
            else process.compute(samples)
        )
        p, utility = found[0], backend.decider.utility
        given = (
            backend.decider,
            p if backend.revision is None else revised(p, *backend.revision),
            *found[1:],
        )
        small = len(p) * (len(utility.classes) + len(utility.actions)) <= DECIDED_INLINE
        return (
            Answer.of(*given) if small else await run(self._thread, Answer.of, *given)
        )

    async def _restart(self, batch: Batch) -> None:
        """Refuse all requests until a new process has loaded the model."""
        process, began = self.backend.process, time.monotonic()
        assert process is not None
        self.available = False
        if len(batch) > 1:
            self.largest = max(1, sum(len(inputs) for _, inputs in batch) // 2)
        for answer in (*(answer for answer, _ in batch), *self.waiting):
            if not answer.done():
                answer.set_exception(Unavailable())
        self.waiting.clear()
        LOGGER.error(
            "restarting",
            extra={
                "fields": {
                    "reason": "a batch was late, or the model's process has ended"
                }
            },
        )
        run = asyncio.get_running_loop().run_in_executor
        while not self._ends and not await run(self._thread, process.start):
            await asyncio.sleep(PAUSE)
        self.available = not self._ends
        LOGGER.info(
            "restarted",
            extra={"fields": {"seconds": round(time.monotonic() - began, 1)}},
        )
