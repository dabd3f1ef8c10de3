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
from rfdlc.integrations.server.backend import Backend
from rfdlc.integrations.server.limits import Limits

FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
IMAGE_TYPES = tuple(f"image/{name.lower()}" for name in FORMATS)
IMAGE = f"expected a complete file of {listing(FORMATS)}, grey or RGB with 8 bits per channel, not animated"
EXPECTED = {  # the description of each field, and the answer to whatever is wrong with it
    "images": "a list of {most}base64 strings (RFC 4648, without a data: prefix) of image files",
    "arrays": "nested lists of shape ({most}samples, {shape}) with {values}",
    "rows": "the columns {columns}: equally long lists of {most}strings and finite numbers",
    "probabilities": "nested lists of shape ({most}samples, {classes}), or (particles, {most}samples, {classes}) with "
    "all particles of the model: numbers from 0 to 1, and rows that sum to 1",
    "utility": "a matrix with {classes} rows, one per class, and at most {actions} columns, one per action, and "
    "optionally actions and classes (the model's) as lists of distinct strings",
}
CLOSE, LATER = {"connection": "close"}, {"retry-after": "1"}  # after CLOSE the rest of the body is not read
HEADERS = {401: {"www-authenticate": "Bearer"}, 408: CLOSE, 411: CLOSE, 429: LATER, 503: LATER}  # of refusals
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
Question = dict[str, Any]  # one kind of samples, and optionally "utility"


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
    """Reads bodies for one model into {kind: array, "utility": Utility}; `model` describes and validates the JSON."""

    def __init__(self, backend: Backend, limits: Limits) -> None:
        self.backend, self.limits, self.classes = backend, limits, backend.decider.utility.classes
        self.most_actions = max(limits.actions, 2 * len(self.classes))
        sample: Any = Annotated[int, Field(ge=0, le=255)] if backend.images else float
        for side in reversed(backend.input_shape):
            sample = _list(sample, side, side)
        fields: dict[str, tuple[Any, Any]] = {
            "arrays": (_list(sample, 1, limits.samples), self._arrays),
            "probabilities": (_list(Any, 1), self._probabilities),
            "utility": (UtilitySpec, self._utility),
        }
        if backend.files:
            fields["images"] = _list(str, 1, limits.samples), self._base64
        if backend.encoder is not None:
            fields["rows"] = dict[str, _list(bool | str | int | float | None)], self._rows  # type: ignore[misc]
        known = {
            "most": f"1 to {limits.samples} ",
            "shape": ", ".join(map(str, backend.input_shape)),
            "values": "integers from 0 to 255, as images have" if backend.images else "finite numbers",
            "columns": listing((c.name for c in backend.encoder.columns), 40) if backend.encoder else "",
            "classes": len(self.classes),
            "actions": self.most_actions,
        }
        self.expected = {name: f"expected {EXPECTED[name].format(**known)}" for name in fields}
        typed: dict[str, Any] = {
            name: (Annotated[kind, AfterValidator(read)], Field(None, description=self.expected[name]))
            for name, (kind, read) in fields.items()
        }
        kinds = sorted(fields.keys() - {"utility"})
        self.usage = f"expected a JSON object with exactly one of {listing(kinds)}, and optionally utility"
        one_of = ConfigDict(json_schema_extra={"oneOf": [{"required": [kind]} for kind in kinds]})
        self.model = create_model("DecideRequest", __config__=STRICT | one_of, **typed)
        self.by_type = {kind.encode(): self.read_image for kind in IMAGE_TYPES}
        self.by_type[b"application/json"] = self.read_json

    def read_json(self, body: bytes, deadline: float) -> Question:
        """A JSON object; images are decoded while there is time."""
        try:
            question = {name: value for name, value in self.model.model_validate_json(body) if value is not None}
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            kind, field = first["type"], str(*first["loc"][:1])
            require(kind != "json_invalid", "the body is not valid JSON", 400)
            message = f"{field}: {self.expected[field]}" if field in self.expected else self.usage
            raise HTTPException(413 if kind == "too_long" and len(first["loc"]) == 1 else 422, message) from None
        except (OverflowError, RecursionError, MemoryError):
            raise HTTPException(422, self.usage) from None
        require(len(question) - ("utility" in question) == 1, self.usage)
        if "images" in question:
            question["images"] = self._decode(question["images"], deadline)
        return question

    def read_image(self, body: bytes, deadline: float) -> Question:
        """A body that is one image file."""
        expected = f"expected arrays of samples of shape {self.backend.input_shape}"
        require(self.backend.files, f"this model does not accept image files: {expected}")
        return {"images": self._decode([body], deadline)}

    def _decode(self, files: list[bytes], deadline: float) -> NDArray[Any]:
        """uint8 (n, channels, H, W); all headers are checked before a pixel is decoded."""
        from PIL import Image

        images, total, limits = [], 0, self.limits
        most = f"expected at most {limits.pixels:,} pixels per image and {limits.total_pixels:,} per request"
        for place, file in enumerate(files):
            size, usable = 0, False
            try:
                image = Image.open(io.BytesIO(file), formats=FORMATS)
                size, usable = image.width * image.height, not unusable(image)
                images.append(image)
            except Image.DecompressionBombError:
                size = limits.pixels + 1
            except Exception:  # damaged files make decoders fail in many ways
                usable = False
            total += size
            require(size <= limits.pixels and total <= limits.total_pixels, f"image {place}: {most}", 413)
            require(usable, f"image {place}: {IMAGE}")
        samples, (channels, side, _) = (
            np.empty((len(images), *self.backend.input_shape), np.uint8),
            self.backend.input_shape,
        )
        for place, image in enumerate(images):
            if time.monotonic() > deadline:  # the request has been answered with 503
                raise TimeoutError
            try:
                samples[place] = planes(fitted(image, side, channels, self.backend.centre))
            except Exception:
                raise HTTPException(422, f"image {place}: {IMAGE}") from None
        return samples

    def _base64(self, given: list[str]) -> list[bytes]:
        return [base64.b64decode(text, validate=True) for text in given]

    def _arrays(self, given: list[Any]) -> NDArray[Any]:
        with np.errstate(over="ignore"):
            samples = np.array(given, np.uint8 if self.backend.images else np.float32)
        _check(np.isfinite(samples).all())
        return samples

    def _rows(self, given: dict[str, list[Any]]) -> NDArray[Any]:
        assert self.backend.encoder is not None
        self._check_count(max(map(len, given.values()), default=0))
        return self.backend.encoder.transform(given)

    def _probabilities(self, given: list[Any]) -> Floats:
        array, weights = np.asarray(given), self.backend.decider.weights
        _check(array.dtype.kind in "iuf" and array.ndim in (2, 3) and array.shape[-1] == len(self.classes))
        array = array.astype(np.float64)[None] if array.ndim == 2 else array.astype(np.float64)
        self._check_count(array.shape[1])
        _check((array >= 0).all() and (np.abs(array.sum(axis=2) - 1) <= SUM_TOLERANCE).all())
        _check(weights is None or len(weights) == len(array))
        return array

    def _utility(self, given: UtilitySpec) -> Utility:
        _check(len(given.matrix) == len(self.classes) and len(given.matrix[0]) <= self.most_actions)
        return Utility(given.matrix, given.classes or self.classes, given.actions).with_classes(self.classes)

    def _check_count(self, count: int) -> None:
        _check(count)
        _check(count <= self.limits.samples, "too_long")


def _check(fits: Any, kind: str = "invalid") -> None:
    if not fits:
        raise PydanticCustomError(kind, "the message is that of EXPECTED")
