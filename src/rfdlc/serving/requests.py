"""Request and response models of POST /decide. Messages say what is expected and never
repeat what was sent.
"""

import base64
import io
import time
from collections.abc import Callable
from email.message import Message
from typing import Annotated, Any

import numpy as np
import pydantic
from fastapi import HTTPException
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import from_json

from rfdlc.data.images import fitted, planes, unusable
from rfdlc.decisions.utility import Utility
from rfdlc.errors import InputError, listing
from rfdlc.probabilities.scores import SUM_TOLERANCE, Floats
from rfdlc.serving.backend import Backend, Limits

FORMATS = (
    "PNG",
    "JPEG",
    "TIFF",
    "WEBP",
    "BMP",
    "GIF",
    "PPM",
)  # of the suffixes that training reads
KINDS = (
    "png",
    "jpeg",
    "tiff",
    "webp",
    "bmp",
    "gif",
    "x-portable-pixmap",
    "x-portable-graymap",
)
IMAGE_TYPES = tuple(f"image/{kind}" for kind in KINDS)
FORM, LINE = "multipart/form-data", b"\r\n"
IMAGE = (
    f"expected a complete file of {listing(FORMATS)}, grey or RGB with 8 bits per"
    " channel, not animated"
)
CLOSE, LATER = (
    {"connection": "close"},
    {"retry-after": "1"},
)  # after CLOSE the rest of the body is not read
HEADERS = {
    401: {"www-authenticate": "Bearer"},
    408: CLOSE,
    411: CLOSE,
    429: LATER,
    503: LATER,
}  # of refusals
PIXEL, NUMBER = (
    Annotated[int, Field(ge=0, le=255)],
    Annotated[float, Field(allow_inf_nan=False)],
)
CELL = bool | str | int | NUMBER | None  # of a table


def require(condition: Any, message: str, status: int = 422) -> None:
    """Refuse the request unless `condition` holds."""
    if not condition:
        raise HTTPException(status, message, HEADERS.get(status))


class FailFast(pydantic.FailFast):
    """Ends the validation of a list at its first error: a million errors would cost a
    gigabyte.
    """

    __hash__ = object.__hash__


def _list(item: Any, least: int = 0, most: int | None = None) -> Any:
    return Annotated[list[item], Field(min_length=least, max_length=most), FailFast()]


class UtilitySpec(BaseModel):
    """A utility: one row per class, one column per action; names are matched, not
    positions.
    """

    model_config = ConfigDict(
        extra="allow", strict=True, json_schema_extra={"additionalProperties": False}
    )

    matrix: _list(_list(NUMBER))  # type: ignore[valid-type]
    actions: _list(str) | None = None  # type: ignore[valid-type]
    classes: _list(str) | None = None  # type: ignore[valid-type]


class DecideResponse(BaseModel):
    """Columns with one entry per sample; the last four tables only with `full=true`."""

    action: list[str]
    expected_utility: list[float]
    reason: list[
        str
    ]  # of a hand-over, or why a sample that is worth handing over was kept
    argmax: list[str]
    probability: list[float]
    uncertainty: list[float]
    mutual_information: list[float] | None = None  # of two or more particles
    set: list[list[str]] | None = None  # of a decider with sets
    decider: str  # version of the decider
    warnings: list[str] | None = (
        None  # unseen categories and missing values, by column; images cut off
    )
    # where decisions are logged: what labels for POST /feedback are matched by
    id: list[str] | None = None
    classes: list[str] | None = None
    probabilities: list[list[float]] | None = None
    actions: list[str] | None = None
    expected_utilities: list[list[float]] | None = None


class Refusal(BaseModel):
    """Why a request was refused."""

    detail: str


class Reader:
    """Reads bodies for one model into {kind: array, "utility": Utility}; `schema`
    describes the JSON.
    """

    def __init__(self, backend: Backend, limits: Limits) -> None:
        self.served, self.limits, self.weights = (
            backend.inputs,
            limits,
            backend.decider.model.weights,
        )
        self.classes, shape, most = (
            backend.decider.utility.classes,
            self.served.input_shape,
            limits.samples,
        )
        self.images = len(shape) == 3
        self.files = (
            self.images and shape[1] == shape[2]
        )  # image files are resized to squares
        count, self.most_actions = (
            len(self.classes),
            max(limits.actions, 2 * len(self.classes)),
        )
        sample: Any = PIXEL if self.images else NUMBER
        for side in reversed(shape):
            sample = _list(sample, side, side)
        table = _list(_list(NUMBER, count, count), 1, most)
        readers: dict[str, tuple[Any, Callable[[Any], Any]]] = {
            "arrays": (_list(sample, 1, most), self._arrays),
            "probabilities": (table | _list(table, 1, most), self._probabilities),
            "utility": (UtilitySpec, self._utility),
        }
        if self.files:
            readers["images"] = (
                _list(str, 1, most),
                lambda texts: [base64.b64decode(t, validate=True) for t in texts],
            )
        if self.served.encoder:
            readers["rows"] = (
                dict[str, Any] | _list(dict[str, Any], 1, most),
                self._rows,
            )
            self.cells = TypeAdapter(
                _list(CELL, 1, most), config=ConfigDict(strict=True)
            )
        self.readers = {
            name: (TypeAdapter(kind), read) for name, (kind, read) in readers.items()
        }
        sides, numbers = (
            ", ".join(map(str, shape)),
            "integers from 0 to 255" if self.images else "finite numbers",
        )
        columns = (
            listing((c.name for c in self.served.encoder.columns), 40)
            if self.served.encoder
            else ""
        )
        # descriptions of the fields, and the answers to whatever is wrong with them
        self.expected = {
            "images": (
                f"expected 1 to {most} base64 strings (RFC 4648, without a data:"
                " prefix) of image files"
            ),
            "arrays": (
                f"expected nested lists of shape (1 to {most} samples, {sides}) with"
                f" {numbers}"
            ),
            "rows": (
                f"expected {{column: cells}} with {columns}: lists of equal length, 1"
                f" to {most} texts or numbers; or a list of {{column: cell}}, one"
                " per row"
            ),
            "probabilities": (
                f"expected nested lists of shape (1 to {most} samples, {count}), or"
                f" (particles, samples, {count}) with all particles of the model:"
                " numbers from 0 to 1, and rows that sum to 1"
            ),
            "utility": (
                f"expected a matrix with {count} rows, one per class, and at most"
                f" {self.most_actions} columns, one per action, and optionally actions"
                " and classes (the model's) as lists of distinct strings"
            ),
        }
        kinds = [name for name in self.readers if name != "utility"]
        self.usage = (
            f"expected a JSON object with exactly one of {listing(kinds)}, and"
            " optionally utility"
        )
        schemas = {
            name: adapter.json_schema() for name, (adapter, _) in self.readers.items()
        }
        properties = {
            name: {**each, "description": self.expected[name]}
            for name, each in schemas.items()
        }
        rules = {
            "oneOf": [{"required": [kind]} for kind in kinds],
            "additionalProperties": False,
        }
        self.schema = {"type": "object", "properties": properties, **rules}
        self.sets = backend.decider.sets is not None

    def read_json(self, body: bytes, deadline: float) -> dict[str, Any]:
        """A JSON object; images are decoded while there is time."""
        try:
            given = from_json(body, allow_inf_nan=False)
        except ValueError:
            raise HTTPException(400, "the body is not valid JSON") from None
        return self.read_question(given, deadline)

    def read_question(self, given: Any, deadline: float) -> dict[str, Any]:
        """What a JSON object asks, checked."""
        require(
            isinstance(given, dict) and given.keys() <= self.readers.keys(), self.usage
        )
        require(len(given.keys() - {"utility"}) == 1, self.usage)
        question = {name: self._read(name, value) for name, value in given.items()}
        if "images" in question:
            question |= self._decode(question["images"], deadline)
        if "rows" in question:
            question["rows"], doubts = question["rows"]
            question |= {"warnings": doubts} if doubts else {}
        return question

    def _read(self, name: str, value: Any) -> Any:
        adapter, read = self.readers[name]
        try:
            return read(adapter.validate_python(value, strict=True))
        except ValidationError as error:
            most = self.limits.samples
            if any(
                each["type"] == "too_long" and each["ctx"]["max_length"] == most
                for each in error.errors()
            ):
                parts = (
                    f"more than {most} samples in one request: send them in parts of at"
                    f" most {most}"
                )
                raise HTTPException(
                    413, f"{name}: {parts}; {self.expected[name]}"
                ) from None
            status = 422
        except (ValueError, KeyError, OverflowError, RecursionError, MemoryError):
            status = 422
        raise HTTPException(status, f"{name}: {self.expected[name]}")

    def read_image(self, body: bytes, deadline: float) -> dict[str, Any]:
        """A body that is one image file."""
        return self._files([body], deadline)

    def read_form(self, given: tuple[bytes, bytes], deadline: float) -> dict[str, Any]:
        """The content type and the body of a form (RFC 7578), whose parts are image
        files.
        """
        head, most = Message(), self.limits.samples
        head["Content-Type"] = given[0].decode("latin-1")
        boundary = str(head.get_boundary("")).encode("latin-1", "replace")
        expected = (
            f"expected {FORM} with 1 to {most} image files, as curl -F file=@a.png -F"
            " file=@b.png sends them"
        )
        require(boundary, expected)
        # What precedes the first boundary, the parts, and what follows the last one,
        # which ends with two dashes.
        _, *parts = (LINE + given[1]).split(LINE + b"--" + boundary, most + 1)
        require(len(parts) <= most or parts[-1].startswith(b"--"), expected, 413)
        require(len(parts) > 1 and parts[-1].startswith(b"--"), expected)
        return self._files(
            [part.partition(2 * LINE)[2] for part in parts[:-1]], deadline
        )

    def _files(self, files: list[bytes], deadline: float) -> dict[str, Any]:
        expected = f"expected arrays of samples of shape {self.served.input_shape}"
        require(self.files, f"this model does not accept image files: {expected}")
        return self._decode(files, deadline)

    def _decode(self, files: list[bytes], deadline: float) -> dict[str, Any]:
        """As uint8 (n, channels, H, W), with warnings; all headers are checked before a
        pixel is decoded.
        """
        from PIL import Image

        images, total, limits, (channels, side, _) = (
            [],
            0,
            self.limits,
            self.served.input_shape,
        )
        most = (
            f"expected at most {limits.pixels:,} pixels per image and"
            f" {limits.total_pixels:,} per request"
        )
        for place, file in enumerate(files):
            size, usable = 0, False
            try:
                images.append(Image.open(io.BytesIO(file), formats=FORMATS))
                size, usable = (
                    images[-1].width * images[-1].height,
                    not unusable(images[-1]),
                )
            except Image.DecompressionBombError:
                size = limits.pixels + 1
            except Exception:  # damaged files make decoders fail in many ways
                usable = False
            total += size
            require(
                size <= limits.pixels and total <= limits.total_pixels,
                f"image {place}: {most}",
                413,
            )
            require(usable, f"image {place}: {IMAGE}")
        samples, resizing = (
            np.empty((len(images), channels, side, side), np.uint8),
            self.served.resizing,
        )
        cut = np.array([resizing.cut(*image.size) for image in images], np.float32)
        for place, image in enumerate(images):
            if time.monotonic() > deadline:  # the request has been answered with 503
                raise TimeoutError
            try:
                samples[place] = planes(fitted(image, side, channels, resizing))
            except Exception:
                raise HTTPException(422, f"image {place}: {IMAGE}") from None
        told = resizing.cut_warning(
            cut, getattr(self.served, "embedding", None) is not None
        )
        return {"images": samples} | ({"warnings": [told]} if told else {})

    def _arrays(self, given: list[Any]) -> NDArray[Any]:
        with np.errstate(over="ignore"):
            samples = np.array(given, np.uint8 if self.images else np.float32)
        _check(np.isfinite(samples).all())
        return samples

    def _rows(
        self, given: dict[str, Any] | list[dict[str, Any]]
    ) -> tuple[NDArray[Any], list[str]]:
        """Features, and what is unlike in training: unseen categories, numbers far
        outside, missing values.
        """
        names = [column.name for column in self.served.encoder.columns]
        held = (
            set.intersection(*map(set, given))
            if isinstance(given, list)
            else set(given)
        )
        absent = [name for name in names if name not in held]
        require(
            not absent,
            f"rows: there is no column {listing(absent)}: {self.expected['rows']}",
        )
        if isinstance(given, list):
            given = {name: [row[name] for row in given] for name in names}
        cells = {name: self._cells(name, given[name]) for name in names}
        doubts = list[str]()
        try:
            return self.served.encoder.transform(cells, doubts), doubts
        except InputError:  # answers name the column, never a cell
            for column in self.served.encoder.columns:
                kind = "dates" if column.is_date else "numbers"
                require(
                    _fits(column, cells),
                    f"rows: {column.name!r}: expected {kind} as in training, or null",
                )
            raise

    def _cells(self, name: str, given: Any) -> list[Any]:
        try:
            return list(self.cells.validate_python(given))
        except ValidationError as error:
            fits = not isinstance(given, list) or "too_long" in {
                each["type"] for each in error.errors()
            }
            require(
                fits,
                f"rows: {name!r}: expected a list of texts, finite numbers, true, false"
                " or null",
            )
            raise

    def _probabilities(self, given: list[Any]) -> Floats:
        array = np.array(given, np.float64)
        array = array[None] if array.ndim == 2 else array
        _check(
            (array >= 0).all()
            and (np.abs(array.sum(axis=2) - 1) <= SUM_TOLERANCE).all()
        )
        _check(self.weights is None or len(array) in (1, len(self.weights)))
        return array

    def _utility(self, given: UtilitySpec) -> Utility:
        fits = (
            len(given.matrix) == len(self.classes)
            and len(given.matrix[0]) <= self.most_actions
        )
        _check(fits and not given.model_extra)
        return Utility(
            given.matrix, given.classes or self.classes, given.actions
        ).with_classes(self.classes)


def _fits(column: Any, cells: dict[str, Any]) -> bool:
    try:
        column.transform(cells[column.name], [])
    except InputError:
        return False
    return True


def _check(fits: Any) -> None:
    if not fits:
        raise ValueError  # the answer is what the field expects
