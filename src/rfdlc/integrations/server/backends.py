"""What is served: a run folder by torch, or an exported file by ONNX Runtime. Both give corrected probabilities."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.data.table import TableEncoder
from rfdlc.decide.decider import Decider
from rfdlc.decide.scores import Floats, softmax
from rfdlc.decide.uncertainty import mutual_information
from rfdlc.decide.utility import Utility
from rfdlc.errors import InputError
from rfdlc.integrations.onnx.model import OnnxModel

RULES = ("expected-utility", "cobb")  # both decide the same
Computed = tuple[Floats, Floats]  # corrected probabilities (N, C), mutual information (N,)


@dataclass(frozen=True)
class Backend:
    """A model ready to answer. `compute` takes raw samples (N, ...)."""

    name: str
    decider: Decider
    input_shape: tuple[int, ...]
    encoder: TableEncoder | None
    compute: Callable[[NDArray[Any]], Computed]
    centre: float = 1.0  # the part of an image's shorter side that is looked at

    @property
    def images(self) -> bool:
        """Whether a sample is an image."""
        return len(self.input_shape) == 3

    @property
    def files(self) -> bool:
        """Whether it takes image files, which become squares."""
        return self.images and self.input_shape[1] == self.input_shape[2]


def open_backend(path: str | Path, utility: Utility | None = None) -> Backend:
    """A run folder or a `.onnx` file, deciding by `utility` or by its own."""
    place = Path(path)
    if place.suffix == ".onnx":
        return _exported(OnnxModel.load(place), utility)
    if not place.is_dir():
        raise InputError(f"{path} cannot be served: expected a run folder, or a file that `rfdlc export` wrote (.onnx)")
    return _run(place, utility)


def _exported(model: OnnxModel, utility: Utility | None) -> Backend:
    def compute(inputs: NDArray[Any]) -> Computed:
        decided = model.decide(inputs)
        return decided.probabilities, decided.mutual_information

    decider = _with(model.decider, utility)
    return Backend(model.path.name, decider, model.input_shape, model.encoder, compute, model.centre)


def _run(path: Path, utility: Utility | None) -> Backend:
    try:
        from rfdlc.training.assembly import sensible_threads
        from rfdlc.training.model import Model
    except ImportError:
        raise InputError(
            'serving a run folder needs torch: pip install "rfdlc[train]", or serve an exported .onnx file'
        ) from None
    model = Model.load(path)
    decider = _with(model.decider, utility)

    def compute(inputs: NDArray[Any]) -> Computed:
        with sensible_threads(model.net, model.settings):
            predictions = model.predict(inputs)
        return np.asarray(decider.probabilities(predictions)), mutual_information(softmax(predictions.scores.values))

    return Backend(path.resolve().name, decider, model.input_shape, model.encoder, compute, model.centre)


def _with(decider: Decider, utility: Utility | None) -> Decider:
    if decider.rule not in RULES:
        raise InputError(f"the decider's rule is {decider.rule!r}: a server decides by expected utility alone")
    return decider if utility is None else decider.replace(utility=utility)
