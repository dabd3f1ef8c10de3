"""OnnxModel: an exported file, run by ONNX Runtime without torch, and the checks that a
file must pass.
"""

import hashlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.data.dataset import as_inputs
from rfdlc.data.images import Resizing
from rfdlc.data.table import TableEncoder
from rfdlc.decisions.decider import Decider
from rfdlc.decisions.rules import reasons
from rfdlc.decisions.sets import Mask, PredictionSets, SetUtility
from rfdlc.decisions.unfamiliar import GIVEN
from rfdlc.decisions.utility import Utility
from rfdlc.errors import InputError, expect
from rfdlc.formats.files import check_version, has_external_data, parse_json
from rfdlc.probabilities.classes import Indices
from rfdlc.probabilities.scores import Floats

METADATA_KEY, FORMAT = "rfdlc", "rfdlc-onnx"
VERSION = 4  # another number for whatever changes what a file says
OUTPUTS = (
    "probabilities",
    "expected_utility",
    "action",
    "uncertainty",
    "mutual_information",
)
# of the utility's range, between what the graph computes and what its metadata say
TOLERANCE = 1e-3
CHECKSUM_START, DIGEST_LENGTH = (
    b"\x72\x50\x0a\x0crfdlc.sha256\x12\x40",
    64,
)  # protobuf: one entry of metadata_props
CHECKSUM_LENGTH = len(CHECKSUM_START) + DIGEST_LENGTH


@dataclass(frozen=True)
class Decisions:
    """The outputs of an exported graph for N samples."""

    probabilities: Floats  # (N, C), calibrated and prior-corrected
    expected_utility: Floats  # (N, A)
    action: Indices  # (N,)
    uncertainty: Floats  # (N,) entropy over log C
    mutual_information: Floats  # (N,) in nats; NaN of one particle
    # (N, C) which classes are in the set of each sample, of a decider with sets
    sets: Mask | None = None
    unfamiliar: Mask | None = None  # (N,) of a decider that hands such samples over
    reason: NDArray[np.str_] | None = (
        None  # (N,) why a sample is handed over, or is not although it is worth it
    )


class OnnxModel:
    """A model that `rfdlc export` wrote as ONNX; it needs onnx and onnxruntime, not
    torch.

    Attributes
    ----------
    decider, classes, utility
        The Decider inside the graph (for scores from elsewhere), its classes and its
        utility.
    input_shape, encoder
        The shape of one sample; the `TableEncoder` of a model that was trained on a
        table, else None.

    Examples
    --------
    >>> model = OnnxModel.load("model.onnx")  # doctest: +SKIP
    >>> chosen = model.decide(images).action  # doctest: +SKIP
    >>> [model.utility.actions[index] for index in chosen]  # doctest: +SKIP
    """

    def __init__(self, session: Any, metadata: Mapping[str, Any], path: Path) -> None:
        self.path, self.metadata, self._session = path, metadata, session
        self.decider = Decider.from_dict(metadata["decider"])
        self.classes, self.utility = self.decider.utility.classes, self.decider.utility
        self.input_shape = tuple(int(side) for side in metadata["input_shape"])
        self.resizing = Resizing.of(metadata)
        self.resize, self.utility_input = (
            bool(metadata["resize"]),
            bool(metadata["utility_input"]),
        )
        self.encoder = (
            TableEncoder.from_dict(metadata["encoder"])
            if metadata.get("encoder")
            else None
        )
        given = metadata.get("reference")  # probabilities of one sample at export
        self._reference = None if given is None else np.asarray(given, np.float64)
        self._images = len(self.input_shape) == 3
        self._fixed = (
            self.input_shape[:1] if self.resize else self.input_shape
        )  # sides that every sample has

    @classmethod
    def load(cls, path: str | Path) -> "OnnxModel":
        """Read a `.onnx` file; raises InputError if it was changed or if its metadata
        do not describe its graph.
        """
        session = _open(path)
        metadata = _metadata_of(session, path)
        try:
            model = cls(session, metadata, Path(path))
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as error:
            raise InputError(
                f"{path}: the metadata are not those of an export ({error})"
            ) from None
        try:
            model._check_graph()
        except InputError:
            raise
        except Exception as error:  # of ONNX Runtime
            raise InputError(
                f"{path}: the graph does not compute ({type(error).__name__}); export"
                " it again"
            ) from None
        return model

    def decide(self, inputs: Any, utility: Utility | None = None) -> Decisions:
        """Decide uint8 images, features or rows as a data frame or `{column: cells}`,
        by another `utility` if given.
        """
        chosen = (
            self.utility
            if utility is None
            else utility.with_classes(self.classes, same_actions=True)
        )
        samples = self._read(inputs)
        if self.resize:
            cut = np.full(
                len(samples), self.resizing.cut(*samples.shape[:1:-1]), np.float32
            )
            if told := self.resizing.cut_warning(cut):
                warnings.warn(told, stacklevel=2)
        decided = self._run(samples, chosen)
        wrong = np.flatnonzero(~np.isfinite(decided.probabilities).all(axis=1))
        too_large = (
            "holds numbers too large to compute with: expected numbers like the"
            " training data's"
        )
        expect(not len(wrong), f"sample {next(iter(wrong), 0)} {too_large}")
        p, values, action, strange = (
            decided.probabilities,
            decided.expected_utility,
            decided.action,
            decided.unfamiliar,
        )
        limited = self.decider.deferral.budget is not None
        # a budget is for the utility of the graph
        if utility is not None and not self.utility_input:
            action = (
                self.decider.replace(utility=chosen, budget=None)
                .explain_probabilities(p, strange)
                .action
            )
            sets = None
            if self.decider.sets is not None:
                sets = self.decider.sets.members(p, chosen)
            values = p @ chosen.matrix
            decided, limited = (
                replace(decided, expected_utility=values, action=action, sets=sets),
                False,
            )
        return replace(
            decided, reason=reasons(chosen, values, action, strange, limited=limited)
        )

    def _read(self, inputs: Any) -> NDArray[Any]:
        """Samples as the graph takes them."""
        array = np.asarray(self.encoder.encode(inputs) if self.encoder else inputs)
        sides = ", ".join(map(str, (*self._fixed, *("HW" if self.resize else ""))))
        fits = (
            array.ndim == 1 + len(self.input_shape)
            and array.shape[1 : 1 + len(self._fixed)] == self._fixed
        )
        rows = f", or {self.encoder.expected}" if self.encoder else ""
        expect(
            fits and len(array),
            f"samples have shape {array.shape}: expected (N, {sides}){rows}",
        )
        expect(
            not self._images or array.dtype == np.uint8,
            f"images are {array.dtype}: expected uint8, from 0 to 255",
        )
        return array if self._images else as_inputs("samples", array)

    def _run(self, samples: NDArray[Any], utility: Utility) -> Decisions:
        feed = {"inputs": samples}
        if self.utility_input:
            feed["utility"] = utility.matrix
        names = outputs_of(self.decider)
        return Decisions(
            **dict(zip(names, self._session.run(list(names), feed), strict=True))
        )

    def _check_graph(self) -> None:
        """Names, types and fixed sides of inputs and outputs, and one inference,
        against the metadata.
        """
        number = "tensor(float)"
        claimed: dict[str, tuple[str, list[int]]] = {
            name: (number, []) for name in outputs_of(self.decider)
        } | {
            "inputs": ("tensor(uint8)" if self._images else number, list(self._fixed)),
            "probabilities": (number, [len(self.classes)]),
            "expected_utility": (
                number,
                [] if self.utility_input else [len(self.utility.actions)],
            ),
            "action": ("tensor(int64)", []),
        }
        if self.decider.sets is not None:
            claimed["sets"] = ("tensor(bool)", [len(self.classes)])
        if self.decider.deferral.unfamiliar is not None:
            claimed["unfamiliar"] = ("tensor(bool)", [])
        if self.utility_input:
            claimed["utility"] = ("tensor(double)", [])
        values = (*self._session.get_inputs(), *self._session.get_outputs())
        graph = {
            v.name: (v.type, [side for side in v.shape[1:] if isinstance(side, int)])
            for v in values
        }
        for name in claimed | graph:
            said, found = claimed.get(name), graph.get(name)
            expect(
                said == found,
                f"{self.path}: the metadata say {said} for {name!r}, but the graph has"
                f" {found}",
            )
        decided = self._run(blank_sample(self.input_shape), self.utility)
        distance = np.abs(
            decided.expected_utility - decided.probabilities @ self.utility.matrix
        ).max()
        near = distance <= TOLERANCE * max(np.abs(self.utility.matrix).max(), 1e-30)
        expect(
            near,
            f"{self.path}: the graph does not decide by the utility of its metadata, or"
            " is not finite",
        )
        expected = (
            decided.probabilities[0] if self._reference is None else self._reference
        )
        off = (
            np.abs(decided.probabilities[0] - expected).max()
            if expected.shape == (len(self.classes),)
            else np.inf
        )
        other = (
            f"{self.path}: this machine computes probabilities that differ by {off:.2g}"
            " from those at export"
        )
        expect(
            off <= TOLERANCE,
            f"{other}: export it again, or use another version of onnxruntime",
        )


def _metadata_of(session: Any, path: str | Path) -> dict[str, Any]:
    """What an export says of itself, in the version of the format that is read."""
    text = session.get_modelmeta().custom_metadata_map.get(METADATA_KEY, "")
    try:
        metadata = parse_json(text)
    except ValueError as error:
        raise InputError(
            f"{path}: the metadata are not those of an export ({error})"
        ) from None
    if not isinstance(metadata, dict):
        raise InputError(f"{path}: the metadata are not those of an export")
    check_version(path, metadata, FORMAT, VERSION)
    return metadata


def blank_sample(shape: tuple[int, ...], samples: int = 1) -> NDArray[Any]:
    """Samples of zeros, which every model must be able to compute."""
    return np.zeros((samples, *shape), np.uint8 if len(shape) == 3 else np.float32)


def check_rule(decider: Decider) -> None:
    """Graphs and servers decide by expected utility."""
    other = (
        f"the decider's rule is {decider.rule!r}, but exported graphs and servers"
        " decide by expected utility only"
    )
    expect(
        decider.rule == "expected-utility",
        f"{other}; for arg max use the utility one-hot, which decides the same",
    )


def outputs_of(decider: Decider) -> tuple[str, ...]:
    """The names of the outputs of a graph."""
    names = list(OUTPUTS)
    if decider.sets is not None:
        names.append("sets")
    if decider.deferral.unfamiliar is not None:
        names.append("unfamiliar")
    return tuple(names)


def check_exportable(
    decider: Decider, utility_input: bool, familiarity: bool = False
) -> None:
    """Graphs are deterministic, and know how to answer with sets, a budget or
    unfamiliar samples for one utility.
    """
    limited = utility_input and (
        decider.deferral.budget is not None or decider.deferral.unfamiliar is not None
    )
    expect(
        not limited,
        "a budget and unfamiliar samples need the utility in the graph: export without"
        " utility_input",
    )
    given = (
        decider.deferral.unfamiliar is not None
        and GIVEN in decider.deferral.unfamiliar.terms
        and not familiarity
    )
    expect(
        not given,
        "unfamiliar samples are found by scores of your own, which a graph has not: fit"
        " them to logits",
    )
    random = isinstance(decider.sets, PredictionSets) and decider.sets.ties is not None
    expect(
        not random,
        "sets are randomised, but an exported graph is not: fit them again without"
        " randomised=True",
    )
    both = utility_input and isinstance(decider.sets, SetUtility)
    expect(
        not both,
        "sets by expected utility need the utility in the graph: export without"
        " utility_input",
    )


def with_checksum(data: bytes) -> bytes:
    """A serialised model, followed by the SHA-256 of its bytes as one more metadata
    entry, which any runtime reads.
    """
    return data + CHECKSUM_START + hashlib.sha256(data).hexdigest().encode()


def _open(path: str | Path) -> Any:
    """A session of ONNX Runtime for a file whose checksum is right and that holds all
    of its data.
    """
    try:
        import onnx
        import onnxruntime

        data = Path(path).read_bytes()
    except ImportError:
        raise InputError(
            'reading ONNX files needs onnx and onnxruntime: pip install "rfdlc[export]"'
        ) from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    found = data[-CHECKSUM_LENGTH:-DIGEST_LENGTH] == CHECKSUM_START
    missing = (
        f"{path} has no checksum of rfdlc at its end: it is cut off, or was not written"
        " by `rfdlc export`"
    )
    expect(found, f"{missing}; export it again from its run folder")
    damaged = (
        f"{path} was changed after it was exported (its SHA-256 differs): it is damaged"
        " or was edited"
    )
    expect(
        data == with_checksum(data[:-CHECKSUM_LENGTH]),
        f"{damaged}; export it again from its run folder",
    )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry(
        "session.intra_op.allow_spinning", "0"
    )  # idle threads leave the cores to others
    try:
        external = has_external_data(onnx.load_model_from_string(data))
        session = (
            None
            if external
            else onnxruntime.InferenceSession(
                data, options, providers=["CPUExecutionProvider"]
            )
        )
    except Exception as error:  # both have exceptions of their own
        raise InputError(
            f"{path}: the graph cannot be read ({type(error).__name__}); export it"
            " again"
        ) from None
    expect(
        session,
        f"{path} takes weights from other files, which its checksum does not cover:"
        " export it again",
    )
    return session
