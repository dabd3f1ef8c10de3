"""OnnxModel: an exported file, run by ONNX Runtime without torch, and the checks that a file must pass."""

import hashlib
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
from rfdlc.decide.scores import Floats
from rfdlc.decide.utility import Utility
from rfdlc.errors import InputError

METADATA_KEY, CHECKSUM_KEY = "rfdlc", b"rfdlc.sha256"
FORMAT, VERSION, READABLE = "rfdlc-onnx", 2, (1, 2)  # since 2 the utility is centred, and an input of 64 bits
OUTPUTS = ("probabilities", "expected_utility", "action", "uncertainty", "mutual_information")
TOLERANCE = 1e-3  # of the utility's range, between what the graph computes and what its metadata say
DIGEST_LENGTH = 64
# The fields of ONNX messages that hold further messages, down to tensors.
MESSAGES = {
    "model": {7: "graph", 25: "function"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
}
EXTERNAL_DATA, DATA_LOCATION = 13, 14  # fields of a tensor
FIXED_SIZES = {1: 8, 5: 4}  # bytes of the wire types of protobuf that have a fixed size


@dataclass(frozen=True)
class Decisions:
    """The outputs of an exported graph for N samples."""

    probabilities: Floats  # (N, C), calibrated and prior-corrected
    expected_utility: Floats  # (N, A)
    action: Indices  # (N,)
    uncertainty: Floats  # (N,) entropy over log C
    mutual_information: Floats  # (N,) in nats


class OnnxModel:
    """A model that `rfdlc export` wrote as ONNX; it needs onnxruntime and no torch.

    Attributes
    ----------
    decider : Decider
        The Decider inside the graph, for scores from elsewhere.
    classes : Classes
        The classes of the model.
    utility : Utility
        The utility that the graph decides by.
    input_shape : tuple of int
        The shape of one sample.
    encoder : TableEncoder or None
        Encodes the rows of a table, if the model was trained on one.

    Examples
    --------
    >>> model = OnnxModel.load("model.onnx")  # doctest: +SKIP
    >>> decided = model.decide(images)  # doctest: +SKIP
    >>> [model.utility.actions[a] for a in decided.action]  # doctest: +SKIP
    """

    def __init__(self, session: Any, metadata: Mapping[str, Any], path: Path) -> None:
        self.path, self.metadata, self._session = path, metadata, session
        self.decider = Decider.from_dict(metadata["decider"])
        self.classes, self.utility = self.decider.utility.classes, self.decider.utility
        self.input_shape = tuple(int(side) for side in metadata["input_shape"])
        self.centre = float(metadata.get("centre", 1))  # fraction of an image's shorter side that training looked at
        self.resize, self.utility_input = bool(metadata["resize"]), bool(metadata["utility_input"])
        self.encoder = TableEncoder.from_dict(metadata["encoder"]) if metadata.get("encoder") else None

    @classmethod
    def load(cls, path: str | Path) -> "OnnxModel":
        """Read a file and check it.

        Parameters
        ----------
        path : str or Path
            A `.onnx` file written by `rfdlc.export`.

        Returns
        -------
        OnnxModel
            The model, ready to decide.

        Raises
        ------
        InputError
            If the file was changed, refers to external data, or has metadata that do not describe its graph.
        """
        data = _checked(path)
        session = _session(data, path)
        text = session.get_modelmeta().custom_metadata_map.get(METADATA_KEY)
        try:
            metadata = json.loads(text or "")
            if metadata["format"] != FORMAT or metadata["version"] not in READABLE:
                raise ValueError(f"format {metadata['format']!r}, version {metadata['version']!r}")
            model = cls(session, metadata, Path(path))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(f"{path}: the metadata are not those of an export of this version ({error})") from None
        model._check_graph()
        return model

    def decide(self, inputs: Any, utility: Utility | None = None) -> Decisions:
        """Decide raw samples.

        Parameters
        ----------
        inputs : array-like of shape (N, ...) or mapping
            uint8 images, float features, or rows of a table as `{column: cells}`.
        utility : Utility, optional
            Another utility than the graph's.

        Returns
        -------
        Decisions
            Probabilities, expected utilities, actions and uncertainty of the N samples.
        """
        chosen = self.utility if utility is None else utility.with_classes(self.classes)
        decided = self._run(self.read(inputs), chosen)
        wrong = np.flatnonzero(~np.isfinite(decided.probabilities).all(axis=1))
        if len(wrong):
            raise InputError(
                f"sample {wrong[0]} holds numbers too large to compute with: expected numbers like the training data's"
            )
        outdated = self.utility_input and self.metadata["version"] == 1  # its graph decides in 32 bits
        if not outdated and (utility is None or self.utility_input):
            return decided
        probabilities = decided.probabilities
        action = self.decider.replace(utility=chosen).decide_probabilities(probabilities)
        rest = (probabilities @ chosen.matrix, action, decided.uncertainty, decided.mutual_information)
        return Decisions(probabilities, *rest)

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

    def _run(self, samples: NDArray[Any], utility: Utility) -> Decisions:
        feed = {"inputs": samples}
        if self.utility_input:
            feed["utility"] = utility.matrix.astype(np.float32 if self.metadata["version"] == 1 else np.float64)
        return Decisions(*self._session.run(list(OUTPUTS), feed))

    def _check_graph(self) -> None:
        """Names, types and shapes of the graph, and one inference, against the metadata."""
        classes, images, number = len(self.classes), len(self.input_shape) == 3, "tensor(float)"
        claimed: dict[str, tuple[str, list[Any]]] = {
            "inputs": ("tensor(uint8)" if images else number, list(self.input_shape[: 1 if self.resize else None])),
            "probabilities": (number, [classes]),
            "expected_utility": (number, [] if self.utility_input else [len(self.utility.actions)]),
            "action": ("tensor(int64)", []),
            "uncertainty": (number, []),
            "mutual_information": (number, []),
        }
        graph = {value.name: value for value in (*self._session.get_inputs(), *self._session.get_outputs())}
        if self.utility_input:
            claimed["utility"] = (number if self.metadata["version"] == 1 else "tensor(double)", [])
        if graph.keys() != claimed.keys():
            raise InputError(f"{self.path}: the metadata say {sorted(claimed)}, but the graph has {sorted(graph)}")
        for name, (kind, shape) in claimed.items():
            found = (graph[name].type, graph[name].shape[1 : 1 + len(shape)])
            if found != (kind, shape):
                raise InputError(
                    f"{self.path}: the metadata say {kind} {shape} for {name!r}, but the graph has {found}"
                )
        decided = self._run(np.zeros((1, *self.input_shape), np.uint8 if images else np.float32), self.utility)
        expected, scale = decided.probabilities @ self.utility.matrix, np.abs(self.utility.matrix).max()
        if not np.abs(decided.expected_utility - expected).max() <= TOLERANCE * max(scale, 1e-30):
            raise InputError(f"{self.path}: the graph does not decide by the utility of its metadata, or is not finite")


def with_checksum(data: bytes) -> bytes:
    """A serialised model, followed by the SHA-256 of its bytes.

    A protobuf message may be followed by further fields: the checksum is one more metadata entry, so that any ONNX
    runtime reads the file, and damage is found without parsing anything. It does not prove who wrote the file.
    """
    return data + _checksum_entry(hashlib.sha256(data).hexdigest())


def _checksum_entry(digest: str) -> bytes:
    def field(number: int, content: bytes) -> bytes:  # the length fits one byte
        return bytes([number << 3 | 2, len(content)]) + content

    return field(14, field(1, CHECKSUM_KEY) + field(2, digest.encode()))  # ModelProto.metadata_props


CHECKSUM_LENGTH = len(_checksum_entry("0" * DIGEST_LENGTH))


def _checked(path: str | Path) -> bytes:
    """The bytes of a file whose checksum is right and that holds all of its data."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    body, entry = data[:-CHECKSUM_LENGTH], data[-CHECKSUM_LENGTH:]
    if entry[:-DIGEST_LENGTH] != _checksum_entry("0" * DIGEST_LENGTH)[:-DIGEST_LENGTH]:
        raise InputError(
            f"{path} has no checksum of rfdlc at its end: it is cut off, was saved by another tool, or is not an "
            "export of rfdlc; write it with `rfdlc export RUN model.onnx`"
        )
    if entry != _checksum_entry(hashlib.sha256(body).hexdigest()):
        raise InputError(
            f"{path} was changed after it was exported (its SHA-256 differs): it is damaged or was edited; "
            "export it again from its run folder"
        )
    try:
        external = _has_external_data(memoryview(data))
    except (IndexError, KeyError, RecursionError):
        raise InputError(f"{path}: the file is not a valid ONNX model; export it again from its run folder") from None
    if external:
        raise InputError(f"{path} takes weights from other files, which its checksum does not cover: export it again")
    return data


def _has_external_data(message: memoryview, kind: str = "model") -> bool:
    """Whether a tensor anywhere in a serialised ONNX message is stored outside of it."""
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = message[position]
            position, value, shift = position + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while position < len(message):
        number, wire = divmod(varint(), 8)
        size = varint() if wire in (0, 2) else FIXED_SIZES[wire]  # of the content; wire type 0 is a number itself
        if kind == "tensor" and (number == EXTERNAL_DATA or (number == DATA_LOCATION and size)):
            return True
        if wire:
            content = message[position : position + size]
            position += size
            if number in MESSAGES.get(kind, {}) and _has_external_data(content, MESSAGES[kind][number]):
                return True
    return False


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
    except Exception as error:  # ONNX Runtime raises exceptions of its own
        raise InputError(f"{path}: ONNX Runtime cannot read the graph ({type(error).__name__})") from None
