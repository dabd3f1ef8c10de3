"""From the bytes of a request to checked samples or scores. Messages say what is expected, never what was sent."""

import base64
import binascii
import io
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.data.images import BrokenImage, fitted, planes, unusable
from rfdlc.decide.scores import SUM_TOLERANCE, Floats
from rfdlc.decide.utility import Utility
from rfdlc.errors import InputError, listing
from rfdlc.integrations.server.backends import Backend
from rfdlc.integrations.server.limits import Limits, Refused

KINDS = ("images", "arrays", "rows", "probabilities")
FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
MOST_SIDES = 4  # of an array: more dimensions than any sample has


@dataclass(frozen=True)
class Question:
    """What one request asks: raw samples, or scores of some model (M, N, C); and by which utility."""

    samples: NDArray[Any] | None
    scores: Floats | None
    utility: Utility | None = None

    def __len__(self) -> int:
        return len(self.samples) if self.samples is not None else self.scores.shape[1] if self.scores is not None else 0


def read_image_body(body: bytes, backend: Backend, limits: Limits) -> Question:
    """A body that is one image."""
    return Question(_images([body], backend, limits), None)


def read_json_body(body: bytes, backend: Backend, limits: Limits) -> Question:
    """A JSON object with one of KINDS, and optionally `utility`."""
    table = _object(body)
    if set(table) - {*KINDS, "utility"}:
        raise Refused(422, f"there are unknown fields: expected one of {listing(KINDS)}, and optionally utility")
    given = [kind for kind in KINDS if table.get(kind) is not None]
    if len(given) != 1:
        raise Refused(422, f"expected exactly one of {listing(KINDS)}")
    utility = None if table.get("utility") is None else _utility(table["utility"], backend)
    value = table[given[0]]
    if given[0] == "probabilities":
        return Question(None, _probabilities(value, backend, limits), utility)
    readers = {"images": _base64_images, "arrays": _arrays, "rows": _rows}
    samples = readers[given[0]](value, backend, limits)
    return Question(samples, None, utility)


def _object(body: bytes) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise ValueError

    try:
        table = json.loads(body, parse_constant=refuse)
    except (ValueError, RecursionError):
        raise Refused(400, "the body is no JSON (NaN and Infinity are none either)") from None
    if not isinstance(table, dict):
        raise Refused(422, "expected a JSON object")
    return table


# -- images ------------------------------------------------------------------------------------------------------------


def _base64_images(given: Any, backend: Backend, limits: Limits) -> NDArray[Any]:
    if not isinstance(given, list) or not all(isinstance(text, str) for text in given):
        raise Refused(422, "images: expected a list of base64 texts")
    _check_count(len(given), "images", limits)
    try:
        files = [base64.b64decode(text, validate=True) for text in given]
    except (binascii.Error, ValueError):
        raise Refused(422, "images: expected base64 (RFC 4648, without a data: prefix)") from None
    return _images(files, backend, limits)


def _images(files: list[bytes], backend: Backend, limits: Limits) -> NDArray[Any]:
    if not backend.files:
        raise Refused(
            422, f"this model takes no image files: expected arrays of samples of shape {backend.input_shape}"
        )
    return np.stack([planes(_square(file, i, backend, limits)) for i, file in enumerate(files)])


def _square(file: bytes, place: int, backend: Backend, limits: Limits) -> Any:
    """One image, decoded and resized as training images were; its size is checked before a pixel is decoded."""
    from PIL import Image

    too_large = Refused(413, f"image {place} has more pixels than allowed ({limits.pixels:,})")
    try:
        image = Image.open(io.BytesIO(file), formats=FORMATS)
    except Image.DecompressionBombError:
        raise too_large from None
    except Exception:  # decoders of damaged files fail in many ways
        raise Refused(422, f"image {place}: expected a whole file of {listing(FORMATS)}") from None
    if image.width * image.height > limits.pixels:
        raise too_large
    if unusable(image):
        raise Refused(422, f"image {place}: expected 8 bits a channel, grey or RGB, not animated")
    try:
        return fitted(image, backend.input_shape[1], backend.input_shape[0], backend.centre)
    except (BrokenImage, OSError, ValueError, SyntaxError, EOFError, MemoryError):
        raise Refused(422, f"image {place}: the file is truncated or corrupt") from None


# -- numbers -----------------------------------------------------------------------------------------------------------


def _numbers(given: Any, what: str) -> NDArray[np.float64]:
    try:
        array = np.asarray(given)
        if array.dtype.kind in "iuf" and array.ndim <= MOST_SIDES:
            return array.astype(np.float64)
    except (ValueError, OverflowError, RecursionError, MemoryError):
        pass
    raise Refused(422, f"{what}: expected lists of numbers, all of the same length")


def _arrays(given: Any, backend: Backend, limits: Limits) -> NDArray[Any]:
    array = _numbers(given, "arrays")
    if array.shape[1:] != backend.input_shape:
        raise Refused(422, f"arrays: expected shape (samples, {', '.join(map(str, backend.input_shape))})")
    _check_count(len(array), "arrays", limits)
    if backend.images:
        if not ((array >= 0) & (array <= 255) & (array == np.floor(array))).all():
            raise Refused(422, "arrays: expected whole numbers from 0 to 255, as images have")
        return array.astype(np.uint8)
    with np.errstate(over="ignore"):
        features = array.astype(np.float32)
    if not np.isfinite(features).all():
        raise Refused(422, "arrays: expected finite numbers")
    return features


def _rows(given: Any, backend: Backend, limits: Limits) -> NDArray[Any]:
    if backend.encoder is None:
        raise Refused(422, "rows: this model was not trained on a table; send arrays")
    names = [column.name for column in backend.encoder.columns]
    if not isinstance(given, dict) or not all(isinstance(cells, list) for cells in given.values()):
        raise Refused(422, "rows: expected an object of columns, each a list of cells")
    lengths = {len(given[name]) for name in names if name in given}
    cells = (cell for name in names for cell in given.get(name, ()))
    if len(lengths) != 1 or not all(cell is None or isinstance(cell, str | int | float) for cell in cells):
        raise Refused(422, f"rows: expected the columns {listing(names, 40)}, of equal length, of texts and numbers")
    _check_count(lengths.pop(), "rows", limits)
    try:
        return backend.encoder.transform(given)
    except (InputError, OverflowError):
        raise Refused(422, f"rows: expected the columns {listing(names, 40)}, with numbers where they were") from None


def _probabilities(given: Any, backend: Backend, limits: Limits) -> Floats:
    array = _numbers(given, "probabilities")
    classes = len(backend.decider.utility.classes)
    array = array[None] if array.ndim == 2 else array
    if array.ndim != 3 or array.shape[2] != classes or not len(array):
        raise Refused(422, f"probabilities: expected shape (samples, {classes}), or (particles, samples, {classes})")
    _check_count(array.shape[1], "probabilities", limits)
    fits = np.isfinite(array).all() and (array >= 0).all() and (np.abs(array.sum(axis=2) - 1) <= SUM_TOLERANCE).all()
    if not fits:
        raise Refused(422, "probabilities: expected numbers from 0 to 1, and rows that sum to 1")
    weights = backend.decider.weights
    if weights is not None and len(weights) != len(array):
        raise Refused(422, f"probabilities: expected those of {len(weights)} particles")
    return array


def _utility(given: Any, backend: Backend) -> Utility:
    known = backend.decider.utility.classes
    expected = Refused(
        422,
        f"utility: expected an object with matrix (one row a class, {len(known)} in all; one column an action), and "
        "optionally actions and classes (the model's), as lists of distinct texts",
    )
    if not isinstance(given, dict) or set(given) - {"matrix", "actions", "classes"} or "matrix" not in given:
        raise expected
    actions, classes = given.get("actions"), given.get("classes")
    for names in (actions, classes):
        if names is not None and (not isinstance(names, list) or not all(isinstance(name, str) for name in names)):
            raise expected
    try:
        return Utility(_numbers(given["matrix"], "utility"), classes or known, actions).with_classes(known)
    except InputError:
        raise expected from None


def _check_count(count: int, what: str, limits: Limits) -> None:
    if not 1 <= count <= limits.samples:
        raise Refused(422 if not count else 413, f"{what}: expected from 1 to {limits.samples} samples a request")
