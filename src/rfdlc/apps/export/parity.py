"""Parity: an exported graph against the model it came from, on the run's own test samples or on random ones."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.data.dataset import Split
from rfdlc.data.images import ImageFiles
from rfdlc.data.load import load
from rfdlc.decide.predictions import Predictions
from rfdlc.decide.utility import Utility
from rfdlc.errors import InputError
from rfdlc.learn.model import Model
from rfdlc.learn.run import Run

SAMPLES = 500
TOLERANCE = 1e-5  # between probabilities, in 32 bits
TIE = 1e-4  # of the utility's range: two actions this close are a tie, which rounding may decide
RECORDED_AGREEMENT = 0.95  # with predictions.npz, which a GPU may have computed in 16 bits

Answer = Callable[[NDArray[Any]], tuple[NDArray[Any], NDArray[Any]]]  # samples -> probabilities, actions


@dataclass(frozen=True)
class Parity:
    """How far the exported graph is from the library, over `samples` samples."""

    samples: int
    inputs: str  # "test samples" or "random samples"
    largest_difference: float  # between probabilities
    decisions_changed: int  # ties aside
    ties: int
    recorded_agreement: float | None = None  # share of decisions equal to those of predictions.npz

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


def measure(model: Model, utility: Utility, answer: Answer) -> Parity:
    """Compare `answer` with the model's own predictions and Decider."""
    inputs, recorded = _samples(model)
    decider = model.decider.with_utility(utility)
    predictions = model.predict(inputs)
    expected = np.asarray(decider.probabilities(predictions))
    values = np.sort(decider.expected_utility(predictions), axis=1)
    probabilities, actions = answer(inputs)
    if not np.isfinite(probabilities).all():
        raise InputError("the exported graph gives numbers that are not finite: export it in 32 bits")
    scale = max(float(np.ptp(utility.matrix)), 1e-12)
    tied = values[:, -1] - values[:, -2] < TIE * scale if values.shape[1] > 1 else np.zeros(len(values), bool)
    changed = (actions != decider.decide(predictions)) & ~tied
    agreement = None if recorded is None else float((decider.decide(recorded) == actions).mean())
    kind = "random samples" if recorded is None else "test samples"
    difference = float(np.abs(probabilities - expected).max())
    return Parity(len(inputs), kind, difference, int(changed.sum()), int(tied.sum()), agreement)


def refuse_unequal(parity: Parity, run: Any) -> None:
    """An export in 32 bits must be the model that it came from."""
    if parity.decisions_changed or parity.largest_difference > TOLERANCE:
        raise InputError(
            f"the exported graph is not the model in {run}: over {parity.samples} {parity.inputs} "
            f"{parity.decisions_changed} decisions differ and probabilities by up to {parity.largest_difference:.2g} "
            f"(allowed {TOLERANCE:g}); nothing was written"
        )
    if parity.recorded_agreement is not None and parity.recorded_agreement < RECORDED_AGREEMENT:
        raise InputError(
            f"only {parity.recorded_agreement:.1%} of the decisions equal those in {run}/predictions.npz: weights, "
            "decider or data are others than when it was written; nothing was written"
        )


def _samples(model: Model) -> tuple[NDArray[Any], Predictions | None]:
    """Test samples with what the run recorded of them, where both can be read; else random samples."""
    found = _recorded(model)
    return found if found is not None else (random_samples(model, SAMPLES), None)


def _recorded(model: Model) -> tuple[NDArray[Any], Predictions] | None:
    if model.path is None or not (model.path / "predictions.npz").exists():
        return None
    table = Run(model.path).config["data"]
    if "source" not in table:
        return None
    try:
        test = load(table["source"], root=table.get("root"), **table.get("options", {})).splits.get("test")
        recorded = Predictions.load(model.path / "predictions.npz")
    except InputError:
        return None  # the data are not on this machine: random samples do
    if test is None or len(test) != len(recorded):
        return None
    first = np.arange(min(SAMPLES, len(test)))
    some = Predictions(logits=recorded.scores.values[:, first], classes=recorded.classes)
    return _decoded(test.take(first), model.centre), some


def _decoded(split: Split, centre: float) -> NDArray[Any]:
    return split.inputs.decode(centre)[0] if isinstance(split.inputs, ImageFiles) else split.array


def random_samples(model: Model, count: int, seed: int = 0) -> NDArray[Any]:
    """Bytes for images; features around the training mean."""
    rng = np.random.default_rng(seed)
    if len(model.input_shape) == 3:
        return rng.integers(0, 256, (count, *model.input_shape), dtype=np.uint8)
    known = model.normalisation
    mean, spread = (0.0, 1.0) if known is None else (np.array(known.mean), np.array(known.std))
    return (rng.normal(size=(count, *model.input_shape)) * spread + mean).astype(np.float32)
