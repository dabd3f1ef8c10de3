"""Cells of tables as they are read: numbers, dates, or texts, and None for a missing
value.
"""

import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.errors import expect
from rfdlc.formats.dates import since_1970
from rfdlc.formats.tables import is_number, number

MISSING = frozenset({"", "na", "n/a", "#n/a", "nan", "null", "?", "<na>", "nat"})
MOST_CATEGORIES = 1000
# a column with a smaller share of texts among its different values was meant to hold
# numbers
FEW = 0.1
FEW_CATEGORIES = (
    20  # a column with more different numbers, or identifiers, hardly holds categories
)
NAMING = (
    0.99  # a column with more different texts than this share of the rows names rows
)
LARGEST = float(
    np.finfo(np.float32).max
)  # features are 32 bits wide: beyond it they would be infinite
TOO_LARGE = "column {!r} has an infinite or too large value in row {} ({}): "
TOO_LARGE += f"expected numbers up to {LARGEST:.1e}, or none"
DIGITS = re.compile(r"\d+", re.ASCII)

Column = NDArray[
    Any
    # float64 with nan, datetime64 with NaT, or objects: text, and None for a missing
    # value
]
Cells = Any  # as they are read: a sequence, an array, or a column of pyarrow


def as_text(value: Any) -> str | None:
    if isinstance(value, bytes):  # some programs write texts of Parquet files so
        value = value.decode("utf-8", "backslashreplace")
    text = "" if value is None else str(value).strip()
    return None if text.lower() in MISSING else text


def text_column(cells: Cells) -> Column:
    if hasattr(cells, "null_count"):
        return _arrow_texts(cells).to_numpy(zero_copy_only=False)
    return np.array([as_text(cell) for cell in cells], dtype=object)


def parse_column(
    name: str, cells: Cells, *, codes: bool = True, start: int = 0
) -> Column:
    """Numbers or dates if every cell that is not missing is one, otherwise text; so are
    `codes`, unless too many.

    Messages count rows from `start` on.
    """
    numbers = None if _is_typed_date(cells) else _numbers(cells)
    if numbers is None:
        return _dates(cells)
    if codes and holds_codes(cells):
        texts = text_column(cells)
        different = len({*texts} - {None})
        if different <= MOST_CATEGORIES or different == len(
            texts
        ):  # the latter name rows
            return texts
    for row in np.flatnonzero(np.abs(numbers) > LARGEST)[:1]:
        expect(
            False,
            TOO_LARGE.format(
                name, start + row + 1, text_column(cells[row : row + 1])[0]
            ),
        )
    return np.full(len(numbers), None) if np.isnan(numbers).all() else numbers


def are_numbers(cells: Cells) -> bool:
    """Whether all cells are numbers that a feature can hold, or missing."""
    numbers = None if _is_typed_date(cells) else _numbers(cells)
    return numbers is not None and not (np.abs(numbers) > LARGEST).any()


def _numbers(cells: Cells) -> NDArray[np.float64] | None:
    if hasattr(cells, "null_count"):  # a column of pyarrow
        from pyarrow import ArrowException, compute, float64, types

        for clean in (
            () if types.is_boolean(cells.type) else (False, True)
        ):  # most columns need no cleaning
            with suppress(ArrowException):
                found = _arrow_texts(cells) if clean else cells
                return compute.cast(found, float64(), safe=False).to_numpy(
                    zero_copy_only=False
                )
        return None
    if isinstance(cells, np.ndarray) and cells.dtype.kind in "iuf":
        return cells.astype(np.float64, copy=False)
    with suppress(ValueError):
        return np.array(
            [np.nan if text is None else number(text) for text in map(as_text, cells)],
            dtype=np.float64,
        )
    return None


def holds_codes(cells: Cells) -> bool:
    """Whether cells are digits, some with leading zeros, as in postal codes (01067)."""
    if hasattr(cells, "null_count"):
        from pyarrow import compute

        text = (
            "string" in str(cells.type) and not cells.type.num_fields
        )  # no list; the first characters mostly tell
        if (
            not text
            or not compute.any(
                compute.match_substring_regex(cells.cast("string"), r"^\s*0\d")
            ).as_py()
        ):
            return False
    elif isinstance(cells, np.ndarray) and cells.dtype != object:
        return False
    texts = [text for text in text_column(cells) if text is not None]
    return any(re.match(r"0\d", text) for text in texts) and all(
        map(DIGITS.fullmatch, texts)
    )


def _is_typed_date(cells: Cells) -> bool:
    if hasattr(cells, "null_count"):
        return str(cells.type).startswith(("timestamp", "date"))
    return isinstance(cells, np.ndarray) and cells.dtype.kind == "M"


def _dates(cells: Cells) -> Column:
    """Dates if every cell that is not missing is one, otherwise text."""
    if _is_typed_date(cells):
        dates = (
            cells.to_numpy(zero_copy_only=False)
            if hasattr(cells, "null_count")
            else cells
        )
    else:
        times, texts = list[timedelta | None](), text_column(cells)
        for text in texts:
            times.append(None if text is None else since_1970(text))
            if text is not None and times[-1] is None:
                return texts
        dates = np.array(times, "timedelta64[us]").view("datetime64[us]")
    return np.full(len(dates), None) if np.isnat(dates).all() else dates


def stray_texts(column: Iterable[str | None]) -> tuple[str, ...]:
    """The few texts, such as `unknown` or `<5`, of a column that otherwise holds many
    different numbers.

    None of whole numbers that hardly repeat: with texts among them, they name rows.
    """
    given = [text for text in column if text is not None]
    texts = {*given}
    strays = sorted(text for text in texts if not is_number(text))
    if len(texts) <= FEW_CATEGORIES or not len(strays) < FEW * len(texts):
        return ()
    names = len(texts) > NAMING * len(given) and all(
        map(DIGITS.fullmatch, texts.difference(strays))
    )
    return (
        () if names or any(re.match(r"0\d", text) for text in texts) else tuple(strays)
    )


def without(cells: Cells, texts: Collection[str]) -> Cells:
    """Cells in which these texts are missing values."""
    if not texts or (
        isinstance(cells, np.ndarray) and cells.dtype != object
    ):  # the latter were read before
        return cells
    return np.array(
        [None if text in texts else text for text in text_column(cells)], dtype=object
    )


def category_column(cells: Cells) -> Column:
    """Cells as texts, whatever they hold; whole numbers are written alike, also where
    missing ones made them floats.
    """
    texts = text_column(cells)
    return np.array(
        [
            None if text is None else re.sub(r"^(-?\d+)\.0$", r"\1", text)
            for text in texts
        ],
        dtype=object,
    )


def as_numbers(column: Column) -> NDArray[np.float64]:
    """Numbers as they are, dates as days since 1970-01-01."""
    dates = column.dtype.kind == "M"
    return (
        (column - np.datetime64(0, "D")) / np.timedelta64(1, "D")
        if dates
        else column.astype(np.float64, copy=False)
    )


def _arrow_texts(column: Any) -> Any:
    from pyarrow import array, compute, string, types

    kind = column.type.value_type if types.is_dictionary(column.type) else column.type
    if not (types.is_string(kind) or types.is_large_string(kind)):
        return array([as_text(cell) for cell in column.to_pylist()], string())
    texts = compute.utf8_trim_whitespace(column.cast(string()))
    return compute.if_else(
        compute.is_in(compute.utf8_lower(texts), value_set=array(sorted(MISSING))),
        None,
        texts,
    )
