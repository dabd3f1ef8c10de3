"""Request and response models of POST /decide. Messages say what is expected and never repeat what was sent."""

import base64
import io
import time
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, WithJsonSchema, create_model

from rfdlc.data.images import fitted, planes, unusable
from rfdlc.decide.scores import SUM_TOLERANCE, Floats
from rfdlc.decide.utility import Utility
from rfdlc.errors import InputError, listing
from rfdlc.integrations.server.backend import Backend
from rfdlc.integrations.server.limits import Limits, Refused

KINDS = ("images", "arrays", "rows", "probabilities")
FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
IMAGE_TYPES = tuple(f"image/{name.lower()}" for name in FORMATS)
LARGEST_RANK = 4  # dimensions of an array of samples
NUMBERS = {"type": "array", "items": {"type": "number"}}
Question = dict[str, Any]  # one of KINDS, and optionally "utility"


class UtilitySpec(BaseModel):
    """A utility: one row per class, one column per action; names are matched, not positions."""

    model_config = ConfigDict(extra="forbid", strict=True)

    matrix: Annotated[Any, WithJsonSchema({"type": "array", "items": NUMBERS})]
    actions: list[str] | None = None
    classes: list[str] | None = None


class DecideResponse(BaseModel):
    """Columns with one entry per sample; the last four only with `full=true`."""

    action: list[str]
    expected_utility: list[float]
    argmax: list[str]
    probability: list[float]
    uncertainty: list[float]
    mutual_information: list[float]
    classes: list[str] | None = None
    probabilities: list[list[float]] | None = None
    actions: list[str] | None = None
    expected_utilities: list[list[float]] | None = None


class Refusal(BaseModel):
    """Why a request was refused."""

    detail: str


class Reader:
    """Reads bodies for one model into {kind: array, "utility": Utility}; `model` describes and validates the JSON."""

    def __init__(self, backend: Backend, limits: Limits) -> None:
        self.backend, self.limits, self.classes = backend, limits, backend.decider.utility.classes
        self.most_actions = max(limits.actions, 2 * len(self.classes))
        many = {"type": "array", "minItems": 1, "maxItems": limits.samples}
        pixel = {"type": "integer", "minimum": 0, "maximum": 255}
        sample: dict[str, Any] = pixel if backend.images else {"type": "number"}
        for side in reversed(backend.input_shape):
            sample = {"type": "array", "items": sample, "minItems": side, "maxItems": side}
        row = {**NUMBERS, "minItems": len(self.classes), "maxItems": len(self.classes)}
        fields: dict[str, Any] = {
            "arrays": _field(Any, self._arrays, {**many, "items": sample}),
            "probabilities": _field(Any, self._probabilities, {**many, "items": row}),
            "utility": _field(UtilitySpec, self._utility, UtilitySpec.model_json_schema()),
        }
        if backend.files:
            fields["images"] = _field(list[str], self._base64, {**many, "items": {"type": "string", "format": "byte"}})
        if backend.encoder is not None:
            columns = {"type": "object", "additionalProperties": {"type": "array"}}
            fields["rows"] = _field(dict[str, list[Any]], self._rows, columns)
        one_of: Any = {"oneOf": [{"required": [kind]} for kind in KINDS if kind in fields]}
        config = ConfigDict(extra="forbid", strict=True, json_schema_extra=one_of)
        self.model = create_model("DecideRequest", __config__=config, **fields)

    def read_json(self, body: bytes, deadline: float) -> Question:
        """A JSON object; images are decoded while there is time."""
        try:
            given = self.model.model_validate_json(body).__dict__
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            _expect(first["type"] != "json_invalid", "the body is not valid JSON", 400)
            field = next((name for name in first["loc"][:1] if name in self.model.model_fields), "body")
            message = f"{field}: {first['msg']}; expected one of {listing(KINDS)}, and optionally utility"
            raise Refused(422, message) from None
        question = {name: value for name, value in given.items() if value is not None}
        _expect(len(question) - ("utility" in question) == 1, f"expected exactly one of {listing(KINDS)}")
        if "images" in question:
            question["images"] = self._decode(question["images"], deadline)
        return question

    def read_image(self, body: bytes, deadline: float) -> Question:
        """A body that is one image file."""
        expected = f"expected arrays of samples of shape {self.backend.input_shape}"
        _expect(self.backend.files, f"this model does not accept image files: {expected}")
        return {"images": self._decode([body], deadline)}

    def _base64(self, given: list[str]) -> list[bytes]:
        self._check_count(len(given), "images")
        try:
            return [base64.b64decode(text, validate=True) for text in given]
        except ValueError:
            raise Refused(422, "images: expected base64 (RFC 4648, without a data: prefix)") from None

    def _decode(self, files: list[bytes], deadline: float) -> NDArray[Any]:
        """uint8 (n, channels, H, W); all headers are checked before a pixel is decoded."""
        from PIL import Image

        images, pixels, limits = [], 0, self.limits
        for place, file in enumerate(files):
            try:
                image = Image.open(io.BytesIO(file), formats=FORMATS)
                size = image.width * image.height
            except Image.DecompressionBombError:
                size = limits.pixels + 1
            except Exception:  # damaged files make decoders fail in many ways
                raise Refused(422, f"image {place}: expected a complete file of {listing(FORMATS)}") from None
            _expect(size <= limits.pixels, f"image {place}: expected at most {limits.pixels:,} pixels", 413)
            _expect(not unusable(image), f"image {place}: expected 8 bits per channel, grey or RGB, not animated")
            images.append(image)
            pixels += size
        _expect(
            pixels <= limits.total_pixels, f"images: expected at most {limits.total_pixels:,} pixels per request", 413
        )
        channels, side, _ = self.backend.input_shape
        samples = np.empty((len(images), *self.backend.input_shape), np.uint8)
        for place, image in enumerate(images):
            if time.monotonic() > deadline:  # the request has been answered with 503
                raise TimeoutError
            try:
                samples[place] = planes(fitted(image, side, channels, self.backend.centre))
            except Exception:
                raise Refused(422, f"image {place}: the file is truncated or corrupt") from None
        return samples

    def _arrays(self, given: Any) -> NDArray[Any]:
        array, shape = _numbers(given, "arrays"), self.backend.input_shape
        _expect(array.shape[1:] == shape, f"arrays: expected shape (samples, {', '.join(map(str, shape))})")
        self._check_count(len(array), "arrays")
        with np.errstate(over="ignore", invalid="ignore"):
            samples = array.astype(np.uint8 if self.backend.images else np.float32)
        fits = samples == array if self.backend.images else np.isfinite(samples)
        kind = "integers from 0 to 255, as images have" if self.backend.images else "finite numbers"
        _expect(fits.all(), f"arrays: expected {kind}")
        return samples

    def _rows(self, given: dict[str, list[Any]]) -> NDArray[Any]:
        encoder = self.backend.encoder
        assert encoder is not None
        names = [column.name for column in encoder.columns]
        lengths = {len(given[name]) for name in names if name in given}
        expected = f"rows: expected the columns {listing(names, 40)}: equally long lists of strings and finite numbers"
        cells = [cell for name in names for cell in given.get(name, ())]
        numbers = np.array([cell for cell in cells if isinstance(cell, float)])
        known = all(cell is None or isinstance(cell, str | int | float) for cell in cells)
        _expect(len(lengths) == 1 and known and np.isfinite(numbers).all(), expected)
        self._check_count(lengths.pop(), "rows")
        try:
            return encoder.transform(given)
        except (InputError, OverflowError):
            raise Refused(422, expected) from None

    def _probabilities(self, given: Any) -> Floats:
        array, classes = _numbers(given, "probabilities").astype(np.float64), len(self.classes)
        array, weights = array[None] if array.ndim == 2 else array, self.backend.decider.weights
        expected = f"probabilities: expected shape (samples, {classes}), or (particles, samples, {classes})"
        _expect(array.ndim == 3 and array.shape[2] == classes and len(array) > 0, expected)
        self._check_count(array.shape[1], "probabilities")
        fits = (array >= 0).all() and (np.abs(array.sum(axis=2) - 1) <= SUM_TOLERANCE).all()
        _expect(fits, "probabilities: expected 0 to 1, and rows that sum to 1")
        _expect(weights is None or len(weights) == len(array), "probabilities: expected all particles of the model")
        return array

    def _utility(self, given: UtilitySpec) -> Utility:
        matrix, rows = _numbers(given.matrix, "utility"), len(self.classes)
        expected = (
            f"utility: expected a matrix with {rows} rows, one per class, and at most {self.most_actions} columns, one "
            "per action, and optionally actions and classes (the model's) as lists of distinct strings"
        )
        _expect(matrix.ndim == 2 and len(matrix) == rows and matrix.shape[1] <= self.most_actions, expected)
        try:
            return Utility(matrix, given.classes or self.classes, given.actions).with_classes(self.classes)
        except InputError:
            raise Refused(422, expected) from None

    def _check_count(self, count: int, what: str) -> None:
        most = self.limits.samples
        _expect(1 <= count <= most, f"{what}: expected from 1 to {most} samples", 413 if count else 422)


def _expect(condition: Any, message: str, status: int = 422) -> None:
    if not condition:
        raise Refused(status, message)


def _field(kind: Any, validator: Callable[[Any], Any], schema: dict[str, Any]) -> tuple[Any, None]:
    return Annotated[kind, AfterValidator(validator), WithJsonSchema(schema)], None


def _numbers(given: Any, what: str) -> NDArray[Any]:
    try:
        array = np.asarray(given)
    except (ValueError, OverflowError, RecursionError, MemoryError):
        array = np.asarray(None)
    expected = f"{what}: expected nested lists of numbers, all of the same length"
    _expect(array.dtype.kind in "iuf" and array.ndim <= LARGEST_RANK, expected)
    return array
