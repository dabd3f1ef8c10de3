"""Request and response models of POST /decide. Messages say what is expected and never repeat what was sent."""

import base64
import binascii
import io
import time
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, WithJsonSchema, create_model

from rfdlc.data.images import BrokenImage, fitted, planes, unusable
from rfdlc.decide.scores import SUM_TOLERANCE, Floats
from rfdlc.decide.utility import Utility
from rfdlc.errors import InputError, listing
from rfdlc.integrations.server.backend import Backend
from rfdlc.integrations.server.limits import Limits, Refused

KINDS = ("images", "arrays", "rows", "probabilities")
FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
IMAGE_TYPES = tuple(f"image/{name.lower()}" for name in FORMATS)
LARGEST_RANK = 4  # dimensions of an array of samples
Question = dict[str, Any]  # one of KINDS, and optionally "utility"
NUMBERS = {"type": "array", "items": {"type": "number"}}


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
        self.backend, self.limits = backend, limits
        many = {"type": "array", "minItems": 1, "maxItems": limits.samples}
        classes = len(backend.decider.utility.classes)
        pixel: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 255}
        sample: dict[str, Any] = pixel if backend.images else {"type": "number"}
        for side in reversed(backend.input_shape):
            sample = {"type": "array", "items": sample, "minItems": side, "maxItems": side}
        row = {**NUMBERS, "minItems": classes, "maxItems": classes}
        fields: dict[str, Any] = {
            "arrays": _field(self._arrays, {**many, "items": sample}),
            "probabilities": _field(self._probabilities, {**many, "items": row}),
            "utility": (
                Annotated[UtilitySpec, AfterValidator(self._utility), WithJsonSchema(UtilitySpec.model_json_schema())],
                None,
            ),
        }
        if backend.files:
            fields["images"] = _field(self._base64, {**many, "items": {"type": "string", "format": "byte"}})
        if backend.encoder is not None:
            columns = {"type": "object", "additionalProperties": {"type": "array"}}
            fields["rows"] = _field(self._rows, columns)
        kinds: list[Any] = [{"required": [kind]} for kind in KINDS if kind in fields]
        config = ConfigDict(extra="forbid", strict=True, json_schema_extra={"oneOf": kinds})
        self.model = create_model("DecideRequest", __config__=config, **fields)

    def read_json(self, body: bytes, deadline: float) -> Question:
        """A JSON object; images are decoded while there is time."""
        try:
            given = self.model.model_validate_json(body).__dict__
        except ValidationError as error:
            raise self._refusal(error) from None
        question = {name: value for name, value in given.items() if value is not None}
        if len(question) - ("utility" in question) != 1:
            raise Refused(422, f"expected exactly one of {listing(KINDS)}")
        if "images" in question:
            question["images"] = self._decode(question["images"], deadline)
        return question

    def read_image(self, body: bytes, deadline: float) -> Question:
        """A body that is one image file."""
        if not self.backend.files:
            shape = self.backend.input_shape
            raise Refused(422, f"this model does not accept image files: expected arrays of samples of shape {shape}")
        return {"images": self._decode([body], deadline)}

    def _refusal(self, error: ValidationError) -> Refused:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        if first["type"] == "json_invalid":
            return Refused(400, "the body is not valid JSON")
        if first["loc"][:1] == ("utility",):
            return self._expected_utility()
        known = first["loc"][0] if first["loc"] and first["loc"][0] in self.model.model_fields else "body"
        return Refused(422, f"{known}: {first['msg']}; expected one of {listing(KINDS)}, and optionally utility")

    # -- images ---------------------------------------------------------------------------------------------------

    def _base64(self, given: Any) -> list[bytes]:
        if not isinstance(given, list) or not all(isinstance(text, str) for text in given):
            raise Refused(422, "images: expected a list of base64 strings")
        self._check_count(len(given), "images")
        try:
            return [base64.b64decode(text, validate=True) for text in given]
        except (binascii.Error, ValueError):
            raise Refused(422, "images: expected base64 (RFC 4648, without a data: prefix)") from None

    def _decode(self, files: list[bytes], deadline: float) -> NDArray[Any]:
        """uint8 (n, channels, H, W); all headers are checked before a pixel is decoded."""
        opened = [self._open(file, i) for i, file in enumerate(files)]
        if sum(image.width * image.height for image in opened) > self.limits.total_pixels:
            raise Refused(413, f"images: expected at most {self.limits.total_pixels:,} pixels per request")
        return np.stack([self._fit(image, i, deadline) for i, image in enumerate(opened)])

    def _open(self, file: bytes, place: int) -> Any:
        from PIL import Image

        too_large = Refused(413, f"image {place}: expected at most {self.limits.pixels:,} pixels")
        try:
            image = Image.open(io.BytesIO(file), formats=FORMATS)
        except Image.DecompressionBombError:
            raise too_large from None
        except Exception:  # damaged files make decoders fail in many ways
            raise Refused(422, f"image {place}: expected a complete file of {listing(FORMATS)}") from None
        if image.width * image.height > self.limits.pixels:
            raise too_large
        if unusable(image):
            raise Refused(422, f"image {place}: expected 8 bits per channel, grey or RGB, not animated")
        return image

    def _fit(self, image: Any, place: int, deadline: float) -> NDArray[np.uint8]:
        if time.monotonic() > deadline:  # the request has been answered with 503
            raise TimeoutError
        channels, side, _ = self.backend.input_shape
        try:
            return planes(fitted(image, side, channels, self.backend.centre))
        except (BrokenImage, OSError, ValueError, SyntaxError, EOFError, MemoryError):
            raise Refused(422, f"image {place}: the file is truncated or corrupt") from None

    # -- numbers --------------------------------------------------------------------------------------------------

    def _arrays(self, given: Any) -> NDArray[Any]:
        array, shape = _numbers(given, "arrays"), self.backend.input_shape
        if array.shape[1:] != shape:
            raise Refused(422, f"arrays: expected shape (samples, {', '.join(map(str, shape))})")
        self._check_count(len(array), "arrays")
        if self.backend.images:
            pixels = array.astype(np.uint8) if array.dtype.kind in "iu" or np.isfinite(array).all() else None
            if pixels is None or not (pixels == array).all():
                raise Refused(422, "arrays: expected integers from 0 to 255, as images have")
            return pixels
        with np.errstate(over="ignore"):
            features = array.astype(np.float32)
        if not np.isfinite(features).all():
            raise Refused(422, "arrays: expected finite numbers")
        return features

    def _rows(self, given: Any) -> NDArray[Any]:
        encoder = self.backend.encoder
        assert encoder is not None
        names = [column.name for column in encoder.columns]
        expected = Refused(
            422, f"rows: expected an object with the columns {listing(names, 40)}: lists of strings and finite numbers"
        )
        if not isinstance(given, dict) or not all(isinstance(cells, list) for cells in given.values()):
            raise expected
        lengths = {len(given[name]) for name in names if name in given}
        if len(lengths) != 1 or not all(_is_cell(cell) for name in names for cell in given.get(name, ())):
            raise expected
        self._check_count(lengths.pop(), "rows")
        try:
            return encoder.transform(given)
        except (InputError, OverflowError):
            raise expected from None

    def _probabilities(self, given: Any) -> Floats:
        array = _numbers(given, "probabilities").astype(np.float64)
        classes, weights = len(self.backend.decider.utility.classes), self.backend.decider.weights
        array = array[None] if array.ndim == 2 else array
        if array.ndim != 3 or array.shape[2] != classes or not len(array):
            told = f"(samples, {classes}), or (particles, samples, {classes})"
            raise Refused(422, f"probabilities: expected shape {told}")
        self._check_count(array.shape[1], "probabilities")
        if not ((array >= 0).all() and (np.abs(array.sum(axis=2) - 1) <= SUM_TOLERANCE).all()):
            raise Refused(422, "probabilities: expected numbers from 0 to 1, and rows that sum to 1")
        if weights is not None and len(weights) != len(array):
            raise Refused(422, f"probabilities: expected {len(weights)} particles")
        return array

    def _utility(self, given: UtilitySpec) -> Utility:
        known, matrix = self.backend.decider.utility.classes, _numbers(given.matrix, "utility")
        if matrix.ndim != 2 or matrix.shape[0] != len(known) or matrix.shape[1] > self._most_actions():
            raise self._expected_utility()
        try:
            return Utility(matrix, given.classes or known, given.actions).with_classes(known)
        except InputError:
            raise self._expected_utility() from None

    def _most_actions(self) -> int:
        return max(self.limits.actions, 2 * len(self.backend.decider.utility.classes))

    def _expected_utility(self) -> Refused:
        rows, columns = len(self.backend.decider.utility.classes), self._most_actions()
        return Refused(
            422,
            f"utility: expected an object with matrix ({rows} rows, one per class; at most {columns} columns, one per "
            "action), and optionally actions and classes (the model's) as lists of distinct strings",
        )

    def _check_count(self, count: int, what: str) -> None:
        if not 1 <= count <= self.limits.samples:
            raise Refused(422 if not count else 413, f"{what}: expected from 1 to {self.limits.samples} samples")


def _field(validator: Callable[[Any], Any], schema: dict[str, Any]) -> tuple[Any, None]:
    return Annotated[Any, AfterValidator(validator), WithJsonSchema(schema)], None


def _numbers(given: Any, what: str) -> NDArray[Any]:
    try:
        array = np.asarray(given)
        if array.dtype.kind in "iuf" and array.ndim <= LARGEST_RANK:
            return array
    except (ValueError, OverflowError, RecursionError, MemoryError):
        pass
    raise Refused(422, f"{what}: expected nested lists of numbers, all of the same length")


def _is_cell(cell: Any) -> bool:
    return cell is None or isinstance(cell, str | int) or (isinstance(cell, float) and bool(np.isfinite(cell)))
