"""The served model (a run folder or an exported file) and the answers that are made from its probabilities."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.data.table import TableEncoder
from rfdlc.decide.classes import Indices
from rfdlc.decide.decider import Decider
from rfdlc.decide.priors import PriorLike
from rfdlc.decide.scores import Floats, softmax
from rfdlc.decide.uncertainty import entropy, mutual_information
from rfdlc.decide.utility import Utility
from rfdlc.errors import InputError, expect
from rfdlc.integrations.onnx.model import OnnxModel

RULES = ("expected-utility", "cobb")  # both choose the same action
DIGITS = 7  # after the decimal point, in answers


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


@dataclass(frozen=True)
class Answer:
    """Decisions for n samples, and what they were made from. Columns are made once per batch, then sliced."""

    decider: Decider
    probabilities: Floats  # (n, C)
    disagreement: Floats  # (n,)
    action: Indices  # (n,)
    uncertainty: Floats  # (n,)
    columns: dict[str, list[Any]]  # one entry per sample each

    @classmethod
    def of(cls, decider: Decider, probabilities: Floats, disagreement: Floats) -> "Answer":
        """Decide from corrected probabilities (n, C) and mutual information (n,)."""
        explained, unsure = decider.explain_probabilities(probabilities), entropy(probabilities, normalised=True)
        names = decider.utility.classes.names
        columns = {
            "action": [explained.actions[i] for i in explained.action.tolist()],
            "expected_utility": _listed(explained.value),
            "argmax": [names[i] for i in explained.argmax.tolist()],
            "probability": _listed(explained.probability),
            "uncertainty": _listed(unsure),
            "mutual_information": _listed(disagreement),
        }
        return cls(decider, probabilities, disagreement, explained.action, unsure, columns)

    def rows(self, rows: slice) -> "Answer":
        """The answer for some of the samples."""
        columns = {name: values[rows] for name, values in self.columns.items()}
        arrays = (self.probabilities[rows], self.disagreement[rows], self.action[rows], self.uncertainty[rows])
        return Answer(self.decider, *arrays, columns)

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


def open_backend(path: str | Path, utility: Utility | None = None, target_prior: PriorLike | None = None) -> Backend:
    """Load a run folder or a `.onnx` file, and check by one inference that it computes finite probabilities."""
    place = Path(path)
    exported = place.suffix == ".onnx"
    expected = f"{path} cannot be served: expected a run folder, or a .onnx file written by `rfdlc export`"
    expect(exported or place.is_dir(), expected)
    baked = "an exported graph holds the prior that it decides for: export it again with --target-prior"
    expect(target_prior is None or not exported, baked)
    model, compute = _open_exported(place) if exported else _open_run(place, target_prior)
    decider = model.decider if utility is None else model.decider.replace(utility=utility)
    expect(decider.rule in RULES, f"the decider's rule is {decider.rule!r}: a server decides by expected utility only")
    backend = Backend(place.resolve().name, decider, model.input_shape, model.encoder, compute, model.centre)
    sample = np.zeros((1, *backend.input_shape), np.uint8 if backend.images else np.float32)
    finite = np.isfinite(backend.compute(sample)[0]).all()
    expect(finite, f"{path} cannot be served: its probabilities are not finite; train or export the model again")
    return backend


def _open_exported(path: Path) -> tuple[Any, Callable[[NDArray[Any]], tuple[Floats, Floats]]]:
    model = OnnxModel.load(path)

    def compute(inputs: NDArray[Any]) -> tuple[Floats, Floats]:
        decided = model.decide(inputs)
        return decided.probabilities, decided.mutual_information

    return model, compute


def _open_run(
    path: Path, target_prior: PriorLike | None
) -> tuple[Any, Callable[[NDArray[Any]], tuple[Floats, Floats]]]:
    try:
        from rfdlc.training.assembly import sensible_threads
        from rfdlc.training.model import Model
    except ImportError:
        message = 'serving a run folder needs torch: pip install "rfdlc[train]", or serve an exported .onnx file'
        raise InputError(message) from None
    model = Model.load(path)
    if target_prior is not None:
        model.decider = model.decider.replace(target_prior=target_prior)

    def compute(inputs: NDArray[Any]) -> tuple[Floats, Floats]:
        with sensible_threads(model.net, model.config):
            predictions = model.predict(inputs)
        probabilities = np.asarray(model.decider.probabilities(predictions))
        return probabilities, mutual_information(softmax(predictions.scores.values))

    return model, compute


def _listed(values: Floats) -> list[Any]:
    listed: list[Any] = np.round(values.astype(np.float64), DIGITS).tolist()
    return listed
