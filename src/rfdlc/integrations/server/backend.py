"""The served model (a run folder or an exported file), the answers made from its probabilities, and their batches."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.data.table import TableEncoder
from rfdlc.decide.decider import Decider
from rfdlc.decide.priors import PriorLike
from rfdlc.decide.scores import Floats, softmax
from rfdlc.decide.uncertainty import entropy, mutual_information
from rfdlc.decide.utility import Utility
from rfdlc.errors import InputError, expect
from rfdlc.integrations.onnx.model import OnnxModel, check_rule

DIGITS = 7  # after the decimal point, in answers
TURNS = 3  # of the event loop before a batch is formed, so that requests that have arrived are read first

Batch = list[tuple["asyncio.Future[Answer]", NDArray[Any]]]  # samples of requests and their answers


@dataclass(frozen=True)
class Backend:
    """A loaded model. `compute` maps raw samples (N, ...) to corrected probabilities (N, C) and mutual information."""

    name: str
    decider: Decider
    input_shape: tuple[int, ...]
    encoder: TableEncoder | None
    compute: Callable[[NDArray[Any]], tuple[Floats, Floats]]
    centre: float = 1.0  # fraction of an image's shorter side that is kept

    @property
    def images(self) -> bool:
        """Whether a sample is an image."""
        return len(self.input_shape) == 3

    @property
    def files(self) -> bool:
        """Whether it accepts image files, which are resized to squares."""
        return self.images and self.input_shape[1] == self.input_shape[2]


def open_backend(path: str | Path, utility: Utility | None = None, target_prior: PriorLike | None = None) -> Backend:
    """Load a run folder or a `.onnx` file, and check by one inference that it computes finite probabilities."""
    place = Path(path)
    exported = place.suffix == ".onnx"
    expected = f"{path} cannot be served: expected a run folder, or a .onnx file written by `rfdlc export`"
    expect(exported or place.is_dir(), expected)
    baked = "an exported graph holds the prior that it decides for: export it again with --target-prior"
    expect(target_prior is None or not exported, baked)
    if exported:
        model: Any = OnnxModel.load(place)
    else:
        try:
            from rfdlc.training.assembly import sensible_threads
            from rfdlc.training.model import Model
        except ImportError:
            message = 'serving a run folder needs torch: pip install "rfdlc[train]", or serve an exported .onnx file'
            raise InputError(message) from None
        model = Model.load(place)
    if target_prior is not None:
        model.decider = model.decider.replace(target_prior=target_prior)

    def compute(samples: NDArray[Any]) -> tuple[Floats, Floats]:
        if exported:
            decided = model.decide(samples)
            return decided.probabilities, decided.mutual_information
        with sensible_threads(model.net, model.config):
            predictions = model.predict(samples)
        probabilities = np.asarray(model.decider.probabilities(predictions))
        return probabilities, mutual_information(softmax(predictions.scores.values))

    decider = model.decider.replace(utility=utility)
    check_rule(decider)
    sample = np.zeros((1, *model.input_shape), np.uint8 if len(model.input_shape) == 3 else np.float32)
    finite = np.isfinite(compute(sample)[0]).all()
    expect(finite, f"{path} cannot be served: its probabilities are not finite; train or export the model again")
    return Backend(place.resolve().name, decider, model.input_shape, model.encoder, compute, model.centre)


@dataclass(frozen=True)
class Answer:
    """Decisions for n samples, and what they were made from. Columns are made once per batch, then sliced."""

    decider: Decider
    probabilities: Floats  # (n, C)
    disagreement: Floats  # (n,)
    columns: dict[str, list[Any]]  # one entry per sample each

    @classmethod
    def of(cls, decider: Decider, probabilities: Floats, disagreement: Floats) -> "Answer":
        """Decide from corrected probabilities (n, C) and mutual information (n,)."""
        explained, names = decider.explain_probabilities(probabilities), decider.utility.classes.names
        columns = {
            "action": [explained.actions[i] for i in explained.action.tolist()],
            "expected_utility": _listed(explained.value),
            "argmax": [names[i] for i in explained.argmax.tolist()],
            "probability": _listed(explained.probability),
            "uncertainty": _listed(entropy(probabilities, normalised=True)),
            "mutual_information": _listed(disagreement),
        }
        return cls(decider, probabilities, disagreement, columns)

    def rows(self, rows: slice) -> "Answer":
        """The answer for some of the samples."""
        columns = {name: values[rows] for name, values in self.columns.items()}
        return Answer(self.decider, self.probabilities[rows], self.disagreement[rows], columns)

    def to_dict(self, full: bool) -> dict[str, Any]:
        """Ready for JSON; `full` adds the tables that were decided from."""
        if not full:
            return self.columns
        utility = self.decider.utility
        return self.columns | {
            "classes": list(utility.classes.names),
            "probabilities": _listed(self.probabilities),
            "actions": list(utility.actions),
            "expected_utilities": _listed(self.probabilities @ utility.matrix),
        }


def _listed(values: Floats) -> list[Any]:
    listed: list[Any] = np.round(values.astype(np.float64), DIGITS).tolist()
    return listed


class Batcher:
    """Requests that wait while a batch is computed become the next batch. No request waits for a batch to fill.

    One thread computes, the event loop collects. How much may wait is bounded by the middleware.
    """

    def __init__(self, backend: Backend, largest: int) -> None:
        self.backend, self.largest = backend, largest
        self.waiting: dict[asyncio.Future[Answer], NDArray[Any]] = {}  # samples by the future of their answer
        self._thread = ThreadPoolExecutor(1, "compute")
        self._task = asyncio.create_task(self._work())  # ends whenever nothing waits

    async def close(self) -> None:
        """Compute what is waiting, then end."""
        await self._task
        self._thread.shutdown()

    async def submit(self, inputs: NDArray[Any]) -> Answer:
        """The answer for samples (n, ...). A request that is cancelled is dropped from the queue."""
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.waiting[answer] = inputs
        if self._task.done():
            self._task = asyncio.create_task(self._work())
        try:
            return await answer
        finally:
            self.waiting.pop(answer, None)

    async def _work(self) -> None:
        """Compute batches while requests wait: as many as fit; one that is larger than a batch is computed alone."""
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
        """All together; if that fails, one by one, so that one request cannot fail the others."""
        joined, decider, compute = np.concatenate([x for _, x in batch]), self.backend.decider, self.backend.compute
        computing = self._thread.submit(lambda: Answer.of(decider, *compute(joined)))
        try:
            computed = await asyncio.wrap_future(computing)
        except Exception as error:  # the request fails, the server goes on
            for each in batch if len(batch) > 1 else ():
                await self._answer([each])
            if not batch[0][0].done():
                batch[0][0].set_exception(error)
            return
        start = 0
        for answer, inputs in batch:
            if not answer.done():
                answer.set_result(computed.rows(slice(start, start + len(inputs))))
            start += len(inputs)
