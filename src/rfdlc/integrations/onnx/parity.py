"""Parity: an exported graph against the model it came from, on the run's own test samples or on random ones.

Deep networks amplify rounding: two right answers in 32 bits may differ by more than the tolerance. Where they do, the
same weights in 64 bits give the exact answer, and the graph must be about as near to it as the library is.
"""

from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rfdlc.data.images import ImageFiles
from rfdlc.data.load import load
from rfdlc.data.loader import Normaliser
from rfdlc.decide.predictions import Predictions
from rfdlc.errors import InputError, expect
from rfdlc.integrations.onnx.model import Decisions
from rfdlc.training.model import Model
from rfdlc.training.run import Run

SAMPLES = 500
BATCH = 50  # samples: large images of many particles need much memory
TOLERANCE = 1e-5  # between probabilities, in 32 bits
ROUNDINGS = 4  # times the model's own rounding: two right orders of summation differ by about 2
EXACT_SAMPLES = 20  # those that differ most, computed in 64 bits
TIE = 1e-4  # of the utility's range: two actions this close are a tie, which rounding may decide
RECORDED_AGREEMENT = 0.95  # with predictions.npz, which a GPU may have computed in 16 bits


@dataclass(frozen=True)
class Rounding:
    """How far probabilities in 32 bits, of the graph and of the model itself, are from those in 64."""

    graph: float
    model: float

    @property
    def allowed(self) -> float:
        """How far the graph may be, given the model's own rounding."""
        return max(TOLERANCE, ROUNDINGS * self.model)

    def __str__(self) -> str:
        return f"; from 64 bits the graph differs by {self.graph:.2g}, the model itself by {self.model:.2g}"


@dataclass(frozen=True)
class Parity:
    """The distance of the exported graph from the library over `samples` samples."""

    samples: int
    inputs: str  # "test samples" or "random samples"
    largest_difference: float  # between probabilities
    decisions_changed: int  # ties aside
    ties: int
    recorded_agreement: float | None = None  # fraction of decisions equal to those of predictions.npz
    rounding: Rounding | None = None  # measured where 32 bits differ from 32 bits by more than the tolerance

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)

    def check(self, run: Any) -> None:
        """Refuse an export in 32 bits that is not the model of the run."""
        rounding, agreement = self.rounding, self.recorded_agreement
        near = self.largest_difference <= TOLERANCE if rounding is None else rounding.graph <= rounding.allowed
        expect(
            near and not self.decisions_changed,
            f"the exported graph is not the model in {run}: over {self.samples} {self.inputs} "
            f"{self.decisions_changed} decisions differ and probabilities by up to {self.largest_difference:.2g} "
            f"(allowed {TOLERANCE:g}){rounding or ''}; nothing was written",
        )
        expect(
            agreement is None or agreement >= RECORDED_AGREEMENT,
            f"only {agreement or 0:.1%} of the decisions equal those in {run}/predictions.npz: weights, decider or "
            "data have changed since; nothing was written",
        )


def measure_parity(model: Model, decide: Callable[[NDArray[Any]], Decisions], *, full: bool = True) -> Parity:
    """Compare `decide` with the model's own predictions and Decider; `full` if it computes in 32 bits too."""
    decider, (inputs, recorded) = model.decider, _samples(model)
    predictions = model.predict(inputs)
    expected = np.asarray(decider.probabilities(predictions))
    decided = [decide(some) for some in np.array_split(inputs, -(-len(inputs) // BATCH))]
    probabilities = np.concatenate([batch.probabilities for batch in decided])
    actions = np.concatenate([batch.action for batch in decided])
    finite = np.isfinite(probabilities).all()
    expect(finite, "the exported graph gives numbers that are not finite: export it in 32 bits")
    values = np.sort(decider.expected_utility(predictions), axis=1)
    spread = max(float(np.ptp(decider.utility.matrix)), 1e-12)
    tied = (values[:, -1] - values[:, -2:].min(axis=1) < TIE * spread) & (values.shape[1] > 1)
    changed = (actions != decider.decide(predictions)) & ~tied
    agreement = None if recorded is None else float((decider.decide(recorded) == actions).mean())
    differences, rounding = np.abs(probabilities - expected).max(axis=1), None
    if full and differences.max() > TOLERANCE:
        worst = np.argsort(-differences)[:EXACT_SAMPLES]
        rounding = measure_rounding(model, inputs[worst], probabilities[worst], expected[worst])
    kind, largest = "random samples" if recorded is None else "test samples", float(differences.max())
    return Parity(len(inputs), kind, largest, int(changed.sum()), int(tied.sum()), agreement, rounding)


def measure_rounding(model: Model, inputs: NDArray[Any], graph: NDArray[Any], own: NDArray[Any]) -> Rounding:
    """The graph's answers and the model's own, probabilities (N, C), against what the same weights give in 64 bits."""
    net = deepcopy(model.net).to("cpu", torch.float64).eval()
    normalise = Normaliser(model.normalisation, model.input_shape, torch.device("cpu"), torch.float64)
    samples = normalise(torch.from_numpy(np.ascontiguousarray(inputs)).to(torch.float32))
    with torch.no_grad():
        exact = np.asarray(model.decider.probabilities(net(samples.unsqueeze(0))[0].numpy(), logits=True))
    return Rounding(*(float(np.abs(answer - exact).max()) for answer in (graph, own)))


def _samples(model: Model) -> tuple[NDArray[Any], Predictions | None]:
    """Test samples with the predictions that the run recorded, if both can be read; else random samples."""
    with suppress(InputError, KeyError, OSError):  # the data are not on this machine
        recorded, table = Predictions.load(model.path / "predictions.npz"), Run(model.path).metadata["data"]
        test = load(table["source"], root=table.get("root"), **table.get("options", {})).splits["test"]
        if len(test) == len(recorded):
            first = np.arange(min(SAMPLES, len(test)))
            few = Predictions(logits=recorded.scores.values[:, first], classes=recorded.classes)
            inputs = test.take(first).inputs
            return inputs.decode(model.centre)[0] if isinstance(inputs, ImageFiles) else inputs, few
    return random_samples(model, SAMPLES), None


def random_samples(model: Model, count: int, seed: int = 0) -> NDArray[Any]:
    """uint8 images, or features around the training mean."""
    rng = np.random.default_rng(seed)
    if len(model.input_shape) == 3:
        return rng.integers(0, 256, (count, *model.input_shape), dtype=np.uint8)
    known = model.normalisation
    mean, spread = (0.0, 1.0) if known is None else (np.array(known.mean), np.array(known.std))
    return (rng.normal(size=(count, *model.input_shape)) * spread + mean).astype(np.float32)
