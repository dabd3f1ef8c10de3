"""OnnxModel: an exported file made ready to decide, by ONNX Runtime alone: no torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.data.sources.arrays import as_inputs
from rfdlc.data.table import TableEncoder
from rfdlc.decide.classes import Indices
from rfdlc.decide.decider import Decider
from rfdlc.decide.rules import RULES
from rfdlc.decide.scores import Floats
from rfdlc.decide.utility import Utility
from rfdlc.errors import InputError
from rfdlc.integrations.onnx.sealed import read_sealed

METADATA_KEY = "rfdlc"
FORMAT, VERSION = "rfdlc-onnx", 1


@dataclass(frozen=True)
class Decisions:
    """What an exported graph says of N samples."""

    probabilities: Floats  # (N, C), calibrated and prior-corrected
    expected_utility: Floats  # (N, A)
    action: Indices  # (N,)
    uncertainty: Floats  # (N,) entropy over log C
    mutual_information: Floats  # (N,) in nats


class OnnxModel:
    """A sealed ONNX file. `decider` is the one that is inside the graph, for scores that come from elsewhere."""

    def __init__(self, session: Any, metadata: Mapping[str, Any], path: Path) -> None:
        self.path, self.metadata, self._session = path, metadata, session
        self.decider = Decider.from_dict(metadata["decider"])
        self.classes, self.utility = self.decider.utility.classes, self.decider.utility
        self.input_shape = tuple(int(side) for side in metadata["input_shape"])
        self.centre = float(metadata.get("centre", 1))  # the part of an image's shorter side that training looked at
        self.resize, self.utility_input = bool(metadata["resize"]), bool(metadata["utility_input"])
        self.encoder = TableEncoder.from_dict(metadata["encoder"]) if metadata.get("encoder") else None

    @classmethod
    def load(cls, path: str | Path) -> "OnnxModel":
        """Refuses a file that was changed, and one whose metadata does not describe its graph."""
        data = read_sealed(path)
        session = _session(data, path)
        text = session.get_modelmeta().custom_metadata_map.get(METADATA_KEY)
        try:
            metadata = json.loads(text or "")
            if (metadata["format"], metadata["version"]) != (FORMAT, VERSION):
                raise ValueError(f"format {metadata['format']!r}, version {metadata['version']!r}")
            model = cls(session, metadata, Path(path))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path}: the metadata are not those of an export of this version ({error})") from None
        model._check_shapes()
        return model

    def decide(self, inputs: Any, utility: Utility | None = None) -> Decisions:
        """Of raw samples (N, ...): uint8 images, float features, or rows of a table as {column: cells}."""
        samples = self.read(inputs)
        chosen = self.utility if utility is None else utility.with_classes(self.classes)
        feed = {"inputs": samples}
        if self.utility_input:
            feed["utility"] = chosen.matrix.astype(np.float32)
        probabilities, expected, action, uncertainty, disagreement = self._session.run(None, feed)
        wrong = np.flatnonzero(~np.isfinite(probabilities).all(axis=1))
        if len(wrong):
            raise InputError(
                f"sample {wrong[0]} holds numbers too large to compute with: "
                "give numbers of the size of the training data"
            )
        if utility is not None and not self.utility_input:
            expected = probabilities @ chosen.matrix.astype(probabilities.dtype)
            action = RULES["expected-utility"].actions(chosen, probabilities)
        return Decisions(probabilities, expected, action, uncertainty, disagreement)

    def read(self, inputs: Any) -> NDArray[Any]:
        """Samples as the graph takes them."""
        if self.encoder is not None and isinstance(inputs, Mapping):
            inputs = self.encoder.transform(inputs)
        array, images = np.asarray(inputs), len(self.input_shape) == 3
        fits = array.shape[1:2] == self.input_shape[:1] if self.resize else array.shape[1:] == self.input_shape
        if array.ndim != 1 + len(self.input_shape) or not fits or not len(array):
            expected = (self.input_shape[0], "H", "W") if self.resize else self.input_shape
            raise InputError(f"samples have shape {array.shape}: expected (N, {', '.join(map(str, expected))})")
        if images and array.dtype != np.uint8:
            raise InputError(f"images are {array.dtype}: expected uint8, from 0 to 255")
        return array if images else as_inputs("samples", array)

    def _check_shapes(self) -> None:
        """What the metadata claim, against the graph."""
        graph = {value.name: value.shape for value in (*self._session.get_inputs(), *self._session.get_outputs())}
        claimed: dict[str, list[int]] = {
            "inputs": list(self.input_shape[: 1 if self.resize else None]),
            "probabilities": [len(self.classes)],
            "expected_utility": [] if self.utility_input else [len(self.utility.actions)],
        }
        for name, shape in claimed.items():
            found = graph.get(name, [])[1 : 1 + len(shape)]
            if found != shape:
                raise InputError(f"{self.path}: the metadata say {shape} for {name!r}, but the graph has {found}")
        if ("utility" in graph) != self.utility_input:
            raise InputError(f"{self.path}: the metadata and the graph differ in whether the utility is an input")


def _session(data: bytes, path: str | Path) -> Any:
    try:
        import onnxruntime
    except ImportError:
        raise InputError('reading ONNX files needs onnxruntime: pip install "rfdlc[export]"') from None
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # idle threads leave the cores to others
    try:
        return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime has exceptions of its own for each thing that can be wrong
        raise InputError(f"{path}: ONNX Runtime cannot read the graph ({type(error).__name__})") from None
