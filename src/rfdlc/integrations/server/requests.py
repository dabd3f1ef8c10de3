"""Request and response models of POST /decide. Messages say what is expected and never repeat what was sent."""

import base64
import io
import time
from typing import Annotated, Any

import numpy as np
from fastapi import HTTPException
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field, ValidationError, create_model
from pydantic_core import PydanticCustomError

from rfdlc.data.images import fitted, planes, unusable
from rfdlc.decide.scores import SUM_TOLERANCE, Floats
from rfdlc.decide.utility import Utility
from rfdlc.errors import listing
from rfdlc.integrations.server.backend import Backend, Limits

FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
IMAGE_TYPES = tuple(f"image/{name.lower()}" for name in FORMATS)
IMAGE = f"expected a complete file of {listing(FORMATS)}, grey or RGB with 8 bits per channel, not animated"
CLOSE, LATER = {"connection": "close"}, {"retry-after": "1"}  # after CLOSE the rest of the body is not read
HEADERS = {401: {"www-authenticate": "Bearer"}, 408: CLOSE, 411: CLOSE, 429: LATER, 503: LATER}  # of refusals
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def require(condition: Any, message: str, status: int = 422) -> None:
    """Refuse the request unless `condition` holds."""
    if not condition:
        raise HTTPException(status, message, HEADERS.get(status))


def _list(item: Any, least: int = 0, most: int | None = None) -> Any:
    """The type of a list; validation ends at its first error, so that a bad request costs no more than a good one."""
    return Annotated[list[item], Field(min_length=least, max_length=most), FailFast()]


class UtilitySpec(BaseModel):
    """A utility: one row per class, one column per action; names are matched, not positions."""

    model_config = STRICT

    matrix: _list(_list(float))  # type: ignore[valid-type]
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
    """Reads bodies for one model into {kind: array, "utility": Utility}; `schema` describes and validates the JSON."""

    def __init__(self, backend: Backend, limits: Limits) -> None:
        self.served, self.limits, self.weights = backend.model, limits, backend.decider.weights
        self.classes, shape, most = backend.decider.utility.classes, self.served.input_shape, limits.samples
        self.images = len(shape) == 3
        self.files = self.images and shape[1] == shape[2]  # image files are resized to squares
        count, self.most_actions = len(self.classes), max(limits.actions, 2 * len(self.classes))
        numbers = "integers from 0 to 255, as images have" if self.images else "finite numbers"
        columns = [column.name for column in self.served.encoder.columns] if self.served.encoder else []
        self.expected = {  # descriptions of the fields, and the answers to whatever is wrong with them
            "images": f"1 to {most} base64 strings (RFC 4648, without a data: prefix) of image files",
            "arrays": f"nested lists of shape (1 to {most} samples, {', '.join(map(str, shape))}) with {numbers}",
            "rows": f"the columns {listing(columns, 40)}: equally long lists of 1 to {most} strings and finite numbers",
            "probabilities": f"nested lists of shape (1 to {most} samples, {count}), or (particles, samples, {count}) "
            "with all particles of the model: numbers from 0 to 1, and rows that sum to 1",
            "utility": f"a matrix with {count} rows, one per class, and at most {self.most_actions} columns, one per "
            "action, and optionally actions and classes (the model's) as lists of distinct strings",
        }
        sample: Any = Annotated[int, Field(ge=0, le=255)] if self.images else float
        for side in reversed(shape):
            sample = _list(sample, side, side)
        kinds: dict[str, tuple[Any, Any]] = {
            "arrays": (_list(sample, 1, most), self._arrays),
            "probabilities": (_list(Any, 1), self._probabilities),
        }
        if self.files:
            kinds["images"] = _list(str, 1, most), _decode_base64
        if columns:
            kinds["rows"] = dict[str, _list(bool | str | int | float | None)], self._rows  # type: ignore[misc]
        fields: dict[str, Any] = {
            name: (Annotated[kind, AfterValidator(read)], Field(None, description=f"Expected: {self.expected[name]}."))
            for name, (kind, read) in (kinds | {"utility": (UtilitySpec, self._utility)}).items()
        }
        self.usage = f"expected a JSON object with exactly one of {listing(kinds)}, and optionally utility"
        one_of = ConfigDict(json_schema_extra={"oneOf": [{"required": [kind]} for kind in kinds]})
        self.schema = create_model("DecideRequest", __config__=STRICT | one_of, **fields)
        self.by_type = {kind.encode(): self.read_image for kind in IMAGE_TYPES} | {b"application/json": self.read_json}

    def read_json(self, body: bytes, deadline: float) -> dict[str, Any]:
        """A JSON object; images are decoded while there is time."""
        try:
            question = {name: value for name, value in self.schema.model_validate_json(body) if value is not None}
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            kind, field = first["type"], str(*first["loc"][:1])
            require(kind != "json_invalid", "the body is not valid JSON", 400)
            message = f"{field}: expected {self.expected[field]}" if field in self.expected else self.usage
            raise HTTPException(413 if kind == "too_long" and len(first["loc"]) == 1 else 422, message) from None
        except (OverflowError, RecursionError, MemoryError):
            raise HTTPException(422, self.usage) from None
        require(len(question) - ("utility" in question) == 1, self.usage)
        if "images" in question:
            question["images"] = self._decode(question["images"], deadline)
        return question

    def read_image(self, body: bytes, deadline: float) -> dict[str, Any]:
        """A body that is one image file."""
        expected = f"expected arrays of samples of shape {self.served.input_shape}"
        require(self.files, f"this model does not accept image files: {expected}")
        return {"images": self._decode([body], deadline)}

    def _decode(self, files: list[bytes], deadline: float) -> NDArray[Any]:
        """uint8 (n, channels, H, W); all headers are checked before a pixel is decoded."""
        from PIL import Image

        images, total, limits, (channels, side, _) = [], 0, self.limits, self.served.input_shape
        most = f"expected at most {limits.pixels:,} pixels per image and {limits.total_pixels:,} per request"
        for place, file in enumerate(files):
            size, usable = 0, False
            try:
                images.append(Image.open(io.BytesIO(file), formats=FORMATS))
                size, usable = images[-1].width * images[-1].height, not unusable(images[-1])
            except Image.DecompressionBombError:
                size = limits.pixels + 1
            except Exception:  # damaged files make decoders fail in many ways
                usable = False
            total += size
            require(size <= limits.pixels and total <= limits.total_pixels, f"image {place}: {most}", 413)
            require(usable, f"image {place}: {IMAGE}")
        samples = np.empty((len(images), channels, side, side), np.uint8)
        for place, image in enumerate(images):
            if time.monotonic() > deadline:  # the request has been answered with 503
                raise TimeoutError
            try:
                samples[place] = planes(fitted(image, side, channels, self.served.centre))
            except Exception:
                raise HTTPException(422, f"image {place}: {IMAGE}") from None
        return samples

    def _arrays(self, given: list[Any]) -> NDArray[Any]:
        with np.errstate(over="ignore"):
            samples = np.array(given, np.uint8 if self.images else np.float32)
        _check(np.isfinite(samples).all())
        return samples

    def _rows(self, given: dict[str, list[Any]]) -> NDArray[Any]:
        self._check_count(max(map(len, given.values()), default=0))
        return self.served.encoder.transform(given)

    def _probabilities(self, given: list[Any]) -> Floats:
        array = np.asarray(given)
        _check(array.dtype.kind in "iuf" and array.ndim in (2, 3) and array.shape[-1] == len(self.classes))
        array = array.astype(np.float64)[None] if array.ndim == 2 else array.astype(np.float64)
        self._check_count(array.shape[1])
        _check((array >= 0).all() and (np.abs(array.sum(axis=2) - 1) <= SUM_TOLERANCE).all())
        _check(self.weights is None or len(self.weights) == len(array))
        return array

    def _utility(self, given: UtilitySpec) -> Utility:
        _check(len(given.matrix) == len(self.classes) and len(given.matrix[0]) <= self.most_actions)
        return Utility(given.matrix, given.classes or self.classes, given.actions).with_classes(self.classes)

    def _check_count(self, count: int) -> None:
        _check(count)
        _check(count <= self.limits.samples, "too_long")


def _decode_base64(given: list[str]) -> list[bytes]:
    return [base64.b64decode(text, validate=True) for text in given]


def _check(fits: Any, kind: str = "invalid") -> None:
    if not fits:
        raise PydanticCustomError(kind, "the answer is what the field expects")
